"""The plan: for each selected row, what must be built and why, or why nothing must."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainyard import lock, manifest, render
from trainyard.bases import BaseImage
from trainyard.engine import Engine
from trainyard.model import InputError, Row

CONTENTS_LABEL = "dev.trainyard.contents-id"


@dataclass(frozen=True)
class Item:
    """One row of the plan."""

    row: Row
    base: BaseImage
    contents_id: str
    why: str | None  # why it must be built; None: the image is there and current

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
        base = bases[row.base.name]
        contents = render.contents_id(row, root, base.digest)
        items.append(Item(row, base, contents, "asked for" if force else _why(row, contents, root, engine)))
    return tuple(items)


def _why(row: Row, contents: str, root: Path, engine: Engine) -> str | None:
    image = engine.image(f"trainyard:{row.id}")
    if image is None:
        return "not built yet"
    if image.labels.get(CONTENTS_LABEL) != contents:
        return "its inputs changed"
    found = manifest.read(root / "out" / row.id)
    if not found or found["image_id"] != image.id:
        return "its manifest is missing"
    return None
