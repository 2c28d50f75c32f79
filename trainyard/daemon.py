"""The container engine: the host's own where it will do, else a private one.

:func:`ensure` answers with an :class:`EngineAddress`.  The private engine is a ``containerd`` and
a ``dockerd`` from the distribution's packages, run without systemd from a folder of their own
(``TRAINYARD_ENGINE_ROOT``, default ``/var/lib/trainyard``).  It shares nothing with another
engine on the same host: own sockets, own bridge, own address pool, own cgroup, own firewall
chains; the host's ``/etc/docker/daemon.json`` is not read.

Whatever belongs to it can be told from ``/proc`` and ``/sys`` alone (:func:`owned_processes`),
so an engine that was killed is cleaned up by the next :func:`ensure`, whatever a pid file says.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from trainyard import hostenv
from trainyard.hostenv import Say, silent
from trainyard.model import InputError, StepFailed

DEFAULT_ROOT = Path("/var/lib/trainyard")
MIN_BUILDX = (0, 13)
MIN_ENGINE = (23, 0)  # the first whose built-in BuildKit knows COPY --link and heredocs
START_SECONDS = 60.0
STOP_SECONDS = 30.0
ASK_SECONDS = 20.0  # for one question to a docker client
POOLS = ("192.168.208.0/20", "172.30.240.0/20", "10.213.192.0/20", "10.87.64.0/20")
MAX_ROOT = 60  # bytes; a unix socket's path may have 107, and containerd adds its own names

Kind = Literal["dockerd", "containerd", "shim", "runc", "proxy", "container"]


# -- addresses and clients -----------------------------------------------------------------


@dataclass(frozen=True)
class EngineAddress:
    """Where the engine is and which client to use for it."""

    host: str  # a value for DOCKER_HOST: unix:///... tcp://... ssh://...
    private: bool
    client: Path  # a docker client that has buildx

    def environ(self) -> dict[str, str]:
        """This process's environment, with what makes ``client`` and the SDK use ``host``.

        DOCKER_CONTEXT goes, since it would win over DOCKER_HOST
        (https://docs.docker.com/reference/cli/docker/#environment-variables), and so does a
        BUILDX_BUILDER of the user's where the engine is private: it belongs to another engine.
        """
        env = {k: v for k, v in os.environ.items() if k != "DOCKER_CONTEXT"}
        env["DOCKER_HOST"] = self.host
        if self.private:
            for name in ("DOCKER_TLS", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"):
                env.pop(name, None)
            env["BUILDX_BUILDER"] = "default"
        return env


@dataclass(frozen=True)
class EngineStatus:
    """What :func:`status` found without starting anything."""

    address: EngineAddress | None
    problem: str | None  # why there is no address; None where there is one
    startable: bool = False  # there is no address, but ensure() can start a private engine
    version: str = ""
    driver: str = ""  # overlay2
    containerd_store: bool = False  # images lie in containerd's store: slow to export
    data_root: str = ""
    runtimes: tuple[str, ...] = ()
    buildx: str = ""


def parse_version(text: str) -> tuple[int, ...]:
    """The first dotted number in a text: ``buildx 0.13.1+ds1`` gives (0, 13, 1); () if none."""
    match = re.search(r"(?<![\w.])v?(\d+(?:\.\d+)+)", text)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def client_candidates(environ: Mapping[str, str]) -> list[Path]:
    """Every ``docker`` on PATH in its order, then Debian's, each file once."""
    folders = [*environ.get("PATH", os.defpath).split(os.pathsep), "/usr/bin", "/usr/local/bin"]
    found: dict[Path, Path] = {}
    for folder in folders:
        path = Path(folder) / "docker"
        if folder and path.is_file() and os.access(path, os.X_OK):
            found.setdefault(path.resolve(), path)
    return list(found.values())


@cache
def buildx_version(client: Path) -> tuple[int, ...]:
    """The version of a client's buildx plugin; () where it has none."""
    done = _ask([str(client), "buildx", "version"])
    return parse_version(done.stdout) if done.returncode == 0 else ()


def choose_client(
    candidates: Iterable[Path], version: Callable[[Path], tuple[int, ...]] = buildx_version
) -> Path | None:
    """The first client whose buildx is new enough; None if there is none."""
    return next((client for client in candidates if version(client) >= MIN_BUILDX), None)


def _ask(argv: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a short question; a hang or a missing program is a return code of 124 or 127."""
    try:
        return subprocess.run(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ASK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", f"no answer in {ASK_SECONDS:.0f} s")
    except OSError as error:
        return subprocess.CompletedProcess(argv, 127, "", str(error))


def engine_info(client: Path, env: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """``docker info`` of the engine that ``env`` points at: the fields, or {} and the reason."""
    done = _ask([str(client), "info", "--format", "{{json .}}"], env)
    try:
        info = json.loads(done.stdout.strip().splitlines()[0])
    except (ValueError, IndexError):
        info = {}
    if info.get("ServerVersion") and not info.get("ServerErrors"):
        return dict(info), ""
    errors = info.get("ServerErrors") or [hostenv.tail(done.stderr, 3) or "no answer"]
    return {}, "; ".join(str(error) for error in errors)


def _host_engine() -> EngineAddress | str:
    """The engine that the user's docker settings point at, or why it will not do."""
    named = os.environ.get("DOCKER_HOST", "")
    candidates = client_candidates(os.environ)
    client = choose_client(candidates)
    if client is None:
        return _no_client(candidates)
    host = named or _context_host(client)
    info, reason = engine_info(client, os.environ)
    if not info:
        return f"The Docker engine at {host or 'the default address'} does not answer: {reason}"
    if parse_version(str(info["ServerVersion"])) < MIN_ENGINE:
        version = info["ServerVersion"]
        return f"The Docker engine at {host} is {version}; {_least(MIN_ENGINE)} needed."
    return EngineAddress(host, private=False, client=client)


def _least(version: tuple[int, ...]) -> str:
    return "at least " + ".".join(map(str, version)) + " is"


def _no_client(candidates: Sequence[Path]) -> str:
    if not candidates:
        return "No docker client was found on PATH."
    names = ", ".join(map(str, candidates))
    return f"No docker client with buildx >= 0.13 was found (looked at {names})."


def _context_host(client: Path) -> str:
    done = _ask([str(client), "context", "inspect", "--format", "{{.Endpoints.docker.Host}}"])
    return done.stdout.strip() or "unix:///var/run/docker.sock"


# -- where the private engine keeps its things ---------------------------------------------


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


@contextlib.contextmanager
def _locked(at: Layout, say: Say) -> Iterator[None]:
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


# -- what is ours on this host -------------------------------------------------------------


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
    if name == "docker-proxy" and _in_pool(_option(argv, "-container-ip"), read_pool(at)):
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


def _in_pool(address: str | None, pool: ipaddress.IPv4Network | None) -> bool:
    if address is None or pool is None:
        return False
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address) in pool
    return False


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


# -- start, recover, stop ------------------------------------------------------------------


def ensure(say: Say = silent) -> EngineAddress:
    """The engine to build with; starts (and where needed installs) the private one.

    The user's engine is used when DOCKER_HOST or the current docker context leads to one that is
    new enough.  ``TRAINYARD_ENGINE`` forces a choice: ``host`` or ``private``.

    Raises:
        InputError: there is no usable engine and none can be had; says what to install.
        StepFailed: the private engine did not start; holds the end of its log.
    """
    choice = _choice()
    if choice == "private":
        return _private_engine(say)
    found = _host_engine()
    if isinstance(found, EngineAddress):
        return found
    if choice == "host" or os.environ.get("DOCKER_HOST"):
        raise InputError(found)
    return _private_engine(say, found)


def _choice() -> str:
    choice = os.environ.get("TRAINYARD_ENGINE", "") or "auto"
    if choice not in ("auto", "host", "private"):
        raise InputError(f"TRAINYARD_ENGINE is 'host' or 'private' (or unset), not {choice!r}.")
    return choice


def _private_engine(say: Say, host_problem: str | None = None) -> EngineAddress:
    """Reuse, recover or start the private engine.

    Args:
        host_problem: why the host's engine will not do; None where it must not be used.
    """
    if not hostenv.is_root():
        raise InputError(_needs(host_problem, "As root, Trainyard can start an engine of its own."))
    at = layout()
    with _locked(at, say):
        if _missing(at):
            _install(at, say, host_problem)
            if host_problem and isinstance(found := _host_engine(), EngineAddress):
                return found  # the packages brought it up (systemd), or only buildx was missing
        client = choose_client(client_candidates(os.environ))
        if client is None:
            raise InputError(_needs(host_problem, ""))
        if not _answers_soon(at, client, say):
            _start(at, client, say)
        return EngineAddress(at.host, private=True, client=client)


def _needs(problem: str | None, hint: str) -> str:
    what = "Please install Docker with buildx >= 0.13 and start it, or set DOCKER_HOST."
    return " ".join(part for part in (problem, what, hint) if part)


def _answers_soon(at: Layout, client: Path, say: Say) -> bool:
    """Whether a whole private engine runs; waits for one that is just starting.

    Raises:
        StepFailed: a dockerd of ours runs but does not answer.  It may be busy with somebody's
            build, so ending it is left to the user.
    """
    kinds = {process.kind for process in owned_processes(at)}
    if not {"dockerd", "containerd"} <= kinds:
        return False
    if _wait_for_api(at, client, START_SECONDS):
        _connect(at)
        return True
    if not any(process.kind == "dockerd" for process in owned_processes(at)):
        return False
    raise StepFailed(f"The private engine runs but does not answer; see {at.log}, then stop it.")


def _wait_for_api(at: Layout, client: Path, seconds: float) -> bool:
    env = EngineAddress(at.host, private=True, client=client).environ()
    return _wait(lambda: at.socket.exists() and bool(engine_info(client, env)[0]), at, "dockerd", seconds)


def _wait(true: Callable[[], bool], at: Layout, kind: Kind, seconds: float) -> bool:
    """Whether something comes true in time, while a process of this kind lives.

    A daemon that was just spawned gets 2 s to turn up among the processes.
    """
    began = time.monotonic()
    while not true():
        waited = time.monotonic() - began
        alive = any(process.kind == kind for process in owned_processes(at))
        if waited > seconds or not (alive or waited < 2.0):
            return False
        time.sleep(0.05)
    return True


def _start(at: Layout, client: Path, say: Say) -> None:
    _check_rights()
    done = _clean(at)
    if done:
        say(f"The private engine had not been stopped; cleaned up: {', '.join(done)}")
    say(f"Starting the private engine in {at.root}")
    for folder in (at.data, at.containerd_data, at.run, at.exec_root):
        folder.mkdir(mode=0o711, exist_ok=True)
    pool = choose_pool(at)
    if pool != read_pool(at):  # the networks that dockerd remembers have the old addresses
        shutil.rmtree(at.data / "network", ignore_errors=True)
        at.pool_file.write_text(f"{pool}\n")
    at.dockerd_config.write_text(json.dumps(dockerd_config(at, pool), indent=2) + "\n")
    at.containerd_config.write_text(containerd_config(at))
    _connect(at)
    at.log.write_bytes(b"")
    _spawn(at, "containerd", "--config", str(at.containerd_config))
    if not _wait(at.containerd_socket.exists, at, "containerd", START_SECONDS):
        raise _did_not_start(at, "containerd")
    _spawn(at, "dockerd", *dockerd_flags(at))
    if not _wait_for_api(at, client, START_SECONDS):
        raise _did_not_start(at, "dockerd")


def _did_not_start(at: Layout, what: str) -> StepFailed:
    log = hostenv.tail(at.log.read_text(errors="replace"), 15)
    _clean(at)
    return StepFailed(f"The private engine's {what} did not start. The end of {at.log}:\n{log}")


def _check_rights() -> None:
    """Root inside an ordinary container may neither mount nor make networks."""
    status = Path("/proc/self/status").read_text()
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    if match and int(match[1], 16) & (1 << 21) == 0:  # CAP_SYS_ADMIN, capabilities(7)
        raise InputError(
            "An engine cannot run inside this container. Start it with --privileged, or give it "
            "the host's engine and set DOCKER_HOST."
        )


def dockerd_flags(at: Layout) -> list[str]:
    """The flags that :func:`classify` needs to see; the rest is in :func:`dockerd_config`."""
    return [
        f"--data-root={at.data}",
        f"--exec-root={at.exec_root}",
        f"--pidfile={at.pidfile}",
        f"--host={at.host}",
        f"--containerd={at.containerd_socket}",
        f"--config-file={at.dockerd_config}",
        f"--cgroup-parent=/{at.cgroup}",
    ]


def dockerd_config(at: Layout, pool: ipaddress.IPv4Network) -> dict[str, Any]:
    """The engine's own daemon.json.

    Firewall rules are ours (:func:`firewall_rules`): a dockerd that makes its own would empty
    the chains of another engine on this host when it starts.  Published ports work through
    docker-proxy.  The classic image store is asked for, since exporting a 6 GB image into
    containerd's took 15 times as long.
    """
    size = shutil.disk_usage(at.root).total
    nvidia = hostenv.find_tool("nvidia-container-runtime")
    return {
        "runtimes": {"nvidia": {"path": str(nvidia)}} if nvidia else {},
        "bridge": at.bridge,
        "iptables": False,
        "ip6tables": False,
        "default-address-pools": [{"base": str(pool), "size": 24}],
        "group": "root",
        "shutdown-timeout": 10,
        "exec-opts": ["native.cgroupdriver=cgroupfs"],
        "features": {"containerd-snapshotter": False},
        "builder": {"gc": {"enabled": True, "defaultKeepStorage": f"{size // 2 // 10**9}GB"}},
    }


def containerd_config(at: Layout) -> str:
    """The configuration of a containerd of our own.

    Left alone, dockerd would use a system containerd if there is one, and so share the
    namespace ``moby`` with the system's dockerd.
    """
    return (
        "version = 2\n"
        f"root = {json.dumps(str(at.containerd_data))}\n"
        f"state = {json.dumps(str(at.run / 'containerd'))}\n"
        'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n'
        "[grpc]\n"
        f"  address = {json.dumps(str(at.containerd_socket))}\n"
    )


def _spawn(at: Layout, name: str, *args: str) -> None:
    """Start a daemon that outlives this process and is nobody's child."""
    tool = hostenv.find_tool(name)
    if tool is None:
        raise InputError(f"Please install {name}.")
    dropped = ("DOCKER_", "NOTIFY_SOCKET", "LISTEN_", "CONTAINERD_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    env["PATH"] = env.get("PATH", os.defpath) + ":/usr/sbin:/sbin:/usr/bin:/bin"
    with at.log.open("ab") as log:
        subprocess.run(
            ["setsid", "--fork", str(tool), *args],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=env,
            check=True,
        )


def stop(say: Say = silent) -> list[str]:
    """Stop the private engine and everything in it; images and build cache stay.

    Returns:
        What was done, in words; empty where nothing ran and nothing was left over.

    Raises:
        InputError: not root.
        StepFailed: a process or a mount could not be removed.
    """
    at = layout()
    if not at.root.exists():
        return []
    if not hostenv.is_root():
        raise InputError("Only root can stop the private engine.")
    with _locked(at, say):
        return _stop(at, say)


def _stop(at: Layout, say: Say) -> list[str]:
    done = []
    for kind in ("dockerd", "containerd"):
        running = [process for process in owned_processes(at) if process.kind == kind]
        for process in running:
            _signal(process, signal.SIGTERM, at)
        deadline = time.monotonic() + STOP_SECONDS
        while _alive(running, at) and time.monotonic() < deadline:
            time.sleep(0.1)
        done += [f"stopped {kind} ({p.pid})" for p in running if p not in _alive(running, at)]
    done += _clean(at)
    for line in done:
        say(line)
    return done


def _alive(processes: Sequence[Process], at: Layout) -> list[Process]:
    return [process for process in processes if _inspect(process.pid, at)]


def purge(say: Say = silent) -> list[str]:
    """:func:`stop`, then delete the images, the build cache and the rest of the state folder.

    Raises:
        InputError: not root.
        StepFailed: something is still mounted in there, or a file cannot be deleted.
    """
    at = layout()
    if not at.root.exists():
        return []
    if not hostenv.is_root():
        raise InputError("Only root can remove the private engine.")
    with _locked(at, say):
        done = _stop(at, say)
        for path in (at.data, at.containerd_data):
            if path.is_dir():
                _delete_inside(path)
        files = (at.dockerd_config, at.containerd_config, at.pool_file, at.log)
        for path in files:
            path.unlink(missing_ok=True)
        for path in (at.data, at.containerd_data):
            with contextlib.suppress(OSError):  # a mount point of the user's stays
                path.rmdir()
        done.append(f"deleted the images and the build cache in {at.root}")
        say(done[-1])
        return done


def _delete_inside(folder: Path) -> None:
    """Delete what a folder holds; ``rm --one-file-system`` never follows a mount."""
    entries = [str(entry) for entry in folder.iterdir()]
    if not entries:
        return
    gone = subprocess.run(
        ["rm", "-rf", "--one-file-system", "--", *entries],
        capture_output=True,
        text=True,
        check=False,
    )
    if gone.returncode:
        raise StepFailed(f"{folder} cannot be emptied:\n{hostenv.tail(gone.stderr, 5)}")


def _clean(at: Layout) -> list[str]:
    """End and remove everything of an engine that should not be running (any more)."""
    done = _kill_all(at)
    done += _unmount(at)
    done += _disconnect(at)
    _remove_cgroups(at)
    stale = [path for path in (at.run,) if path.exists()]
    for path in stale:
        _delete_inside(path)
    return done


def _kill_all(at: Layout) -> list[str]:
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


def _unmount(at: Layout) -> list[str]:
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


def _remove_cgroups(at: Layout) -> None:
    base = Path("/sys/fs/cgroup")
    for top in (base / at.cgroup, *base.glob(f"*/{at.cgroup}")):
        for folder, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)


# -- network -------------------------------------------------------------------------------


def read_pool(at: Layout) -> ipaddress.IPv4Network | None:
    """The addresses that the engine of ``at`` hands out; None before its first start."""
    with contextlib.suppress(OSError, ValueError):
        return ipaddress.IPv4Network(at.pool_file.read_text().strip())
    return None


def used_networks(routes: str, resolv_conf: str) -> list[ipaddress.IPv4Network]:
    """What a new pool must not overlap: every routed network and every name server.

    Args:
        routes: the text of ``ip -4 route show table all``.
        resolv_conf: the text of ``/etc/resolv.conf``.
    """
    words = [word for line in routes.splitlines() for word in line.split()[:2]]
    words += re.findall(r"^\s*nameserver\s+(\S+)", resolv_conf, re.MULTILINE)
    found = []
    for word in words:
        with contextlib.suppress(ValueError):
            network = ipaddress.IPv4Network(word, strict=False)
            if network.prefixlen > 1:
                found.append(network)
    return found


def pick_pool(
    used: Iterable[ipaddress.IPv4Network], first: ipaddress.IPv4Network | None = None
) -> ipaddress.IPv4Network:
    """The first pool that overlaps nothing; ``first`` (the pool of last time) is tried first.

    Raises:
        StepFailed: all overlap.
    """
    taken = list(used)
    candidates = [ipaddress.IPv4Network(pool) for pool in POOLS]
    for pool in (*([first] if first else []), *candidates):
        if not any(pool.overlaps(network) for network in taken):
            return pool
    raise StepFailed(f"All of the address pools {', '.join(POOLS)} are in use on this host.")


def choose_pool(at: Layout) -> ipaddress.IPv4Network:
    """A free pool for the engine's networks."""
    routes = _ip("-4", "route", "show", "table", "all").stdout
    resolv = Path("/etc/resolv.conf")
    text = resolv.read_text() if resolv.exists() else ""
    return pick_pool(used_networks(routes, text), read_pool(at))


def _ip(*args: str) -> subprocess.CompletedProcess[str]:
    return _ask([str(hostenv.find_tool("ip") or "ip"), *args])


def firewall_rules(at: Layout, pool: ipaddress.IPv4Network) -> list[tuple[str, list[str]]]:
    """(table, rule) pairs: containers reach out and each other, and get the answers.

    FORWARD's policy may be DROP (another engine sets it), and traffic between containers passes
    there too where br_netfilter is loaded; hence both directions by address.
    """
    answers = ["-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED"]
    return [
        ("filter", [at.chain, "-s", str(pool), "-j", "ACCEPT"]),
        ("filter", [at.chain, "-d", str(pool), *answers, "-j", "ACCEPT"]),
        ("nat", [at.chain, "-s", str(pool), "!", "-d", str(pool), "-j", "MASQUERADE"]),
    ]


_HOOKS = (("filter", "FORWARD"), ("nat", "POSTROUTING"))


def _iptables(*args: str) -> subprocess.CompletedProcess[str]:
    return _ask([str(hostenv.find_tool("iptables") or "iptables"), "-w", "10", *args])


def _connect(at: Layout) -> None:
    """Make (or repair) the bridge and the firewall chains; both may exist already.

    Raises:
        StepFailed: the kernel or the rights do not allow it.
    """
    pool = read_pool(at)
    if pool is None:
        raise StepFailed(f"{at.pool_file} is damaged; stop the private engine and try again.")
    if not Path("/sys/class/net", at.bridge).exists():
        address = next(pool.subnets(new_prefix=24))[1]
        _must(_ip("link", "add", at.bridge, "type", "bridge"))
        _must(_ip("addr", "add", f"{address}/24", "dev", at.bridge))
        _must(_ip("link", "set", at.bridge, "up"))
    for table, hook in _HOOKS:
        if _iptables("-t", table, "-C", hook, "-j", at.chain).returncode:
            _iptables("-t", table, "-N", at.chain)
            _must(_iptables("-t", table, "-I", hook, "1", "-j", at.chain))
    for table, rule in firewall_rules(at, pool):
        if _iptables("-t", table, "-C", *rule).returncode:
            _must(_iptables("-t", table, "-A", *rule))


def _must(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        command = " ".join(map(str, done.args))
        raise StepFailed(f"The engine's network failed: {command}: {done.stderr.strip()}")


def _disconnect(at: Layout) -> list[str]:
    for table, hook in _HOOKS:
        if _iptables("-t", table, "-S", at.chain).returncode == 0:
            _iptables("-t", table, "-D", hook, "-j", at.chain)
            _iptables("-t", table, "-F", at.chain)
            _iptables("-t", table, "-X", at.chain)
    pool = read_pool(at)
    text = _ip("-j", "-4", "address", "show", "type", "bridge").stdout
    bridges = [at.bridge] if Path("/sys/class/net", at.bridge).exists() else []
    bridges += [name for name in bridges_in(pool, text) if name != at.bridge]
    for name in bridges:
        _ip("link", "delete", name)
    return [f"removed the bridge {name}" for name in bridges]


def bridges_in(pool: ipaddress.IPv4Network | None, addresses: str) -> list[str]:
    """The bridges that dockerd made for networks of its users: ``br-XXXXXXXXXXXX`` in the pool.

    Args:
        pool: the engine's addresses; None gives none.
        addresses: the text of ``ip -j -4 address show type bridge``.
    """
    try:
        links = json.loads(addresses or "[]")
    except ValueError:
        return []
    return [
        link["ifname"]
        for link in links
        if re.fullmatch(r"br-[0-9a-f]{12}", link.get("ifname", ""))
        and any(_in_pool(info.get("local"), pool) for info in link.get("addr_info", []))
    ]


# -- packages ------------------------------------------------------------------------------


def _missing(at: Layout) -> list[str]:
    """Debian package names for what a private engine lacks on this host; [] where complete.

    Raises:
        InputError: a dockerd is installed that is too old.
    """
    missing = []
    dockerd = hostenv.find_tool("dockerd")
    if dockerd is None:
        missing.append("docker.io")
    elif parse_version(version := _ask([str(dockerd), "--version"]).stdout) < MIN_ENGINE:
        raise InputError(_too_old(dockerd, version))
    if choose_client(client_candidates(os.environ)) is None:
        missing += ["docker-cli", "docker-buildx"]
    for tool in ("iptables", "ip"):
        if hostenv.find_tool(tool) is None:
            missing.append({"ip": "iproute2"}.get(tool, tool))
    if _apparmor_enabled() and hostenv.find_tool("apparmor_parser") is None:
        missing.append("apparmor")  # without it no container starts on such a kernel
    return missing


def _too_old(dockerd: Path, version: str) -> str:
    found = ".".join(map(str, parse_version(version))) or "of an unknown version"
    return (
        f"{dockerd} is {found}; {_least(MIN_ENGINE)} needed. Please upgrade it (on Debian 12, "
        "remove the packages docker.io and docker-cli and run this again)."
    )


def _apparmor_enabled() -> bool:
    with contextlib.suppress(OSError):
        return Path("/sys/module/apparmor/parameters/enabled").read_text().startswith("Y")
    return False


def _install(at: Layout, say: Say, host_problem: str | None) -> None:
    """Install what is missing from the distribution; on Debian 12 Docker comes from Debian 13.

    Debian 12 has Docker 20.10 and no buildx at all.  Debian 13's packages need only what
    Debian 12 has (libc6 >= 2.34), and nothing else may come from there.
    """
    missing = _missing(at)
    if not hostenv.has_apt():
        raise InputError(_needs(host_problem, ""))
    say(f"Looking for the packages {' '.join(missing)}")
    with hostenv.Apt(say) as apt:
        apt.update()
        if {"docker-buildx", "docker.io"} & set(missing) and not apt.offers("docker-buildx"):
            if hostenv.os_release().get("VERSION_CODENAME") != "bookworm":
                raise InputError(_needs(host_problem, "apt-get offers no docker-buildx here."))
            say("Debian 12 has no buildx: taking Docker's packages, and only those, from Debian 13")
            docker = ("docker.io", "docker-cli", "docker-buildx")
            apt.borrow(hostenv.BorrowedSuite("trixie", hostenv.debian_mirrors()[0], docker))
            apt.update()
        if "docker-cli" in missing and not apt.offers("docker-cli"):  # Ubuntu
            missing[missing.index("docker-cli")] = "docker.io"
        apt.install(missing)
    buildx_version.cache_clear()
    if still := _missing(at):
        raise StepFailed(f"apt-get installed everything, but this is still missing: {still}")


# -- for doctor ----------------------------------------------------------------------------


def status() -> EngineStatus:
    """Which engine :func:`ensure` would use now; starts and installs nothing.

    Raises:
        InputError: TRAINYARD_ENGINE or TRAINYARD_ENGINE_ROOT is wrong.
    """
    choice = _choice()
    found: EngineAddress | str = "not asked"
    if choice != "private":
        found = _host_engine()
    if isinstance(found, str) and choice != "host" and not os.environ.get("DOCKER_HOST"):
        found = _running_private(found if choice == "auto" else None)
    if isinstance(found, str):
        return EngineStatus(None, found, startable=found.endswith(_STARTS))
    info, reason = engine_info(found.client, found.environ())
    if not info:
        return EngineStatus(None, f"The engine at {found.host} does not answer: {reason}")
    return EngineStatus(
        address=found,
        problem=None,
        version=str(info.get("ServerVersion", "")),
        driver=str(info.get("Driver", "")),
        containerd_store=_uses_containerd_store(info),
        data_root=str(info.get("DockerRootDir", "")),
        runtimes=tuple(sorted(info.get("Runtimes") or {})),
        buildx=".".join(map(str, buildx_version(found.client))),
    )


def _uses_containerd_store(info: Mapping[str, Any]) -> bool:
    pairs = info.get("DriverStatus") or []
    return any("io.containerd.snapshotter" in str(value) for _, value in pairs)


_STARTS = "A build starts a private engine."


def _running_private(host_problem: str | None) -> EngineAddress | str:
    """The private engine if it runs; else why not, ending in ``_STARTS`` where it can be started."""
    if not hostenv.is_root():
        return _needs(host_problem, "As root, Trainyard can start an engine of its own.")
    at = layout()
    client = choose_client(client_candidates(os.environ))
    if client and any(process.kind == "dockerd" for process in owned_processes(at)):
        return EngineAddress(at.host, private=True, client=client)
    try:
        _check_rights()
        missing = _missing(at)
    except InputError as error:
        return str(error)
    if missing and not hostenv.has_apt():
        return _needs(host_problem, "")
    packages = f"These packages are missing: {' '.join(missing)}." if missing else None
    return " ".join(part for part in (host_problem, packages, _STARTS) if part)
