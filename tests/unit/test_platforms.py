"""Rows for another CPU: built where that can run, left out aloud where a glob named them, else refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from shipped import BY_ID, ROOT

from trainyard import cli
from trainyard.engine import Engine
from trainyard.model import InputError, Row

AMD, ARM = BY_ID["cu130-pt213-base"], BY_ID["cu130-pt213-arm64-base"]


class FakeEngine:
    """An engine with a builder for these platforms."""

    def __init__(self, *platforms: str) -> None:
        self._platforms = platforms
        self.address: Any = type("Address", (), {"private": False})

    def platforms(self) -> tuple[str, ...]:
        return self._platforms


def runnable(rows: Sequence[Row], named: set[str], *platforms: str) -> list[str]:
    app = cli.App(ROOT / "matrix.yaml", named=frozenset(named))
    return [row.id for row in cli._runnable(app, rows, cast(Engine, FakeEngine(*platforms)))]


def test_what_the_engine_emulates_is_built() -> None:
    assert runnable([AMD, ARM], set(), "linux/amd64", "linux/arm64") == [AMD.id, ARM.id]


def test_what_only_a_glob_named_is_left_out_aloud(capsys: pytest.CaptureFixture[str]) -> None:
    assert runnable([AMD, ARM], {"cu130*"}, "linux/amd64") == [AMD.id]
    said = capsys.readouterr().err
    assert f"left out: {ARM.id}" in said
    assert "qemu-user-static" in said


@pytest.mark.parametrize("rows", [[ARM], [AMD, ARM]], ids=["alone", "among others"])
def test_a_row_that_was_named_is_refused_with_the_remedy(rows: list[Row]) -> None:
    with pytest.raises(InputError, match=r"for linux/arm64; the engine runs linux/amd64.*qemu-user-static"):
        runnable(rows, {ARM.id}, "linux/amd64")


def test_an_arm64_engine_builds_its_own_rows() -> None:
    assert runnable([ARM], {ARM.id}, "linux/arm64") == [ARM.id]
