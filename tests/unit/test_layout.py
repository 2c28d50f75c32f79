"""The names and the state folder of a private engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainyard.layout import Layout, layout
from trainyard.model import InputError

AT = Layout(Path("/nowhere/trainyard"))


def test_names_fit_the_kernels_limits() -> None:
    assert len(AT.bridge) <= 15
    assert len(AT.chain) <= 28


@pytest.mark.parametrize("root", ["relative", "/", "/" + "x" * 61])
def test_an_impossible_state_folder_is_refused(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_ENGINE_ROOT", root)
    with pytest.raises(InputError, match="TRAINYARD_ENGINE_ROOT"):
        layout()
