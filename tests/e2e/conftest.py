"""What the end-to-end tests share: a real engine, and the base that builds start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainyard import bases, engine, matrix, resolve
from trainyard.model import Row

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def docker() -> engine.Engine:
    return engine.connect()


@pytest.fixture(scope="session")
def cpu_row() -> Row:
    rows = resolve.rows(matrix.load(ROOT / "matrix.yaml"))
    return next(row for row in rows if row.id == "cpu-pt213")


@pytest.fixture(scope="session")
def base(docker: engine.Engine, cpu_row: Row) -> bases.BaseImage:
    return bases.resolve_base(cpu_row.base, "auto", docker)
