"""Which interface do the other nodes see?

NCCL and gloo choose an interface by guessing (NCCL may take docker0, gloo resolves the own host
name).  The kernel knows better: the interface that routes to the master.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainyard_launch.errors import FAILED, LaunchError
from trainyard_launch.place import is_loopback

VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
QUIET = 5.0  # seconds to wait for a name before saying so
ANYWHERE = "192.0.2.1"  # RFC 5737: an address of nobody, for which the default route is taken


@dataclass(frozen=True)
class Route:
    """How this node talks to the master: its own address, and the interface that has it."""

    address: str
    interface: str


def resolve(name: str, patience: float = 0.0, say: Callable[[str], object] = lambda _text: None) -> str:
    """The address of a host, waiting up to ``patience`` seconds for a name to appear.

    A headless service of Kubernetes has no record before its pod runs.  ``say`` is told once that
    this waits.
    """
    began = time.monotonic()
    deadline = began + patience
    told = False
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
            if not told and time.monotonic() - began > QUIET:
                told = True
                say(f"waiting for {name}: the name is not known here yet (up to {patience:.0f} s)")
            time.sleep(1)
            continue
        # What others can reach first, then IPv4, as gloo takes it
        found.sort(key=lambda entry: (is_loopback(str(entry[4][0])), entry[0] != socket.AF_INET))
        return str(found[0][4][0])


def route(address: str, interfaces: Sequence[tuple[str, str]]) -> Route | None:
    """The route to an IP address; nothing is sent.

    On the node that has the address, the kernel answers with the address itself (although the
    packets would pass through ``lo``), so the interface found is the one the others come in by.
    Where the address itself is a loopback one (Debian's installer gives a host's own name
    127.0.1.1), nobody else comes in by that: the default route's interface is taken.
    """
    if is_loopback(address):
        address = ANYWHERE
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    for name, has in interfaces:
        if has == own and not is_loopback(has):
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
    if host == own_name or is_loopback(host):
        return True
    addresses = {address for _name, address in interfaces}
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return False
    return any(str(entry[4][0]) in addresses for entry in found)
