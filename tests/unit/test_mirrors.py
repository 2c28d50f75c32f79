"""A site's mirrors: one file, one message where it is wrong, and nothing of it in an image."""

from __future__ import annotations

import tomllib
from configparser import ConfigParser
from pathlib import Path

import pytest
from shipped import BY_ID, ROOT

from trainyard import bake, bases, lock, mirrors
from trainyard.hostenv import find_ca
from trainyard.model import InputError

SITE = """\
base: registry.example:5000/docker-hub/library
apt:
  debian: https://mirror.example/debian
  debian-security: https://mirror.example/debian-security/
pypi: https://ci:hunter2@mirror.example/pypi/simple
pytorch: https://mirror.example/pytorch/whl
"""
CPU, CUDA = BY_ID["cpu-pt213"], BY_ID["cu121-pt29"]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> mirrors.Mirrors:
    file = tmp_path / "mirrors.yaml"
    file.write_text(SITE)
    monkeypatch.setenv(mirrors.VARIABLE, str(file))
    return mirrors.configured()


def test_without_the_variable_everything_comes_from_its_public_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(mirrors.VARIABLE, raising=False)
    none = mirrors.configured()
    assert none.image(CPU.base) == CPU.base.image
    assert none.pytorch_index("cpu") == "https://download.pytorch.org/whl/cpu"
    assert mirrors.secrets(none, CPU, find_ca()) == {}
    assert "UV_DEFAULT_INDEX" not in lock.environment()


def test_the_base_is_pulled_from_the_sites_registry(site: mirrors.Mirrors) -> None:
    assert site.image(CPU.base) == "registry.example:5000/docker-hub/library/debian:bookworm-slim"


def test_apt_reads_only_the_mirror_and_trusts_the_hosts_ca(site: mirrors.Mirrors) -> None:
    found = mirrors.secrets(site, CUDA, Path("/ca"))
    assert all("https://mirror.example/debian" in line for line in found["apt.list"].splitlines())
    suites = [line.split()[3] for line in found["apt.list"].splitlines()]
    assert suites == ["trixie", "trixie-updates", "trixie-security"]
    assert 'Dir::Etc::SourceParts "/dev/null";' in found["apt.conf"]
    assert 'CaInfo "/run/secrets/ca"' in found["apt.conf"]
    assert "CaInfo" not in mirrors.secrets(site, CUDA, None)["apt.conf"]


def test_pip_and_uv_are_told_the_index_in_files(site: mirrors.Mirrors) -> None:
    found = mirrors.secrets(site, CPU, None)
    pip = ConfigParser()
    pip.read_string(found["pip.conf"])
    assert pip["global"]["index-url"] == site.pypi
    indexes = tomllib.loads(found["uv.toml"])["index"]
    assert indexes == [
        {"url": "https://mirror.example/pytorch/whl/cpu"},
        {"url": site.pypi, "default": True},
    ]
    assert "trusted-host" not in pip["global"]
    # PyPI has the wheels of this row
    assert tomllib.loads(mirrors.secrets(site, CUDA, None)["uv.toml"])["index"] == indexes[1:]


def test_a_mirror_without_tls_is_used_as_the_file_says() -> None:
    plain = mirrors.Mirrors(pypi="http://ci:pw@m.example:8080/simple")
    assert "trusted-host = m.example:8080\n" in mirrors.secrets(plain, CUDA, None)["pip.conf"]


def test_a_mirror_of_pytorch_alone_leaves_pypi_as_it_is() -> None:
    found = mirrors.secrets(mirrors.Mirrors(pytorch="https://m.example/whl"), CPU, None)
    assert "index-url" not in found["pip.conf"]
    assert tomllib.loads(found["uv.toml"])["index"] == [{"url": "https://m.example/whl/cpu"}]
    only_pytorch = mirrors.secrets(mirrors.Mirrors(pytorch="https://m.example/whl"), CUDA, None)
    assert tomllib.loads(only_pytorch["uv.toml"]) == {}


