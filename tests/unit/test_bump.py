"""What moved between two locks, and which release counts as newer."""

from __future__ import annotations

import pytest
from shipped import BY_ID

from trainyard import bump
from trainyard.facts import load_facts

OLD = "# head\nnumpy==2.4.6 \\\n    --hash=sha256:1\npip==26.3 \\\n    --hash=sha256:2\nsix==1.17.0\n"
NEW = "# head\nnumpy==2.5.0 \\\n    --hash=sha256:3\npip==26.3 \\\n    --hash=sha256:2\ntqdm==4.1\n"


def test_packages_that_moved_came_or_went_are_named() -> None:
    assert [str(change) for change in bump.compare(OLD, NEW)] == [
        "numpy 2.4.6 -> 2.5.0",
        "six 1.17.0 -> (gone)",
        "tqdm (new) -> 4.1",
    ]
    assert bump.compare(OLD, OLD) == []


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An index with these newest releases."""
    newest = {"torch": "2.9.1", "deepspeed": "0.18.9"}
    newest |= {"nvidia-cudnn-cu12": "9.10.2.21", "nvidia-nccl-cu12": "2.27.5"}
    monkeypatch.setattr(bump, "newest_release", lambda package: newest[package])
    return newest


def test_nothing_is_newer_than_itself(index: dict[str, str]) -> None:
    assert bump.releases(BY_ID["cu121-pt29"], load_facts()) == ()


def test_a_release_says_whether_compat_knows_it(index: dict[str, str]) -> None:
    index |= {"torch": "9.9.0", "deepspeed": "0.19.8", "nvidia-nccl-cu12": "2.30.7"}
    found = {one.field: one for one in bump.releases(BY_ID["cu121-pt29"], load_facts())}
    assert (found["torch"].newest, found["torch"].listed) == ("9.9.0", False)
    assert (found["deepspeed"].newest, found["deepspeed"].listed) == ("0.19.8", True)
    assert (found["nccl"].has, found["nccl"].listed) == ("2.27.5", None)
    assert "cudnn" not in found


def test_versions_are_compared_as_numbers(index: dict[str, str]) -> None:
    index["torch"] = "2.10.0"
    (found,) = bump.releases(BY_ID["cu121-pt29"], load_facts())
    assert found.newest == "2.10.0"
