"""Run the image tests (tests/image) against a built image."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trainyard.builder import build_twin
from trainyard.engine import Engine
from trainyard.hostenv import Say
from trainyard.model import StepFailed
from trainyard.plan import Item


def run(item: Item, root: Path, engine: Engine, pytest_args: Sequence[str], say: Say) -> None:
    """Test one image; the report goes to ``out/<id>/tests.xml``.

    On a host without a GPU a CUDA image trains on its CPU twin, which is built first.
    Raises StepFailed where a test fails, or where no test ran.
    """
    row = item.row
    command = [sys.executable, "-m", "pytest", "tests/image", "--images", row.id]
    command += ["--junitxml", str(root / "out" / row.id / "tests.xml"), "-p", "no:cacheprovider"]
    if row.twin_ops and not os.environ.get("GPUS") and not os.environ.get("REQUIRE_GPU"):
        say(f"{row.id}: building the CPU twin for the training tests")
        command += [
            "--twin",
            str(build_twin(item, root, engine, lambda name: say(f"{row.id}: {name[:100]}"))),
        ]
    say(f"{row.id}: testing")
    done = subprocess.run([*command, *pytest_args], cwd=root, env=engine.environment)
    if done.returncode == 2:  # pytest was interrupted
        raise KeyboardInterrupt
    if done.returncode:
        raise StepFailed(f"{row.id}: image tests failed; report: out/{row.id}/tests.xml")
