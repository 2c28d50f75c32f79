"""Do the services that were started here answer?

``start-sshd`` and ``start-jupyter`` leave the number of their port in ``<state>/<name>.port``.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping

from trainyard_node.checks import Finding, ok

SERVICES = ("sshd", "jupyter")
PATIENCE = 2.0  # seconds, for a connection and for what a server says first


def state_folder(env: Mapping[str, str], uid: int) -> str:
    """Where the services of this user keep their state."""
    return "/run/trainyard" if uid == 0 else f"{env.get('TMPDIR') or '/tmp'}/trainyard-{uid}"


def check(state: str, addresses: Iterable[str]) -> list[Finding]:
    """One finding for each service that was started here."""
    findings = []
    for name in SERVICES:
        path = os.path.join(state, f"{name}.port")
        try:
            with open(path, encoding="ascii", errors="replace") as file:
                text = file.read().strip()
            written = os.stat(path).st_mtime
        except OSError:
            continue
        if written < started() - 1:
            continue  # left over from before the container was started again
        findings.append(answers(name, text, addresses))
    return findings


def answers(name: str, port: str, addresses: Iterable[str]) -> Finding:
    """Connect to a service; sshd must also say that it is one."""
    remedy = f"look at the container's log, then start it again: start-{name}"
    if not port.isdigit() or not 0 < int(port) < 65536:
        return Finding("error", name, f"{name} left {port!r} as its port, which is no port", remedy)
    reason = "no address"
    for address in dict.fromkeys(("127.0.0.1", *addresses, "::1")):
        try:
            with socket.create_connection((address, int(port)), timeout=PATIENCE) as connection:
                if name != "sshd":
                    return ok(name, f"{name} answers on port {port}")
                banner = connection.recv(64)
                if banner.startswith(b"SSH-"):
                    return ok(name, f"sshd answers on port {port}")
                reason = f"what answers there says {banner[:20]!r}"
                break
        except OSError as error:
            if reason == "no address":
                reason = error.strerror or str(error)
    return Finding("error", name, f"{name} does not answer on port {port}: {reason}", remedy)


def started() -> float:
    """When PID 1, and so the container, was started: seconds since the epoch, 0 if unknown."""
    try:
        with open("/proc/1/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/stat", encoding="ascii") as file:
            boot = next(int(line.split()[1]) for line in file if line.startswith("btime "))
    except (OSError, ValueError, StopIteration, IndexError):
        return 0.0
    return boot + ticks / os.sysconf("SC_CLK_TCK")
