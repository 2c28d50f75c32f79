"""The table of images in README.md comes from the rows."""

from __future__ import annotations

import pytest
from shipped import ROWS

from trainyard import readme
from trainyard.model import InputError


def test_there_is_one_line_a_stack_with_its_drivers() -> None:
    lines = readme.table(ROWS).splitlines()[2:]
    assert len(lines) == len({(row.stack, row.arch) for row in ROWS})
    (old,) = (line for line in lines if "`cu121-pt29`" in line)
    assert "torch 2.9.1, CUDA 12.8" in old
    assert ">= 525.60.13" in old
    assert "CUDA 12.1 or newer" in old


def test_only_what_is_between_the_marks_changes() -> None:
    text = f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n"
    fresh = readme.update(text, ROWS)
    assert fresh.startswith("before\n")
    assert fresh.endswith("\nafter\n")
    assert "old" not in fresh
    assert readme.update(fresh, ROWS) == fresh


def test_a_readme_without_marks_is_refused() -> None:
    with pytest.raises(InputError, match="marks"):
        readme.update("no marks", ROWS)
