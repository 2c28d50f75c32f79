"""Tools that tests need on this host: nothing where they are there, one message where they cannot come."""

from __future__ import annotations

from pathlib import Path

import pytest
from shipped import ROWS

from trainyard import provision, suites
from trainyard.hostenv import silent
from trainyard.model import InputError


def test_nothing_is_done_where_every_tool_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provision, "find_tool", lambda name: Path("/usr/bin") / name)
    monkeypatch.setattr(provision, "is_root", lambda: False)
    provision.install_tools({"chromium": "chromium"}, silent)


def test_a_user_who_may_not_install_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provision, "find_tool", lambda _: None)
    monkeypatch.setattr(provision, "is_root", lambda: False)
    with pytest.raises(InputError, match=r"the tests need chromium, chromium-driver, which only root"):
        provision.install_tools({"chromium": "chromium", "chromedriver": "chromium-driver"}, silent)


def test_a_browser_is_needed_only_where_there_is_jupyterlab() -> None:
    assert {row.has_jupyter for row in ROWS} == {True, False}
    for row in ROWS:
        assert bool(suites.tools(row)) == row.has_jupyter
