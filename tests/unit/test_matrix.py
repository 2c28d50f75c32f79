"""A wrong matrix gives one message: the line, the value, and what would be accepted.

Each file under ``wrong/`` is a whole matrix that says in its first two lines what is expected.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainyard import resolve
from trainyard.matrix import load
from trainyard.model import InputError, Where

HERE = Path(__file__).parent
WRONG = sorted((HERE / "wrong").glob("*.yaml"))
SHIPPED = HERE.parent.parent / "matrix.yaml"


def expectation(path: Path) -> tuple[str, str]:
    """The substring and the line number that a wrong matrix promises."""
    first, second, *_ = path.read_text(encoding="utf-8").splitlines()
    return first.removeprefix("# expect: "), second.removeprefix("# line: ")


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_wrong_matrix_is_refused_with_its_line(path: Path) -> None:
    expected, line = expectation(path)
    with pytest.raises(InputError) as refused:
        resolve.rows(load(path))
    message = str(refused.value)
    assert message.startswith(f"{path}:{line}: ")
    assert expected in message
    assert "\n" not in message


def test_there_are_wrong_matrices() -> None:
    assert len(WRONG) >= 60


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.yaml:1: no such file"):
        load(tmp_path / "none.yaml")


@pytest.mark.parametrize("content", [b"", b"\n\n", b"# nothing\n"])
def test_empty_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "matrix.yaml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"matrix\.yaml:1: the file is empty"):
        load(path)


def test_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "matrix.yaml"
    path.write_bytes(b"default: \xff\xfe")
    with pytest.raises(InputError, match="cannot be read as UTF-8"):
        load(path)


def test_where_finds_the_line_of_a_value() -> None:
    lines = SHIPPED.read_text(encoding="utf-8").splitlines()
    matrix = load(SHIPPED)
    for stack in matrix.file.stacks:
        where = matrix.where("stacks", stack, "torch")
        assert lines[where.line - 1].strip().startswith("torch:")
        assert lines[matrix.where("stacks", stack).line - 1] == f"  {stack}:"


def test_where_of_an_absent_key_is_its_parent() -> None:
    matrix = load(SHIPPED)
    assert matrix.where("stacks", "cpu-pt213", "nccl") == matrix.where("stacks", "cpu-pt213")
    assert matrix.where("no", "such") == Where(SHIPPED, matrix.where().line)


def test_exclude_takes_rows_out(tmp_path: Path) -> None:
    path = tmp_path / "matrix.yaml"
    text = SHIPPED.read_text(encoding="utf-8")
    entry = 'exclude: [{id: "cu13*-devel", reason: "too large for our disks"}]'
    path.write_text(text.replace("exclude: []", entry), encoding="utf-8")
    matrix = load(path)
    ids = [cell.id for cell in matrix.cells]
    assert "cu130-pt213-devel" not in ids
    assert "cu130-pt213" in ids
    assert len(ids) == len(matrix.all_cells) - 4


LINES = SHIPPED.read_text(encoding="utf-8").splitlines()
PIECES = st.sampled_from(["", "null", "1.10", "[", "{}", "- a", '"x"', "cu990", "&a", "\t", "é: 1"])


@settings(
    max_examples=60,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(number=st.integers(0, len(LINES) - 1), piece=PIECES, keep_key=st.booleans())
def test_a_damaged_matrix_loads_or_is_refused_with_a_line(
    tmp_path: Path, number: int, piece: str, keep_key: bool
) -> None:
    line = LINES[number]
    key = line.split(":")[0] + ": " if keep_key and ":" in line else ""
    path = tmp_path / "matrix.yaml"
    damaged = [*LINES[:number], key + piece, *LINES[number + 1 :]]
    path.write_text("\n".join(damaged), encoding="utf-8")
    try:
        resolve.rows(load(path))
    except InputError as refused:
        prefix, _, rest = str(refused).removeprefix(f"{path}:").partition(": ")
        assert prefix.isdecimal()
        assert rest
