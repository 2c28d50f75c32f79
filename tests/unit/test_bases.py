"""The base's registry: its refusals, and what is used instead."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError, ImageNotFound

from trainyard import bases
from trainyard.model import Base, StepFailed


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("toomanyrequests: You have reached your pull rate limit", "busy"),
        ("received unexpected HTTP status: 429 Too Many Requests", "busy"),
        ("manifest unknown: manifest unknown", "missing"),
        ("dial tcp: lookup registry-1.docker.io: no such host", "unreachable"),
        ("unauthorized: authentication required", "unreachable"),
        ("net/http: request canceled while waiting for connection", "unreachable"),
    ],
)
def test_a_registrys_refusal_is_understood(reason: str, kind: str) -> None:
    assert bases.classify_refusal(reason) == kind


def test_the_bootstrap_keeps_nothing_of_the_host() -> None:
    mirrors = ("http://m/debian", "http://m/debian-security")
    command = bases.bootstrap_command("trixie", "arm64", mirrors, Path("t"))
    assert "--architectures=arm64" in command
    hooks = " ".join(word for word in command if word.startswith("--customize-hook"))
    for file in ("etc/hostname", "etc/resolv.conf", "var/lib/apt/lists", "var/log"):
        assert file in hooks
    assert "--dpkgopt=path-include=/usr/share/doc/*/copyright" in command


TRIXIE = Base("debian-13", "trixie", "debian:trixie-slim", "3.13", 14, "2.41", "libaio1t64")
DIGEST = "sha256:" + "d" * 64


class FakeEngine:
    """An engine whose registry gives the listed answers, one for each question."""

    def __init__(self, *answers: str | Exception, pulled: list[str] | None = None) -> None:
        self.answers = list(answers)
        self.asked = 0
        self.pulled = pulled
        images = SimpleNamespace(get_registry_data=self._registry, get=self._get, list=self._list)
        self.client: Any = SimpleNamespace(images=images, api=SimpleNamespace(base_url="http+docker://x"))

    def cli(self, *args: str) -> subprocess.CompletedProcess[str]:
        raise AssertionError(args)

    def _registry(self, _image: str) -> Any:
        self.asked += 1
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(id=answer)

    def _get(self, image: str) -> Any:
        if self.pulled is None:
            raise ImageNotFound(f"no {image}")
        return SimpleNamespace(attrs={"RepoDigests": self.pulled})

    def _list(self, _name: str, filters: dict[str, list[str]]) -> list[Any]:
        labels = dict(label.split("=") for label in filters["label"])
        assert labels["dev.trainyard.base.suite"] == "trixie"
        made = {"dev.trainyard.base.created": str(time.time() - 86400)}
        attrs = {"RootFS": {"Layers": ["sha256:layer"]}}
        return [SimpleNamespace(labels=made, tags=["trainyard-base:trixie-1234"], attrs=attrs)]


def refused(reason: str) -> APIError:
    return APIError("500 Server Error", explanation=reason)


def test_the_registrys_digest_is_what_from_gets(tmp_path: Path) -> None:
    found = bases.resolve_base(TRIXIE, "auto", FakeEngine(DIGEST), cache=tmp_path)
    assert found.ref == f"debian:trixie-slim@{DIGEST}"
    assert (found.origin, found.digest) == ("registry", DIGEST)


def test_a_registry_that_does_not_answer_is_asked_once_and_an_earlier_bootstrap_used(tmp_path: Path) -> None:
    engine = FakeEngine(refused("dial tcp: no such host"))
    said: list[str] = []
    for _ in range(3):
        found = bases.resolve_base(TRIXIE, "auto", engine, said.append, cache=tmp_path)
        assert (found.ref, found.origin) == ("trainyard-base:trixie-1234", "bootstrap")
    assert engine.asked == 1
    assert all("NOT the official debian:trixie-slim" in line and "no such host" in line for line in said)


def test_registry_mode_asks_again_and_fails_rather_than_bootstraps(tmp_path: Path) -> None:
    bases.resolve_base(TRIXIE, "auto", FakeEngine(refused("i/o timeout")), cache=tmp_path)
    again = FakeEngine(refused("i/o timeout"))
    with pytest.raises(StepFailed, match="i/o timeout"):
        bases.resolve_base(TRIXIE, "registry", again, cache=tmp_path)
    assert bases.resolve_base(TRIXIE, "registry", FakeEngine(DIGEST), cache=tmp_path).digest == DIGEST
    assert bases.resolve_base(TRIXIE, "auto", FakeEngine(DIGEST), cache=tmp_path).digest == DIGEST


def test_an_official_image_pulled_earlier_beats_a_bootstrap(tmp_path: Path) -> None:
    engine = FakeEngine(refused("no such host"), pulled=[f"debian@{DIGEST}"])
    found = bases.resolve_base(TRIXIE, "auto", engine, cache=tmp_path)
    assert (found.origin, found.ref) == ("registry", f"debian:trixie-slim@{DIGEST}")


def test_too_many_requests_is_tried_again() -> None:
    busy = refused("toomanyrequests: slow down")
    waits: list[float] = []
    assert bases.registry_digest("x", FakeEngine(busy, busy, DIGEST), sleep=waits.append) == DIGEST
    assert waits == [2.0, 5.0]
    with pytest.raises(bases.NoAnswer, match="toomanyrequests"):
        bases.registry_digest("x", FakeEngine(busy, busy, busy, busy), sleep=waits.append)


def test_an_image_that_the_registry_does_not_have_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StepFailed, match="has no image debian:trixie-slim"):
        bases.resolve_base(TRIXIE, "auto", FakeEngine(refused("manifest unknown")), cache=tmp_path)
