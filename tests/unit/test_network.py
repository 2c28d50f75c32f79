"""The private engine's addresses and bridges."""

from __future__ import annotations

import ipaddress
import json
import subprocess
from pathlib import Path

import pytest

from trainyard import network
from trainyard.model import StepFailed


def test_the_pool_avoids_routes_and_name_servers() -> None:
    routes = (
        "default via 192.0.2.1 dev eth0\n"
        "192.168.208.0/24 dev vpn proto kernel\n"
        "local 127.0.0.1 dev lo table local\n"
    )
    used = network.used_networks(routes, "search x\nnameserver 172.30.250.53\nnameserver ::1\n")
    assert ipaddress.IPv4Network("0.0.0.0/0") not in used
    assert network.pick_pool(used) == ipaddress.IPv4Network("10.213.192.0/20")


def test_the_pool_of_last_time_is_kept_while_it_is_free() -> None:
    last = ipaddress.IPv4Network("10.9.0.0/20")
    assert network.pick_pool([], last) == last
    assert network.pick_pool([last], last) != last


def test_no_free_pool_is_said() -> None:
    with pytest.raises(StepFailed, match="in use"):
        network.pick_pool([ipaddress.IPv4Network(pool) for pool in network.POOLS])


def test_only_bridges_of_dockers_own_making_inside_the_pool_are_ours() -> None:
    def link(name: str, address: str) -> dict[str, object]:
        return {"ifname": name, "addr_info": [{"local": address}]}

    text = json.dumps(
        [
            link("br-0123456789ab", "192.168.209.1"),
            link("br-ba9876543210", "172.18.0.1"),
            link("docker0", "192.168.210.1"),
            {"ifname": "br-000000000000"},
        ]
    )
    pool = ipaddress.IPv4Network("192.168.208.0/20")
    assert network.bridges_in(pool, text) == ["br-0123456789ab"]
    assert network.bridges_in(None, text) == []
    assert network.bridges_in(pool, "") == []


@pytest.mark.parametrize(
    ("routes", "mtu"),
    [
        ("default via 192.0.2.1 dev eth0 proto dhcp\n", 1500),
        ("default via 192.0.2.1 dev eth0\ndefault via 10.1.0.1 dev vpn metric 50\n", 1380),
        ("default dev vpn scope link\n", 1380),
        ("default via 192.0.2.1 dev jumbo\n", 1500),
        ("default via 192.0.2.1 dev gone\n", 1500),
        ("", 1500),
    ],
)
def test_containers_send_no_larger_packets_than_the_uplink_carries(
    routes: str, mtu: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in {"eth0": "1500\n", "vpn": "1380\n", "jumbo": "9001\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "mtu").write_text(size)
    monkeypatch.setattr(network, "_ip", lambda *_: subprocess.CompletedProcess([], 0, routes))
    assert network.uplink_mtu(tmp_path) == mtu
