"""A build that is stopped half-way loses nothing, leaves nothing running, and goes on when run again.

The build is the real one of ``cpu-pt213``, from a copy of the checkout whose template ends with
a step that would take minutes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainyard.engine import Engine
from trainyard.layout import layout
from trainyard.model import Row

ROOT = Path(__file__).resolve().parents[2]
SECONDS = "297.531"  # a number that nobody else sleeps for


@pytest.fixture
def slow_checkout(tmp_path: Path, docker: Engine, cpu_row: Row) -> Iterator[Path]:
    """A copy of the checkout in which building ``cpu-pt213`` hangs in its last step."""
    assert docker.image(f"trainyard:{cpu_row.id}"), "build cpu-pt213 first: make build"
    copy = tmp_path / "checkout"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    template = copy / "templates/Dockerfile.j2"
    template.write_text(template.read_text() + f"RUN sleep {SECONDS}\n")
    run(copy, "render", cpu_row.id).communicate(timeout=60)
    yield copy
    for pid in sleepers():  # only after a failure of the test
        os.kill(pid, signal.SIGKILL)


def run(checkout: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "build.py", *words],
        cwd=checkout,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def sleepers() -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[:2] == [b"sleep", SECONDS.encode()]:
            found.append(int(entry.parent.name))
    return found


def wait_until(what: str, happened: object, seconds: float) -> None:
    assert callable(happened)
    ends = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < ends, f"waited {seconds} s until {what}"
        time.sleep(0.2)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name
)
def test_a_stopped_build_keeps_the_tag_and_leaves_nothing_running(
    slow_checkout: Path, docker: Engine, cpu_row: Row, number: signal.Signals
) -> None:
    tag = f"trainyard:{cpu_row.id}"
    before = docker.image(tag)
    assert before is not None
    building = run(slow_checkout, "build", cpu_row.id)
    try:
        wait_until("the last step runs", sleepers, 600)
        building.send_signal(number)
        said, _ = building.communicate(timeout=60)
    finally:
        building.kill()
    wait_until("the step is gone", lambda: not sleepers(), 60)
    after = docker.image(tag)
    assert after is not None
    assert after.id == before.id
    assert docker.image(f"trainyard-candidate:{cpu_row.id}") is None
    if number != signal.SIGKILL:
        assert building.returncode == 130, said
        assert "nothing was tagged" in said
        assert "Traceback" not in said


def test_an_engine_killed_during_a_build_is_one_message_and_the_next_command_goes_on(
    slow_checkout: Path, docker: Engine, cpu_row: Row
) -> None:
    if not docker.address.private:
        pytest.fail("this test kills the engine, so it needs a private one: TRAINYARD_ENGINE=private")
    tag = f"trainyard:{cpu_row.id}"
    before = docker.image(tag)
    assert before is not None
    building = run(slow_checkout, "build", cpu_row.id)
    try:
        wait_until("the last step runs", sleepers, 600)
        os.kill(int(layout().pidfile.read_text()), signal.SIGKILL)
        said, _ = building.communicate(timeout=60)
    finally:
        building.kill()
    assert building.returncode == 1
    assert "went away during the build" in said
    assert "Traceback" not in said
    again = run(ROOT, "build", cpu_row.id)
    said, _ = again.communicate(timeout=900)
    assert again.returncode == 0, said
    assert "had not been stopped; cleaned up" in said
    after = docker.image(tag)
    assert after is not None
    assert after.id == before.id
    assert not sleepers()


def test_two_builds_of_one_row_at_once_both_end_well(docker: Engine, cpu_row: Row) -> None:
    """The second finds the engine of the first and waits for its row."""
    both = [run(ROOT, "build", cpu_row.id) for _ in range(2)]
    said = [one.communicate(timeout=900)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], said
