"""Run the image tests (tests/image) against a built image."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from trainyard.builder import build_twin
from trainyard.engine import Engine
from trainyard.hostenv import Say
from trainyard.model import StepFailed
from trainyard.plan import Item


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
