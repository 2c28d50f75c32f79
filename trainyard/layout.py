"""Where a private engine keeps its things: every path and name follows from its state folder."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trainyard.hostenv import Say
from trainyard.model import InputError, StepFailed

DEFAULT_ROOT = Path("/var/lib/trainyard")
MAX_ROOT = 60  # bytes; a unix socket's path may have 107, and containerd adds its own names


@dataclass(frozen=True)
class Layout:
    """Every path and name that the private engine of one state folder uses."""

    root: Path
    within: tuple[str, ...] = ()  # the engines in whose containers this process itself runs

    @cached_property
    def tag(self) -> str:
        """8 hex digits, one per state folder."""
        return hashlib.sha256("/".join((str(self.root), *self.within)).encode()).hexdigest()[:8]

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def containerd_data(self) -> Path:
        return self.root / "containerd"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def exec_root(self) -> Path:
        return self.run / "docker"

    @property
    def socket(self) -> Path:
        return self.run / "docker.sock"

    @property
    def containerd_socket(self) -> Path:
        return self.run / "containerd.sock"

    @property
    def pidfile(self) -> Path:
        return self.run / "dockerd.pid"

    @property
    def log(self) -> Path:
        return self.root / "dockerd.log"

    @property
    def dockerd_config(self) -> Path:
        return self.root / "daemon.json"

    @property
    def containerd_config(self) -> Path:
        return self.root / "containerd.toml"

    @property
    def pool_file(self) -> Path:
        return self.root / "pool"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def bridge(self) -> str:
        return f"yard-{self.tag}"  # an interface's name may have 15 bytes

    @property
    def cgroup(self) -> str:
        return f"trainyard-{self.tag}"

    @property
    def chain(self) -> str:
        return f"TRAINYARD-{self.tag}"

    @property
    def host(self) -> str:
        return f"unix://{self.socket}"


def layout() -> Layout:
    """The layout of the state folder that TRAINYARD_ENGINE_ROOT names.

    Raises:
        InputError: the folder's path is relative or too long for the sockets in it.
    """
    root = Path(os.environ.get("TRAINYARD_ENGINE_ROOT") or DEFAULT_ROOT)
    if not root.is_absolute() or root == Path("/"):
        raise InputError(f"TRAINYARD_ENGINE_ROOT must be an absolute folder, not {root}.")
    root = root.resolve()
    if len(os.fsencode(root)) > MAX_ROOT:
        raise InputError(f"TRAINYARD_ENGINE_ROOT may have {MAX_ROOT} bytes at most: {root}")
    return Layout(root, engine_cgroups(Path("/proc/self/cgroup").read_text()))


def engine_cgroups(cgroups: str) -> tuple[str, ...]:
    """The private engines in a ``/proc/PID/cgroup``, outermost first.

    More than one where an engine runs inside a container of another one.
    """
    for line in cgroups.splitlines():
        path = line.split(":", 2)[-1]
        names = re.findall(r"(?<=/)trainyard-[0-9a-f]{8}(?=/|$)", path)
        if names:
            return tuple(names)
    return ()


@contextlib.contextmanager
def locked(at: Layout, say: Say) -> Iterator[None]:
    """Hold the state folder's lock; says so when it has to wait."""
    try:
        at.root.mkdir(mode=0o711, parents=True, exist_ok=True)
        handle = os.open(at.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StepFailed(f"The engine's state folder {at.root} cannot be used: {error}") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Waiting for another trainyard to start or stop the engine")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
