"""Run the image tests (tests/image) against a built image."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from trainyard import manifest
from trainyard.builder import build_chromium, build_twin
from trainyard.engine import Engine
from trainyard.hostenv import Say
from trainyard.model import StepFailed
from trainyard.plan import Item

#: Written beside the report when a whole suite passed: which image, and which suite.
PASSED = "tested.json"
#: What the image with the tests' browser is built from.
CHROMIUM = Path("tests/image/chromium.Dockerfile")
#: Seconds that an interrupted suite gets to remove its containers.
CLEANUP = 60


def twin(item: Item, root: Path, engine: Engine, on_step: Callable[[str], None]) -> Path | None:
    """Build what a CUDA image trains on where no GPU is asked for; None where it needs nothing."""
    if not item.row.twin_ops or os.environ.get("GPUS") or os.environ.get("REQUIRE_GPU"):
        return None
    return build_twin(item, root, engine, on_step)


def run(
    item: Item, root: Path, engine: Engine, twin: Path | None, pytest_args: Sequence[str], say: Say
) -> None:
    """Test one image; the report goes to ``out/<id>/tests.xml``.

    Raises StepFailed where a test fails, where no test ran, or where the row's tag is not the image
    that this checkout built.
    """
    row = item.row
    passed = root / "out" / row.id / PASSED
    passed.unlink(missing_ok=True)
    image = engine.image(item.reference)
    built = manifest.read(root / "out" / row.id) or {}
    if image is None or image.id != built.get("image_id"):
        raise StepFailed(
            f"{row.id}: {item.reference} is not the image that was built here: another checkout built it "
            "meanwhile\nThe same command builds it again."
        )
    command = [sys.executable, "-m", "pytest", "tests/image", "--images", row.id]
    command += ["--matrix", str(row.where.path.resolve())]
    command += ["--junitxml", str(root / "out" / row.id / "tests.xml"), "-p", "no:cacheprovider"]
    if twin:
        command += ["--twin", str(twin)]
    say(f"{row.id}: testing")
    if _pytest([*command, *pytest_args], root, engine):
        raise StepFailed(f"{row.id}: image tests failed; report: out/{row.id}/tests.xml")
    if not pytest_args:  # a part of the suite proves nothing about the rest
        now = datetime.now(UTC).isoformat(timespec="seconds")
        passed.write_text(
            json.dumps({"image_id": image.id, "suite": suite_id(root), "passed_at": now}) + "\n"
        )


def _pytest(command: Sequence[str], root: Path, engine: Engine) -> int:
    """Run it; interrupted, it gets the time to take its containers away."""
    # If we are killed with -9, the kernel tells it.
    guard = ["setpriv", "--pdeathsig", "INT"] if shutil.which("setpriv") else []
    process = subprocess.Popen(
        [*guard, *command],
        cwd=root,
        env=engine.environment,
        start_new_session=True,  # Ctrl-C reaches us first, and it once
        # a background job of a script ignores SIGINT, and so would what it starts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        return process.wait()
    except BaseException:
        for number, seconds in ((signal.SIGINT, CLEANUP), (signal.SIGKILL, 5)):
            with contextlib.suppress(ProcessLookupError):
                # pytest alone at first: what its tests started is for its fixtures to end
                (os.kill if number == signal.SIGINT else os.killpg)(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
                break
        raise


def chromium_reference(root: Path) -> str:
    """The image with the tests' browser: one for all rows, another once its recipe changes."""
    recipe = (root / CHROMIUM).read_bytes()
    return f"trainyard-chromium:{hashlib.sha256(recipe).hexdigest()[:12]}"


def chromium(item: Item, root: Path, engine: Engine, on_step: Callable[[str], None]) -> None:
    """Build the browser that JupyterLab is looked at with, where the row has it and the engine not yet."""
    reference = chromium_reference(root)
    if item.row.has_jupyter and engine.image(reference) is None:
        build_chromium(item, root, root / CHROMIUM, reference, engine, on_step)


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
