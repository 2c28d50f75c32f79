"""A night: what each row needs and why, that one failure stops no other, what is remembered."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from docker.errors import DockerException
from shipped import BY_ID

from trainyard import archive, nightly, suites
from trainyard.bases import BaseImage
from trainyard.engine import Engine
from trainyard.model import InputError, StepFailed
from trainyard.nightly import Outcome, Task
from trainyard.plan import Item
from trainyard.publish import CREATED
from trainyard.registry import Registry, canonical, sha256

NOW = datetime(2026, 11, 30, 3, tzinfo=UTC)
BASE = BaseImage("debian:bookworm-slim", "sha256:" + "1" * 64, "registry", "")
ITEM = Item(BY_ID["cpu-pt213"], BASE, {"base": "1"}, None)
OTHER = Item(BY_ID["cpu-pt213-base"], BASE, {"base": "1"}, None)
IMAGE = "sha256:" + "a" * 64


@dataclass
class Image:
    id: str = IMAGE


@dataclass
class Found:
    json: dict[str, Any]

    @property
    def digest(self) -> str:
        return sha256(canonical(self.json))


@dataclass
class Repository:
    """A registry that holds these tags."""

    tags: dict[str, Found] = field(default_factory=dict)
    name: str = "registry.example/acme/trainyard"

    def find(self, ref: str) -> Found | None:
        return self.tags.get(ref)


class Docker:
    """An engine that has the image."""

    def image(self, _: str) -> Image:
        return Image()


def published(image_id: str = IMAGE, contents: str = ITEM.contents_id, age: int = 1) -> Found:
    created = (NOW - timedelta(days=age)).isoformat()
    base = {"name": "debian:bookworm-slim", "digest": "sha256:" + "1" * 64}
    built = {"id": "cpu-pt213", "built_at": created, "contents_id": contents, "base": base}
    return Found({"config": {"digest": image_id}, "annotations": archive.describe(built, {})})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout in which the row was built yesterday and passed its tests."""
    built(tmp_path, age=1)
    (tmp_path / "tests/image").mkdir(parents=True)
    passed = {"image_id": IMAGE, "suite": suites.suite_id(tmp_path)}
    (tmp_path / "out/cpu-pt213" / suites.PASSED).write_text(json.dumps(passed))
    return tmp_path


def built(root: Path, age: int, row: str = "cpu-pt213") -> None:
    folder = root / "out" / row
    folder.mkdir(parents=True, exist_ok=True)
    when = (NOW - timedelta(days=age)).isoformat()
    found = {"image_id": IMAGE, "built_at": when, "contents_id": ITEM.contents_id, "id": row}
    (folder / "manifest.json").write_text(json.dumps(found))


def planned(root: Path, item: Item = ITEM, registry: Repository | None = None) -> Task:
    where = cast(Registry, registry) if registry else None
    (task,) = nightly.plan([item], root, cast(Engine, Docker()), where, max_age_days=30, now=NOW)
    return task


def test_what_is_built_tested_and_published_needs_nothing(root: Path) -> None:
    assert planned(root).work == "nothing"
    assert planned(root, registry=Repository({"cpu-pt213": published()})).work == "nothing"


def test_changed_inputs_are_built_with_their_reason(root: Path) -> None:
    task = planned(root, replace(ITEM, why="changed: the base image"))
    assert (task.work, task.why) == ("build", "changed: the base image")


def test_an_old_image_is_built_again(root: Path) -> None:
    built(root, age=31)
    task = planned(root)
    assert task.work == "build"
    assert task.why.startswith("31 days old")


def test_another_suite_is_run_without_a_build(root: Path) -> None:
    (root / "tests/image/test_new.py").write_text("def test_it(): pass")
    assert planned(root).work == "test"


def test_a_tag_that_holds_another_image_is_published_without_a_test(root: Path) -> None:
    assert planned(root, registry=Repository()).work == "publish"
    other = Repository({"cpu-pt213": published(image_id="sha256:" + "b" * 64)})
    assert planned(root, registry=other).work == "publish"


