#!/usr/bin/env python3
"""How long a container takes to start: an image of ours against the bare base it stands on.

    .venv/bin/python bench/startup.py cpu-pt213 [--runs 15]

Times ``docker run --rm IMAGE true`` as a user sees it.  The kinds take turns, so that whatever
else the machine does meets all of them alike, and every figure is a ratio to the base's in the
same run.  The health check is off: Docker starts it beside the command, as it does for nobody
whose command is ``true``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from trainyard import engine


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("id", help="an image that was built")
    parser.add_argument("--runs", type=int, default=15, help="of each kind (15)")
    args = parser.parse_args()
    manifest = ROOT / "out" / args.id / "manifest.json"
    if not manifest.exists():
        sys.exit(f"{args.id} is not built here: make build MATRIX={args.id}")
    base = json.loads(manifest.read_text())["base"]["ref"]
    docker = engine.connect()
    kinds = {
        "base": [base, "/bin/true"],
        "image, no entrypoint": ["--entrypoint", "/bin/true", f"trainyard:{args.id}"],
        "image": [f"trainyard:{args.id}", "/bin/true"],
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(args.runs + 1):
        for kind, arguments in kinds.items():
            command = [docker.docker, "run", "--rm", "--no-healthcheck", *arguments]
            begin = time.perf_counter()
            subprocess.run(command, env=docker.environment, check=True)
            if turn:  # the first turn warms caches
                seconds[kind].append(time.perf_counter() - begin)
    report(seconds)


def report(seconds: dict[str, list[float]]) -> None:
    """Print the median and the spread of each kind, and its ratio to the base's median."""
    unit = statistics.median(seconds["base"])
    print(f"{'docker run --rm ... true':26} {'median':>8} {'min':>8} {'max':>8} {'/ base':>7}")
    for kind, times in seconds.items():
        median = statistics.median(times)
        row = f"{median:7.3f}s {min(times):7.3f}s {max(times):7.3f}s {median / unit:7.2f}"
        print(f"{kind:26} {row}")
    added = statistics.median(
        mine - plain for mine, plain in zip(seconds["image"], seconds["image, no entrypoint"], strict=True)
    )
    print(f"the entrypoint adds {1000 * added:.0f} ms (median of {len(seconds['image'])} pairs)")


if __name__ == "__main__":
    main()
