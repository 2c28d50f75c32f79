"""Which interface do the other nodes see?

NCCL and gloo choose an interface by guessing (NCCL may take docker0, gloo resolves the own host
name).  The kernel knows better: the interface that routes to the master.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from trainyard_launch.errors import FAILED, LaunchError

VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@dataclass(frozen=True)
class Route:
    """How this node talks to the master: its own address, and the interface that has it."""

    address: str
    interface: str


def resolve(name: str, patience: float = 0.0) -> str:
    """The address of a host, waiting up to ``patience`` seconds for a name to appear.

    A headless service of Kubernetes has no record before its pod runs.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            found = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= deadline:
                reason = getattr(error, "strerror", None) or "it is no host name"
                message = f"the master's address {name} is not known here: {reason}"
                raise LaunchError(
                    f"{message}. Give an IP address, or make the name resolve", FAILED
                ) from None
            time.sleep(1)
            continue
        found.sort(key=lambda entry: entry[0] != socket.AF_INET)  # IPv4 first, as gloo takes it
        return str(found[0][4][0])


def route(address: str, interfaces: Sequence[tuple[str, str]]) -> Route | None:
    """The route to an IP address; nothing is sent.

    On the node that has the address, the kernel answers with the address itself (although the
    packets would pass through ``lo``), so the interface found is the one the others come in by.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    for name, has in interfaces:
        if has == own:
            return Route(own, name)
    return None


def free_port(wanted: int | None = None) -> int | None:
    """``wanted`` if nobody listens on it, any free port when None; None if it is taken."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", wanted or 0))
            probe.listen(1)
        except OSError:
            return None
        return int(probe.getsockname()[1])


def is_here(host: str, own_name: str, interfaces: Sequence[tuple[str, str]]) -> bool:
    """Is this host the machine we run on?  Unknown names are somewhere else."""
    host = host.rpartition("@")[2]
    if host in ("localhost", "127.0.0.1", "::1", own_name):
        return True
    addresses = {address for _name, address in interfaces}
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return False
    return any(str(entry[4][0]) in addresses for entry in found)
