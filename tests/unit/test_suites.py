"""What counts as tested: this image, this suite, all of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from shipped import BY_ID, ROOT

from trainyard import suites
from trainyard.bases import BaseImage
from trainyard.engine import Engine
from trainyard.plan import Item

ROW = BY_ID["cpu-pt213"]
ITEM = Item(ROW, BaseImage("debian:bookworm-slim", "sha256:" + "1" * 64, "registry", ""), {}, None)


@dataclass
class Image:
    """What an engine says of an image."""

    id: str


class Tagged:
    """An engine whose tag points to an image."""

    def __init__(self, image: str | None) -> None:
        self.found = Image(image) if image else None

    def image(self, _: str) -> Image | None:
        return self.found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tests" / "image", tmp_path / "tests" / "image", ignore=ignore)
    (tmp_path / "out" / ROW.id).mkdir(parents=True)
    return tmp_path


def passed(root: Path, **changes: Any) -> None:
    record = {"image_id": "sha256:a", "suite": suites.suite_id(root), "passed_at": "2026-01-01"} | changes
    (root / "out" / ROW.id / suites.PASSED).write_text(json.dumps(record))


def has_passed(root: Path, image: str | None = "sha256:a") -> bool:
    return suites.has_passed(ITEM, root, cast(Engine, Tagged(image)))


def test_the_image_that_passed_this_suite_is_tested(root: Path) -> None:
    assert not has_passed(root)
    passed(root)
    assert has_passed(root)


def test_another_image_under_the_tag_is_not_tested(root: Path) -> None:
    passed(root)
    assert not has_passed(root, "sha256:b")
    assert not has_passed(root, None)


CHANGES: dict[str, Callable[[Path], object]] = {
    "a test changed": lambda root: (root / "tests/image/test_contract.py").write_text("changed"),
    "a test more": lambda root: (root / "tests/image/test_new.py").write_text("new"),
    "a test less": lambda root: (root / "tests/image/test_training.py").unlink(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_suite_has_not_been_passed(change: Callable[[Path], object], root: Path) -> None:
    passed(root)
    change(root)
    assert not has_passed(root)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "not json"])
def test_a_record_that_cannot_be_read_is_no_pass(text: str, root: Path) -> None:
    (root / "out" / ROW.id / suites.PASSED).write_text(text)
    assert not has_passed(root)
