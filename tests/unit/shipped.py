"""The rows that this checkout ships, for tests of what is made from them."""

from __future__ import annotations

from pathlib import Path

from trainyard import matrix, resolve

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "images"
ROWS = resolve.rows(matrix.load(ROOT / "matrix.yaml"))
BY_ID = {row.id: row for row in ROWS}
IDS = [row.id for row in ROWS]
