"""A night: what must be done for each row and why, kept going, and summed up.

    plan      nothing, test only, or build (why: inputs, base, age)
    carry out build -> test -> push -> attach and sign -> promote; a row that fails stops no other
    sum up    one line a row, stale tags are failures too

State is what exists already: the engine's images, ``out/<id>`` and the registry's tags.  So a night
that was interrupted goes on where it was, and a second one right after the first does nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from trainyard import archive, attest, catalog, manifest, publish, suites
from trainyard.engine import LOST, Engine
from trainyard.model import InputError, Row, StepFailed
from trainyard.plan import Item
from trainyard.registry import Registry, utc

Work = Literal["nothing", "publish", "test", "build"]


@dataclass(frozen=True)
class Task:
    """What one row needs, and why."""

    item: Item
    work: Work
    why: str


@dataclass(frozen=True)
class Outcome:
    """How one row ended."""

    id: str
    work: Work
    why: str
    failed: str | None = None  # the message of what failed
    tag: str | None = None  # the immutable tag that now is the floating one


def plan(
    items: Sequence[Item],
    root: Path,
    engine: Engine,
    registry: Registry | None,
    max_age_days: int,
    now: datetime | None = None,
) -> tuple[Task, ...]:
    """Decide for each row.  ``registry`` None: nothing is published, so nothing is asked there."""
    now = now or datetime.now(UTC)
    return tuple(_task(item, root, engine, registry, timedelta(days=max_age_days), now) for item in items)


def _task(
    item: Item, root: Path, engine: Engine, registry: Registry | None, max_age: timedelta, now: datetime
) -> Task:
    if registry and item.why and _is_published(item, registry, max_age, now):
        return Task(item, "nothing", "published already from the same inputs")
    built = {} if item.why else manifest.read(root / "out" / item.row.id) or {}
    if registry and publish.is_rolled_back(registry, item.row.id, item.contents_id, built.get("image_id")):
        return Task(item, "nothing", f"rolled back; until an input changes, or: push {item.row.id} --promote")
    if item.why:
        return Task(item, "build", item.why)
    age = now - utc(built["built_at"])
    if age > max_age:
        return Task(item, "build", f"{age.days} days old; packages of its distribution may have moved on")
    if not suites.has_passed(item, root, engine):
        return Task(item, "test", "not tested with this suite yet")
    if registry and not _holds(registry, item.row.id, built["image_id"]):
        return Task(item, "publish", "tested, but its tag in the registry is another image")
    return Task(item, "nothing", "up to date")


def _is_published(item: Item, registry: Registry, max_age: timedelta, now: datetime) -> bool:
    """Does the floating tag hold an image of these very inputs that is not too old?

    This is what a fresh CI runner goes by, which has built nothing itself.
    """
    found = registry.find(item.row.id)
    if found is None:
        return False
    said = found.json.get("annotations") or {}
    created = said.get(publish.CREATED)
    same = said.get(publish.VERSION) == item.contents_id
    return bool(same and created and now - utc(created) <= max_age)


def _holds(registry: Registry, tag: str, image_id: str) -> bool:
    found = registry.find(tag)
    return found is not None and (found.json.get("config") or {}).get("digest") == image_id


def carry_out(tasks: Sequence[Task], do: Callable[[Task], str | None]) -> tuple[Outcome, ...]:
    """Do every task; a failure is noted and the next one goes on."""
    outcomes = []
    for task in tasks:
        tag, failed = None, None
        if task.work != "nothing":
            try:
                tag = do(task)
            except (StepFailed, InputError) as error:  # InputError: a tool that this row needs is missing
                failed = str(error)
            except LOST as error:
                failed = f"the engine does not answer: {error}"
        outcomes.append(Outcome(task.item.row.id, task.work, task.why, failed, tag))
    return tuple(outcomes)


def stale(items: Sequence[Item], registry: Registry, max_age_days: int) -> tuple[Outcome, ...]:
    """Rows whose floating tag is missing, or older than a night may leave it."""
    found = []
    limit = datetime.now(UTC) - timedelta(days=max_age_days)
    for item in items:
        held = registry.find(item.row.id)
        created = (held.json.get("annotations") or {}).get(publish.CREATED) if held else None
        if held is None:
            found.append(Outcome(item.row.id, "nothing", "stale", f"no tag {item.row.id} in {registry.name}"))
        elif created and utc(created) < limit:
            message = f"{registry.name}:{item.row.id} is of {created[:10]}, older than {max_age_days} days"
            found.append(Outcome(item.row.id, "nothing", "stale", message))
    return tuple(found)


def collect(registry: Registry, items: Sequence[Row], history: Path, nights: int = 30) -> list[Path]:
    """Fetch what describes the newest published builds of each row into ``history``.

    What the registry holds is the only memory that outlives a CI runner.
    """
    kept = []
    for row in items:
        for version in publish.history(registry, row.id)[:nights]:
            night = history / row.id / f"{version.created:%Y%m%d}-{version.contents_id}"
            if not (night / manifest.FILE).exists():
                files = attest.fetch(registry, version.digest)
                if manifest.FILE not in files:
                    continue  # copied here without what was attached to it: nothing can be said about it
                night.mkdir(parents=True, exist_ok=True)
                for name, body in sorted(files.items(), key=lambda one: one[0] == manifest.FILE):
                    archive.write(night / name, body)  # the manifest last: it says that all is there
            kept.append(night)
    return kept


def remember(outcomes: Sequence[Outcome], out: Path, history: Path) -> list[Path]:
    """Copy what describes each newly built row into ``history/<id>/<YYYYMMDD>-<contents id>``."""
    kept = []
    for outcome in outcomes:
        folder = out / outcome.id
        found = manifest.read(folder)
        if found is None or (outcome.work == "nothing" and not outcome.failed):
            continue
        night = history / outcome.id / f"{utc(found['built_at']):%Y%m%d}-{found['contents_id']}"
        night.mkdir(parents=True, exist_ok=True)
        for name in (manifest.FILE, publish.TESTS, catalog.SBOM):
            if (folder / name).exists():
                shutil.copy2(folder / name, night / name)
        kept.append(night)
    return kept
