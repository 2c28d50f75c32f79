#!/usr/bin/env python3
"""How the verbs that read the matrix keep up with a big one: time and memory, per verb.

    .venv/bin/python bench/rows.py [--rows 1000]

Makes a copy of this checkout whose matrix has every stack many times over, each copy with the
locks of its original, and runs the verbs there as a user does.  Every time is also given as a
ratio to the same verb over the checkout's own rows, in the same run.  Nothing is built; `plan`
asks the engine, where there is one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("requirements.lock", "build.lock", "uv.lock")
VERBS = (
    ("list",),
    ("explain", "{last}"),
    ("lock", "--check"),
    ("render",),
    ("render", "--check"),
    ("plan",),
    ("catalog", "--to", "site"),
)


@dataclass(frozen=True)
class Cost:
    """What one run of one verb took."""

    seconds: float
    mb: float  # the process's largest resident set


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1000, help="how many images the matrix has (1000)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trainyard-rows-") as folder:
        here, big = Path(folder, "here"), Path(folder, "big")
        copy_checkout(here)
        copy_checkout(big)
        ids = multiply(big, args.rows)
        own = sorted(path.name for path in (here / "images").iterdir() if path.is_dir())
        print(f"{'build.py':18} {len(ids):>6} rows {'memory':>9} {len(own):>6} rows {'ratio':>6}")
        for verb in VERBS:
            many = run(big, [part.format(last=ids[-1]) for part in verb])
            few = run(here, [part.format(last=own[-1]) for part in verb])
            times = f"{many.seconds:10.1f}s {many.mb:6.0f} MB {few.seconds:10.1f}s"
            print(f"{verb_name(verb):18} {times} {many.seconds / few.seconds:6.1f}")


def verb_name(verb: tuple[str, ...]) -> str:
    return " ".join(part for part in verb[:2] if not part.startswith(("{", "--to")))


def copy_checkout(to: Path) -> None:
    """Copy what git tracks, or would; never what was built."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def multiply(checkout: Path, count: int) -> list[str]:
    """Give the checkout's matrix ``count`` rows (rounded up to whole stacks) and return their ids."""
    path = checkout / "matrix.yaml"
    matrix: dict[str, Any] = yaml.safe_load(path.read_text())
    images = checkout / "images"
    folders = {folder.name for folder in images.iterdir() if folder.is_dir()}
    stacks, matrix["stacks"] = matrix["stacks"], {}
    matrix.pop("exclude", None)
    ids: list[str] = []
    for number, (name, stack) in enumerate(itertools.cycle(stacks.items())):
        if len(ids) >= count:
            break
        copy = f"{name}-n{number:04}"
        matrix["stacks"][copy] = stack
        for variant, arm in itertools.product(matrix["variants"], ("", "-arm64")):
            original = f"{name}{arm}{variant}"
            if original in folders:
                ids.append(f"{copy}{arm}{variant}")
                (images / ids[-1]).mkdir()
                for lock in filter(Path.exists, (images / original / each for each in LOCKS)):
                    shutil.copy2(lock, images / ids[-1] / lock.name)
    matrix["default"] = ids[0]
    path.write_text(yaml.safe_dump(matrix, sort_keys=False))
    for folder in folders:
        shutil.rmtree(images / folder)
    return ids


def run(checkout: Path, verb: list[str]) -> Cost:
    """Run a verb in a checkout and say what it took; a verb that fails ends the benchmark."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "build.py", *verb], cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    output = process.stdout.read().decode(errors="replace")
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"build.py {' '.join(verb)}: exit code {process.returncode}\n{output[-2000:]}")
    return Cost(seconds, usage.ru_maxrss / 1024)


if __name__ == "__main__":
    main()
