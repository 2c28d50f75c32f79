"""The container engine: the host's own where it will do, else a private one.

:func:`ensure` answers with an :class:`EngineAddress`.  The private engine is a ``containerd`` and
a ``dockerd`` from the distribution's packages, run without systemd from a folder of their own
(``TRAINYARD_ENGINE_ROOT``, default ``/var/lib/trainyard``).  It shares nothing with another
engine on the same host: own sockets, own bridge, own address pool, own cgroup, own firewall
chains; the host's ``/etc/docker/daemon.json`` is not read.

Whatever belongs to it can be told from ``/proc`` and ``/sys`` alone (:mod:`trainyard.owned`),
so an engine that was killed is cleaned up by the next :func:`ensure`, whatever a pid file says.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard import apt, hostenv, network, owned, provision
from trainyard.address import (
    EngineAddress,
    buildx_version,
    choose_client,
    client_candidates,
    engine_info,
    host_engine,
    parse_version,
)
from trainyard.hostenv import Say, silent
from trainyard.layout import Layout, layout, locked
from trainyard.model import InputError, StepFailed
from trainyard.owned import Kind, owned_processes

START_SECONDS = 60.0


# -- which engine --------------------------------------------------------------------------


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
    found = host_engine()
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
        raise InputError(provision.advice(host_problem, "As root, Trainyard can start an engine of its own."))
    at = layout()
    with locked(at, say):
        if provision.missing_packages():
            provision.install_missing(say, host_problem)
            if host_problem and isinstance(found := host_engine(), EngineAddress):
                return found  # the packages brought it up (systemd), or only buildx was missing
        client = choose_client(client_candidates(os.environ))
        if client is None:
            raise InputError(provision.advice(host_problem, ""))
        if not _answers_soon(at, client, say):
            _start(at, client, say)
        return EngineAddress(at.host, private=True, client=client)


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
        network.connect(at)
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


# -- start ---------------------------------------------------------------------------------


def _start(at: Layout, client: Path, say: Say) -> None:
    _check_rights()
    done = _clean(at)
    if done:
        say(f"The private engine had not been stopped; cleaned up: {', '.join(done)}")
    say(f"Starting the private engine in {at.root}")
    for folder in (at.data, at.containerd_data, at.run, at.exec_root):
        folder.mkdir(mode=0o711, exist_ok=True)
    pool = network.choose_pool(at)
    if pool != network.read_pool(at):  # the networks that dockerd remembers have the old addresses
        shutil.rmtree(at.data / "network", ignore_errors=True)
        at.pool_file.write_text(f"{pool}\n")
    version = parse_version(hostenv.ask([str(hostenv.find_tool("dockerd")), "--version"]).stdout)
    at.dockerd_config.write_text(json.dumps(dockerd_config(at, pool, version), indent=2) + "\n")
    at.containerd_config.write_text(containerd_config(at))
    network.connect(at)
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


# -- the daemons' configuration ------------------------------------------------------------


def dockerd_flags(at: Layout) -> list[str]:
    """The flags that :func:`trainyard.owned.classify` needs to see; the rest is in :func:`dockerd_config`."""
    return [
        f"--data-root={at.data}",
        f"--exec-root={at.exec_root}",
        f"--pidfile={at.pidfile}",
        f"--host={at.host}",
        f"--containerd={at.containerd_socket}",
        f"--config-file={at.dockerd_config}",
        f"--cgroup-parent=/{at.cgroup}",
    ]


def dockerd_config(at: Layout, pool: ipaddress.IPv4Network, version: tuple[int, ...]) -> dict[str, Any]:
    """The engine's own daemon.json, for a dockerd of this version.

    Firewall rules are ours (:func:`trainyard.network.firewall_rules`): a dockerd that makes its
    own would empty the chains of another engine on this host when it starts.  Published ports
    work through docker-proxy.  The classic image store is asked for, since exporting a 6 GB
    image into containerd's took 15 times as long.

    The build cache may fill half of the disk, and then what was not used for longest goes.  The
    policy is spelled out, since the default one would first drop every cache mount that was not
    used for 48 hours (beyond 14% of the limit), and with them all compiled kernels:
    https://docs.docker.com/build/cache/garbage-collection/
    """
    half = shutil.disk_usage(at.root).total // 2 // 2**30  # dockerd's "GB" is 2**30 bytes
    nvidia = hostenv.find_tool("nvidia-container-runtime")
    mtu = network.uplink_mtu()
    # "mtu" is for the default network only, https://github.com/moby/moby/issues/34981; Docker 23 has no
    # setting for the others, and does not start with one that it does not know
    of_networks = {"default-network-opts": {"bridge": {"com.docker.network.driver.mtu": str(mtu)}}}
    return (of_networks if version >= (24,) else {}) | {
        "runtimes": {"nvidia": {"path": str(nvidia)}} if nvidia else {},
        "bridge": at.bridge,
        "mtu": mtu,
        "iptables": False,
        "ip6tables": False,
        "default-address-pools": [{"base": str(pool), "size": 24}],
        "group": "root",
        "shutdown-timeout": 10,
        "exec-opts": ["native.cgroupdriver=cgroupfs"],
        "features": {"containerd-snapshotter": False},
        "builder": {"gc": {"enabled": True, "policy": [{"keepStorage": f"{half}GB", "all": True}]}},
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


# -- stop, clean up, empty -----------------------------------------------------------------


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
    with locked(at, say):
        return _stop(at, say)


def _stop(at: Layout, say: Say) -> list[str]:
    done = owned.terminate(at, "dockerd") + owned.terminate(at, "containerd") + _clean(at)
    for line in done:
        say(line)
    return done


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
    with locked(at, say):
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
    done = owned.kill_all(at) + owned.unmount(at) + network.disconnect(at)
    owned.remove_cgroups(at)
    if at.run.exists():
        _delete_inside(at.run)
    return done


# -- for doctor ----------------------------------------------------------------------------


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


def status() -> EngineStatus:
    """Which engine :func:`ensure` would use now; starts and installs nothing.

    Raises:
        InputError: TRAINYARD_ENGINE or TRAINYARD_ENGINE_ROOT is wrong.
    """
    choice = _choice()
    found: EngineAddress | str = "not asked"
    if choice != "private":
        found = host_engine()
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
        return provision.advice(host_problem, "As root, Trainyard can start an engine of its own.")
    at = layout()
    client = choose_client(client_candidates(os.environ))
    if client and any(process.kind == "dockerd" for process in owned_processes(at)):
        return EngineAddress(at.host, private=True, client=client)
    try:
        _check_rights()
        missing = provision.missing_packages()
    except InputError as error:
        return str(error)
    if missing and not apt.has_apt():
        return provision.advice(host_problem, "")
    packages = f"These packages are missing: {' '.join(missing)}." if missing else None
    return " ".join(part for part in (host_problem, packages, _STARTS) if part)
