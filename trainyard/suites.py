"""Run the image tests (tests/image) against a built image."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from trainyard.builder import build_twin
from trainyard.engine import Engine
from trainyard.hostenv import Say
from trainyard.model import Row, StepFailed
from trainyard.plan import Item

#: Written beside the report when a whole suite passed: which image, and which suite.
PASSED = "tested.json"


def twin(item: Item, root: Path, engine: Engine, on_step: Callable[[str], None]) -> Path | None:
    """Build what a CUDA image trains on where no GPU is asked for; None where it needs nothing."""
    if not item.row.twin_ops or os.environ.get("GPUS") or os.environ.get("REQUIRE_GPU"):
        return None
    return build_twin(item, root, engine, on_step)


def run(
    item: Item, root: Path, engine: Engine, twin: Path | None, pytest_args: Sequence[str], say: Say
) -> None:
    """Test one image; the report goes to ``out/<id>/tests.xml``.

    Raises StepFailed where a test fails, or where no test ran.
    """
    row = item.row
    passed = root / "out" / row.id / PASSED
    passed.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "tests/image", "--images", row.id]
    command += ["--junitxml", str(root / "out" / row.id / "tests.xml"), "-p", "no:cacheprovider"]
    if twin:
        command += ["--twin", str(twin)]
    say(f"{row.id}: testing")
    done = subprocess.run([*command, *pytest_args], cwd=root, env=engine.environment)
    if done.returncode == 2:  # pytest was interrupted
        raise KeyboardInterrupt
    if done.returncode:
        raise StepFailed(f"{row.id}: image tests failed; report: out/{row.id}/tests.xml")
    image = engine.image(item.reference)
    if image and not pytest_args:  # a part of the suite proves nothing about the rest
        now = datetime.now(UTC).isoformat(timespec="seconds")
        passed.write_text(
            json.dumps({"image_id": image.id, "suite": suite_id(root), "passed_at": now}) + "\n"
        )


def tools(row: Row) -> dict[str, str]:
    """Programs that a row's tests need on this host, and Debian's packages with them."""
    return {"chromium": "chromium", "chromedriver": "chromium-driver"} if row.has_jupyter else {}


def suite_id(root: Path) -> str:
    """Hash of the image tests: another suite has not been passed yet, though the image is the same."""
    digest = hashlib.sha256()
    for path in sorted((root / "tests" / "image").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"\n{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def has_passed(item: Item, root: Path, engine: Engine) -> bool:
    """Did the image that has the row's tag pass this very suite?"""
    try:
        passed = json.loads((root / "out" / item.row.id / PASSED).read_text())
    except (OSError, ValueError):
        return False
    image = engine.image(item.reference)
    if image is None or not isinstance(passed, dict):
        return False
    return passed == passed | {"image_id": image.id, "suite": suite_id(root)}
