"""The private engine's network: its addresses, its bridge, its firewall chains."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from trainyard.hostenv import ask, find_tool
from trainyard.layout import Layout
from trainyard.model import StepFailed

POOLS = ("192.168.208.0/20", "172.30.240.0/20", "10.213.192.0/20", "10.87.64.0/20")
ETHERNET = 1500  # bytes


# -- addresses -----------------------------------------------------------------------------


def read_pool(at: Layout) -> ipaddress.IPv4Network | None:
    """The addresses that the engine of ``at`` hands out; None before its first start."""
    with contextlib.suppress(OSError, ValueError):
        return ipaddress.IPv4Network(at.pool_file.read_text().strip())
    return None


def in_pool(address: str | None, pool: ipaddress.IPv4Network | None) -> bool:
    """Whether an address is one of the pool's; False where either is not known."""
    if address is None or pool is None:
        return False
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address) in pool
    return False


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


def uplink_mtu(sys_class_net: Path = Path("/sys/class/net")) -> int:
    """Bytes that fit into a packet on the way out of this host, at most Ethernet's 1500.

    Behind a VPN or in some clouds it is less.  A container that does not know sends packets that
    never arrive: connections open, and transfers hang.  https://github.com/moby/moby/issues/34981
    """
    routes = _ip("-4", "route", "show", "default").stdout
    found = [ETHERNET]
    for name in re.findall(r"^default\b.*?\bdev (\S+)", routes, re.MULTILINE):
        with contextlib.suppress(OSError, ValueError):
            found.append(int((sys_class_net / name / "mtu").read_text()))
    return min(found)


def _ip(*args: str) -> subprocess.CompletedProcess[str]:
    return ask([str(find_tool("ip") or "ip"), *args])


# -- bridge and firewall -------------------------------------------------------------------


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


def connect(at: Layout) -> None:
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


def disconnect(at: Layout) -> list[str]:
    """Remove the firewall chains and every bridge of the engine; what was removed, in words."""
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


def _iptables(*args: str) -> subprocess.CompletedProcess[str]:
    return ask([str(find_tool("iptables") or "iptables"), "-w", "10", *args])


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
        and any(in_pool(info.get("local"), pool) for info in link.get("addr_info", []))
    ]