def test_a_runner_that_built_nothing_goes_by_what_is_published(tmp_path: Path) -> None:
    item = replace(ITEM, why="not built yet")
    assert planned(tmp_path, item, Repository({"cpu-pt213": published()})).work == "nothing"
    assert planned(tmp_path, item, Repository({"cpu-pt213": published(age=31)})).work == "build"
    assert planned(tmp_path, item, Repository({"cpu-pt213": published(contents="0" * 16)})).work == "build"
    assert planned(tmp_path, item, Repository()).work == "build"


def test_what_a_rollback_took_back_is_not_published_again(root: Path) -> None:
    before = published(image_id="sha256:" + "b" * 64, contents="0" * 16, age=2)
    tags = Repository({"cpu-pt213": before, "cpu-pt213-rolled-back": published()})
    assert planned(root, registry=tags).work == "nothing"
    assert "rolled back" in planned(root, registry=tags).why
    # a runner that built nothing knows it by the inputs
    assert planned(root, replace(ITEM, why="not built yet"), tags).work == "nothing"
    # other inputs are another build, and so is what somebody promoted since
    other = replace(ITEM, why="changed: the base image", inputs={"base": "2"})
    assert planned(root, other, tags).work == "build"
    again = Repository({"cpu-pt213": published(), "cpu-pt213-rolled-back": published()})
    assert planned(root, registry=again).why == "up to date"
    newer = Repository(
        {"cpu-pt213": before, "cpu-pt213-rolled-back": published(contents="2" * 16, image_id="x")}
    )
    assert planned(root, registry=newer).work == "publish"


@pytest.mark.parametrize("error", [StepFailed, InputError, DockerException])
def test_a_row_that_fails_stops_no_other(error: type[Exception]) -> None:
    def do(task: Task) -> str:
        if task.item is ITEM:
            raise error("op fused_adam did not compile")
        return "cpu-pt213-base-20261130-0123456789abcdef"

    tasks = [Task(ITEM, "build", "asked for"), Task(OTHER, "build", "asked for")]
    first, second = nightly.carry_out(tasks, do)
    assert str(first.failed).endswith("op fused_adam did not compile")
    assert second.failed is None
    assert second.tag == "cpu-pt213-base-20261130-0123456789abcdef"


def test_nothing_to_do_does_nothing() -> None:
    def never(_: Task) -> str:
        raise AssertionError("called")

    (outcome,) = nightly.carry_out([Task(ITEM, "nothing", "up to date")], never)
    assert outcome.failed is None


def test_a_tag_that_is_missing_or_old_is_stale() -> None:
    fresh = datetime.now(UTC) - timedelta(days=1)
    old = datetime.now(UTC) - timedelta(days=40)

    def held(when: datetime) -> Repository:
        return Repository({"cpu-pt213": Found({"annotations": {CREATED: when.isoformat()}})})

    assert nightly.stale([ITEM], cast(Registry, held(fresh)), 30) == ()
    (one,) = nightly.stale([ITEM], cast(Registry, held(old)), 30)
    assert "older than 30 days" in str(one.failed)
    (none,) = nightly.stale([ITEM], cast(Registry, Repository()), 30)
    assert "no tag cpu-pt213" in str(none.failed)


def test_a_night_remembers_what_it_built_and_what_failed(root: Path) -> None:
    (root / "out/cpu-pt213/tests.xml").write_text("<testsuites/>")
    built(root, age=1, row="cpu-pt213-base")
    outcomes = [
        Outcome("cpu-pt213", "build", "asked for"),
        Outcome("cpu-pt213-base", "nothing", "up to date"),
        Outcome("cu121-pt29", "build", "not built yet", "no space left"),
    ]
    (night,) = nightly.remember(outcomes, root / "out", root / "history")
    assert night == root / f"history/cpu-pt213/20261129-{ITEM.contents_id}"
    assert sorted(path.name for path in night.iterdir()) == ["manifest.json", "tests.xml"]
