"""Which processes and mounts on this host belong to a private engine, and ending them.

All of it can be told from ``/proc`` and ``/sys`` alone, so what an engine that was killed left
behind is found whatever a pid file says.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainyard.layout import Layout, engine_cgroups
from trainyard.model import StepFailed
from trainyard.network import in_pool, read_pool

STOP_SECONDS = 30.0

Kind = Literal["dockerd", "containerd", "shim", "runc", "proxy", "container"]


# -- processes -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """A process of the private engine."""

    pid: int
    kind: Kind
    argv: tuple[str, ...]


def classify(argv: Sequence[str], cgroups: str, at: Layout) -> Kind | None:
    """What a process is to the engine of ``at``; None where nothing proves that it is ours.

    Args:
        argv: the process's command line; empty for kernel threads and zombies.
        cgroups: the text of ``/proc/PID/cgroup``.
        at: whose processes are looked for.
    """
    if not argv:
        return None
    name = os.path.basename(argv[0])
    if name == "dockerd" and _option(argv, "--data-root") == str(at.data):
        return "dockerd"
    if name == "containerd" and _option(argv, "--config") == str(at.containerd_config):
        return "containerd"
    shim = name.startswith("containerd-shim")
    if shim and _option(argv, "-address") == str(at.containerd_socket):
        return "shim"
    if name == "runc" and any(_inside(word, at) for word in argv[1:]):
        return "runc"
    if name == "docker-proxy" and in_pool(_option(argv, "-container-ip"), read_pool(at)):
        return "proxy"
    names = engine_cgroups(cgroups)
    inner = names[len(at.within) :] if names[: len(at.within)] == at.within else names
    return "container" if inner[:1] == (at.cgroup,) else None


def _option(argv: Sequence[str], name: str) -> str | None:
    for index, word in enumerate(argv):
        if word == name and index + 1 < len(argv):
            return argv[index + 1]
        if word.startswith(name + "="):
            return word.partition("=")[2]
    return None


def _inside(word: str, at: Layout) -> bool:
    return word.startswith((f"{at.data}/", f"{at.run}/"))


def owned_processes(at: Layout, proc: Path = Path("/proc")) -> list[Process]:
    """Every living process that is proven to belong to the engine of ``at``."""
    found = []
    for entry in proc.iterdir():
        if entry.name.isdigit() and int(entry.name) not in (os.getpid(), os.getppid()):
            process = _inspect(int(entry.name), at, proc)
            if process:
                found.append(process)
    return found


def _inspect(pid: int, at: Layout, proc: Path = Path("/proc")) -> Process | None:
    try:
        raw = (proc / str(pid) / "cmdline").read_bytes()
        cgroups = (proc / str(pid) / "cgroup").read_text()
    except OSError:  # it ended meanwhile
        return None
    argv = tuple(os.fsdecode(word) for word in raw.split(b"\0")[:-1])
    kind = classify(argv, cgroups, at)
    return Process(pid, kind, argv) if kind else None


# -- mounts --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo."""

    point: Path
    fstype: str


def parse_mountinfo(text: str) -> list[Mount]:
    """Read ``/proc/self/mountinfo`` (proc(5)): octal escapes are undone."""
    found = []
    for line in text.splitlines():
        before, dash, after = line.partition(" - ")
        fields = before.split(" ")
        if dash and len(fields) > 4:
            found.append(Mount(Path(_unescape(fields[4])), after.split(" ")[0]))
    return found


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def owned_mounts(at: Layout, mounts: Iterable[Mount]) -> list[Path]:
    """The engine's mount points, deepest and latest first.

    The state folder and the folders of images may be mounts of the user's (a large disk), so
    those themselves do not count, unless the engine noted that it made the mount.
    """
    users = {at.root, at.containerd_data}
    if not (at.exec_root / "unmount-on-shutdown").exists():  # dockerd's note to itself
        users.add(at.data)
    points = [m.point for m in mounts if at.root in (m.point, *m.point.parents)]
    ours = [point for point in points if point not in users]
    return sorted(reversed(ours), key=lambda point: -len(point.parts))


# -- ending them ---------------------------------------------------------------------------


def terminate(at: Layout, kind: Kind) -> list[str]:
    """Ask the processes of one kind to end, and wait; those that did, in words."""
    running = [process for process in owned_processes(at) if process.kind == kind]
    for process in running:
        _signal(process, signal.SIGTERM, at)
    deadline = time.monotonic() + STOP_SECONDS
    while _alive(running, at) and time.monotonic() < deadline:
        time.sleep(0.1)
    alive = _alive(running, at)
    return [f"stopped {kind} ({process.pid})" for process in running if process not in alive]


def _alive(processes: Sequence[Process], at: Layout) -> list[Process]:
    return [process for process in processes if _inspect(process.pid, at)]


def kill_all(at: Layout) -> list[str]:
    """End every process of the engine, the daemons first; which, in words.

    Raises:
        StepFailed: some do not end.
    """
    done: dict[int, str] = {}
    deadline = time.monotonic() + STOP_SECONDS
    while left := owned_processes(at):
        order = sorted(left, key=lambda p: p.kind not in ("dockerd", "containerd"))
        for process in order:
            _signal(process, signal.SIGKILL, at)
            done[process.pid] = f"ended {process.kind} {process.pid}"
        if time.monotonic() > deadline:
            pids = " ".join(str(process.pid) for process in left)
            raise StepFailed(f"These processes of the private engine do not end: {pids}")
        time.sleep(0.05)
    return list(done.values())


def _signal(process: Process, number: signal.Signals, at: Layout) -> None:
    """Signal exactly this process: a pid that was reused meanwhile is left alone."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        again = _inspect(process.pid, at)
        if again and again.kind == process.kind:
            signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def unmount(at: Layout) -> list[str]:
    """Unmount whatever the engine mounted; how much, in words.

    Raises:
        StepFailed: a mount stays.
    """
    count = 0
    for _ in range(5):  # mounts may lie on top of each other
        mounts = parse_mountinfo(Path("/proc/self/mountinfo").read_text())
        points = owned_mounts(at, mounts)
        if not points:
            break
        for point in points:
            count += _run_quietly("umount", "-l", str(point))
    else:
        raise StepFailed(f"Something under {at.root} cannot be unmounted: {points[0]}")
    return [f"unmounted {count} leftovers"] if count else []


def _run_quietly(*argv: str) -> bool:
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def remove_cgroups(at: Layout) -> None:
    """Remove the engine's cgroups; one that is still in use stays."""
    base = Path("/sys/fs/cgroup")
    for top in (base / at.cgroup, *base.glob(f"*/{at.cgroup}")):
        for folder, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)
