"""Docker clients, their versions, and the environment that leads to an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import docker
import pytest

from trainyard import address
from trainyard.engine import Engine


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("github.com/docker/buildx 0.13.1+ds1 0.13.1+ds1-3", (0, 13, 1)),
        ("github.com/docker/buildx v0.24.0 d0e5e86", (0, 24, 0)),
        ("Docker version 26.1.5+dfsg1, build a72d7cd", (26, 1, 5)),
        ("Docker version 20.10.24+dfsg1, build 297e128", (20, 10, 24)),
        ("29.0.0-rc.1", (29, 0, 0)),
        ("docker: 'buildx' is not a docker command.", ()),
        ("", ()),
    ],
)
def test_versions_are_read_from_what_the_tools_print(text: str, version: tuple[int, ...]) -> None:
    assert address.parse_version(text) == version


def test_the_first_client_with_a_new_enough_buildx_is_chosen() -> None:
    versions = {Path("/a/docker"): (), Path("/b/docker"): (0, 12, 9), Path("/c/docker"): (0, 13)}
    versions[Path("/d/docker")] = (1, 0)
    assert address.choose_client(versions, versions.__getitem__) == Path("/c/docker")
    assert address.choose_client([Path("/a/docker")], versions.__getitem__) is None


def test_clients_are_looked_for_in_the_order_of_path_and_each_file_once(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    for name in ("one", "two"):
        (tmp_path / name / "docker").write_text("#!/bin/sh\n")
    (tmp_path / "two/docker").chmod(0o755)  # the one in "one" is not executable
    (tmp_path / "three/docker").symlink_to(tmp_path / "two/docker")
    path = ":".join(str(tmp_path / name) for name in ("one", "three", "two"))
    found = address.client_candidates({"PATH": path})
    assert found[0] == tmp_path / "three/docker"
    assert tmp_path / "two/docker" not in found


def test_a_client_with_a_plugin_is_recognised_and_one_without_is_not(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text("#!/bin/sh\necho 'github.com/docker/buildx v0.30.1 abc'\n")
    bad.write_text('#!/bin/sh\necho "unknown command 0.30.1" >&2; exit 1\n')
    for file in (good, bad):
        file.chmod(0o755)
    assert address.buildx_version(good) == (0, 30, 1)
    assert address.buildx_version(bad) == ()
    assert address.buildx_version(tmp_path / "missing") == ()


def test_the_private_engine_gets_nothing_of_the_users_docker_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "BUILDX_BUILDER", "DOCKER_HOST"):
        monkeypatch.setenv(name, "users")
    env = address.EngineAddress("unix:///x", private=True, client=Path("docker")).environ()
    assert env["DOCKER_HOST"] == "unix:///x"
    assert env["BUILDX_BUILDER"] == "default"
    assert not {"DOCKER_CONTEXT", "DOCKER_TLS_VERIFY"} & set(env)
    env = address.EngineAddress("tcp://x", private=False, client=Path("docker")).environ()
    assert env["BUILDX_BUILDER"] == env["DOCKER_TLS_VERIFY"] == "users"


SSH = "ssh://me@build.example"


@pytest.mark.parametrize(
    ("host", "named", "material", "said"),
    [
        (SSH, SSH, "{}", "ssh -nNT -L"),
        (SSH, "", "{}", "ssh is not supported"),
        ("tcp://b:2376", "", '{"docker":["ca.pem"]}', "DOCKER_TLS_VERIFY=1"),
        ("tcp://b:2376", "tcp://b:2376", '{"docker":["ca.pem"]}', ""),
        ("tcp://b:2375", "", "{}", ""),
        ("unix:///var/run/docker.sock", "", "{}", ""),
    ],
)
def test_an_engine_that_only_the_client_could_reach_is_refused(
    host: str, named: str, material: str, said: str, tmp_path: Path
) -> None:
    client = tmp_path / "docker"
    client.write_text(f"#!/bin/sh\necho '{material}'\n")
    client.chmod(0o755)
    found = address._unreachable(host, named, client)
    assert said in found
    assert bool(found) == bool(said)


def test_an_engine_behind_tls_is_spoken_to_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ca", "cert", "key"):
        (tmp_path / f"{name}.pem").touch()
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
    monkeypatch.setattr(docker, "DockerClient", lambda **settings: settings)
    remote = Engine(address.EngineAddress("tcp://b:2376", private=False, client=Path("/usr/bin/docker")))
    settings = cast(dict[str, Any], remote.client)
    assert settings["base_url"] == "tcp://b:2376"
    assert settings["tls"].cert == (str(tmp_path / "cert.pem"), str(tmp_path / "key.pem"))
