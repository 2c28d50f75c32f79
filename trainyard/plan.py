"""The plan: for each selected row, what must be built and why, or why nothing must."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainyard import lock, manifest, render
from trainyard.bases import BaseImage
from trainyard.engine import Engine
from trainyard.model import InputError, Row

#: So many changed inputs are named.
NAMED = 3
CONTENTS_LABEL = "dev.trainyard.contents-id"


@dataclass(frozen=True)
class Item:
    """One row of the plan."""

    row: Row
    base: BaseImage
    inputs: dict[str, str]  # what it is made from: name -> digest
    why: str | None  # why it must be built; None: the image is there and current

    @property
    def contents_id(self) -> str:
        return render.contents_id(self.inputs)

    @property
    def reference(self) -> str:
        return f"trainyard:{self.row.id}"


def check_generated(rows: Iterable[Row], root: Path) -> None:
    """Refuse to build from lock files or Dockerfiles that do not match the matrix.

    Raises InputError that names the first such file and the command that mends it.
    """
    for row in rows:
        for one in lock.locks(row, root / "images"):
            if why := one.why_stale():
                raise InputError(f"{one.path}: stale: {why}\nRun: python build.py lock {row.id}")
        path = root / "images" / row.id / "Dockerfile"
        if not path.exists() or path.read_text() != render.render(row, root):
            raise InputError(
                f"{path}: not what matrix.yaml and templates/ give\nRun: python build.py render {row.id}"
            )


def plan(
    rows: Iterable[Row],
    root: Path,
    engine: Engine,
    bases: dict[str, BaseImage],
    force: bool = False,
) -> tuple[Item, ...]:
    """Compare each row's contents id with the image that the engine has under its tag."""
    items = []
    for row in rows:
        base = bases[row.base.key]
        digests = render.input_digests(row, root, base.digest)
        items.append(Item(row, base, digests, "asked for" if force else _why(row, digests, root, engine)))
    return tuple(items)


def _why(row: Row, digests: dict[str, str], root: Path, engine: Engine) -> str | None:
    image = engine.image(f"trainyard:{row.id}")
    if image is None:
        return "not built yet"
    found = manifest.read(root / "out" / row.id)
    measured = found if found and found["image_id"] == image.id else None
    if image.labels.get(CONTENTS_LABEL) != render.contents_id(digests):
        return _changes(measured.get("inputs", {}) if measured else {}, digests)
    return None if measured else "its manifest is missing"


def _changes(before: dict[str, str], now: dict[str, str]) -> str:
    """Which inputs differ, in words; as many names as fit on a line."""
    if not before:
        return "its inputs changed"
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    said = [_input_in_words(name, name in before, name in now) for name in names]
    more = f" and {len(said) - NAMED} more" if len(said) > NAMED else ""
    return f"changed: {', '.join(said[:NAMED])}{more}"


def _input_in_words(name: str, was: bool, is_now: bool) -> str:
    if name == "base":
        return "the base image"
    return name if was and is_now else f"{name} ({'removed' if was else 'new'})"
