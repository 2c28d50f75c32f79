"""Small images that stand for a built, gated and tested row: fast enough to fail with often."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from trainyard import manifest, publish
from trainyard.engine import BuildRequest, Engine
from trainyard.model import Row

#: The name of all images that these tests make; they are removed at the end.
REPOSITORY = "trainyard-registry-tests"
MB = 2**20
DAY_ONE = datetime(2026, 3, 1, 2, 30, tzinfo=UTC)


@dataclass(frozen=True)
class Small:
    """An image in the engine, with the folder that ``build`` and ``test`` would have left."""

    row: Row
    reference: str
    image_id: str
    contents_id: str
    folder: Path

    def check(self, engine: Engine) -> publish.Tested:
        return publish.check(self.row, self.folder, engine, self.reference)


Maker = Callable[..., Small]


def make(
    engine: Engine, row: Row, folder: Path, day: int = 0, sizes: tuple[int, ...] = (MB, 3 * MB)
) -> Small:
    """Build an image of one random layer per size, and write its manifest and test report.

    ``day`` counts from DAY_ONE, and is when the manifest says that it was built.
    """
    context = folder / "context"
    context.mkdir(parents=True)
    lines = ["FROM scratch"]
    for number, size in enumerate(sizes):
        (context / f"layer{number}").write_bytes(random.randbytes(size))
        lines.append(f"COPY layer{number} /layer{number}")
    (context / "Dockerfile").write_text("\n".join(lines) + "\n")
    contents = uuid.uuid4().hex[:16]
    reference = f"{REPOSITORY}:{contents}"
    image_id = engine.build(
        BuildRequest(
            dockerfile=context / "Dockerfile",
            context=context,
            log=folder / "build.log",
            labels={"dev.trainyard.contents-id": contents, "dev.trainyard.id": row.id},
            tag=reference,
        )
    )
    built = DAY_ONE + timedelta(days=day)
    write_manifest(row, folder, image_id, contents, built)
    write_report(folder, built + timedelta(minutes=5))
    return Small(row, reference, image_id, contents, folder)


def write_manifest(row: Row, folder: Path, image_id: str, contents: str, built: datetime) -> None:
    """What the builder writes for a CPU row whose image is what the row says."""
    ops = {op: {"loads": True, "prebuilt": True, "file": op, "elf": [], "ptx": []} for op in row.ops}
    measured: dict[str, Any] = {
        "os": row.base.name,
        "python": f"{row.python}.4",
        "torch": {"version": row.torch.version, "local": row.torch.build, "cuda": None, "archs": []},
        "cudnn": None,
        "nccl": None,
        "deepspeed": {"version": row.deepspeed, "accelerator": "cpu", "torch": row.torch.minor, "ops": ops},
        "compilers": [],
        "environment": ["PATH"],
    }
    found = {
        "id": row.id,
        "image_id": image_id,
        "contents_id": contents,
        "built_at": built.isoformat(timespec="seconds"),
        "base": {"name": row.base.image, "digest": f"sha256:{'0' * 64}", "origin": "registry", "ref": "x"},
        "measured": measured,
    }
    manifest.write(found, folder)


def write_report(
    folder: Path,
    when: datetime,
    tests: int = 60,
    failures: int = 0,
    errors: int = 0,
    skipped: int = 0,
    properties: str = "",
) -> None:
    """What pytest writes."""
    (folder / "tests.xml").write_text(
        '<?xml version="1.0" encoding="utf-8"?><testsuites name="pytest tests">'
        f'<testsuite name="pytest" errors="{errors}" failures="{failures}" skipped="{skipped}" '
        f'tests="{tests}" time="1.0" timestamp="{when.isoformat()}">'
        f"<properties>{properties}</properties></testsuite></testsuites>"
    )