def test_locks_are_made_from_the_mirror_but_do_not_name_it(site: mirrors.Mirrors) -> None:
    assert lock.environment()["UV_DEFAULT_INDEX"] == site.pypi
    for row in (CPU, CUDA):
        for one in lock.locks(row, ROOT / "images"):
            assert one.why_stale() is None  # the mirror is no input of a lock


def test_a_bootstrapped_base_comes_from_the_mirror(site: mirrors.Mirrors) -> None:
    assert bases._archives() == ("https://mirror.example/debian", "https://mirror.example/debian-security")


def test_a_bake_file_names_the_secrets_and_holds_none(site: mirrors.Mirrors, tmp_path: Path) -> None:
    written = mirrors.write(mirrors.secrets(site, CPU, None), tmp_path / "secrets")
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    options = bake.Options("r.example/t", mirrors=site, secrets={CPU.id: written})
    target = bake.bake([CPU], ROOT, options)["target"][CPU.id]
    assert target["args"]["BASE"].startswith("registry.example:5000/docker-hub/library/debian:")
    assert target["args"]["TORCH_INDEX"] == ""
    assert f"id=pip.conf,src={tmp_path}/secrets/pip.conf" in target["secret"]
    assert "hunter2" not in str(target)


@pytest.mark.parametrize("row", [CPU, CUDA, BY_ID["cu130-pt213-devel"]], ids=lambda row: row.id)
def test_every_step_that_downloads_can_see_the_mirrors(row: object) -> None:
    text = (ROOT / "images" / row.id / "Dockerfile").read_text()  # type: ignore[attr-defined]
    steps = [step for step in text.replace("\\\n", " ").splitlines() if step.startswith("RUN ")]
    offline = ("--no-index", "build_wheel.py", "link_toolkit")
    for step in steps:
        if "apt-get update" in step:
            for name in ("apt.conf", "apt.list", "ca"):
                assert f"--mount=type=secret,id={name}" in step
            assert "export APT_CONFIG=/run/secrets/apt.conf" in step
        if "build_wheel.py" in step or ("pip install" in step and not any(one in step for one in offline)):
            for name in ("ca", "pip.conf", "uv.toml"):
                assert f"--mount=type=secret,id={name}" in step
            assert "PIP_CONFIG_FILE=/run/secrets/pip.conf" in step
    assert sum("apt-get update" in step for step in steps) >= 3


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("pypi: mirror.example/simple", 1, "accepted is https://HOST/PATH"),
        ("pypi: ftp://mirror.example/simple", 1, "accepted is https://HOST/PATH"),
        ("pypy: https://mirror.example/simple", 1, 'did you mean "pypi"'),
        ("base: https://registry.example/hub", 1, "without https://"),
        ("base: library", 1, "HOST[:PORT]/PATH"),
        ("base: registry.example/hub:latest", 1, "without a tag"),
        ("apt: {debian: 'https://m.example/debian'}", 1, 'missing key "apt.debian-security"'),
        (
            "apt:\n  debian: https://me:pw@m.example/debian\n  debian-security: https://m.example/s",
            2,
            "holds a user name",
        ),
        ('pypi: "https://m.example/a b"', 1, "blank"),
    ],
)
def test_a_wrong_file_is_one_message_with_its_line(
    text: str, line: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text + "\n")
    monkeypatch.setenv(mirrors.VARIABLE, str(file))
    with pytest.raises(InputError) as caught:
        mirrors.configured()
    message = str(caught.value)
    assert message.startswith(f"{file}:{line}: ")
    assert words in message
    assert "\n" not in message
    assert "Value error" not in message
    assert "me:pw" not in message


def test_a_missing_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(mirrors.VARIABLE, "/nowhere/mirrors.yaml")
    with pytest.raises(InputError, match=r"/nowhere/mirrors\.yaml:1: no such file"):
        mirrors.configured()
