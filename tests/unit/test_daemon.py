"""Which engine is chosen, and how the private one is configured."""

from __future__ import annotations

import ipaddress
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainyard import daemon, network
from trainyard.layout import Layout
from trainyard.model import InputError

POOL = ipaddress.IPv4Network("10.9.0.0/20")


def test_an_unknown_choice_of_engine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_ENGINE", "podman")
    with pytest.raises(InputError, match="'podman'"):
        daemon.ensure()


def test_a_docker_host_that_does_not_answer_is_an_error_and_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = tmp_path / "docker"
    client.write_text(
        '#!/bin/sh\n[ "$1" = buildx ] && { echo "buildx v0.30.0"; exit 0; }\n'
        "echo 'Cannot connect to the Docker daemon' >&2; exit 1\n"
    )
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    monkeypatch.delenv("TRAINYARD_ENGINE", raising=False)
    with pytest.raises(InputError, match=r"unix:///nowhere\.sock does not answer: Cannot connect"):
        daemon.ensure()
    found = daemon.status()
    assert found.address is None
    assert not found.startable


def test_the_build_cache_may_fill_half_of_the_disk_and_cache_mounts_do_not_go_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(total=500 * 2**30))
    config = daemon.dockerd_config(Layout(tmp_path), POOL, (26, 1, 5))
    assert config["builder"]["gc"] == {"enabled": True, "policy": [{"keepStorage": "250GB", "all": True}]}


def test_an_old_dockerd_gets_no_setting_that_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(network, "uplink_mtu", lambda: 1380)
    new, old = (
        daemon.dockerd_config(Layout(tmp_path), POOL, version) for version in ((24, 0, 0), (23, 0, 9))
    )
    assert new.pop("default-network-opts") == {"bridge": {"com.docker.network.driver.mtu": "1380"}}
    assert new == old
    assert old["mtu"] == 1380
