"""What counts as tested: this image, this suite, all of it."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from shipped import BY_ID, ROOT, ROWS

from trainyard import suites
from trainyard.bases import BaseImage
from trainyard.engine import Engine
from trainyard.model import StepFailed
from trainyard.plan import Item

ROW = BY_ID["cpu-pt213"]
ITEM = Item(ROW, BaseImage("debian:bookworm-slim", "sha256:" + "1" * 64, "registry", ""), {}, None)


@dataclass
class Image:
    """What an engine says of an image."""

    id: str


class Tagged:
    """An engine whose tag points to an image."""

    def __init__(self, image: str | None) -> None:
        self.found = Image(image) if image else None

    def image(self, _: str) -> Image | None:
        return self.found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tests" / "image", tmp_path / "tests" / "image", ignore=ignore)
    (tmp_path / "out" / ROW.id).mkdir(parents=True)
    return tmp_path


def passed(root: Path, **changes: Any) -> None:
    record = {"image_id": "sha256:a", "suite": suites.suite_id(root), "passed_at": "2026-01-01"} | changes
    (root / "out" / ROW.id / suites.PASSED).write_text(json.dumps(record))


def has_passed(root: Path, image: str | None = "sha256:a") -> bool:
    return suites.has_passed(ITEM, root, cast(Engine, Tagged(image)))


def test_the_image_that_passed_this_suite_is_tested(root: Path) -> None:
    assert not has_passed(root)
    passed(root)
    assert has_passed(root)


def test_another_image_under_the_tag_is_not_tested(root: Path) -> None:
    passed(root)
    assert not has_passed(root, "sha256:b")
    assert not has_passed(root, None)


CHANGES: dict[str, Callable[[Path], object]] = {
    "a test changed": lambda root: (root / "tests/image/test_contract.py").write_text("changed"),
    "a test more": lambda root: (root / "tests/image/test_new.py").write_text("new"),
    "a test less": lambda root: (root / "tests/image/test_training.py").unlink(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_suite_has_not_been_passed(change: Callable[[Path], object], root: Path) -> None:
    passed(root)
    change(root)
    assert not has_passed(root)


def measured(root: Path, image_id: str) -> None:
    (root / "out" / ROW.id / "manifest.json").write_text(json.dumps({"image_id": image_id}))


def run(root: Path, image: str, monkeypatch: pytest.MonkeyPatch, *pytest_args: str) -> list[str]:
    """Run the suite with another program in pytest's place; return the command."""
    seen: list[list[str]] = []

    def pytest_program(command: Sequence[str], *_: object) -> int:
        seen.append(list(command))
        return 0

    monkeypatch.setattr(suites, "_pytest", pytest_program)
    suites.run(ITEM, root, cast(Engine, Tagged(image)), None, pytest_args, lambda _text: None)
    return seen[0]


def test_the_suite_tests_the_rows_of_the_matrix_that_was_asked_for(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(root, "sha256:a")
    command = run(root, "sha256:a", monkeypatch)
    assert command[command.index("--matrix") + 1] == str(ROOT / "matrix.yaml")
    assert has_passed(root)


def test_an_image_of_another_checkout_is_not_tested(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(root, "sha256:a")
    with pytest.raises(StepFailed, match="another checkout built it"):
        run(root, "sha256:b", monkeypatch)
    assert not has_passed(root, "sha256:b")


TIDY = """
import signal, sys, time
try:
    print("up", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)  # taking a container away
    open(sys.argv[1], "w").write("tidy")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_suite_may_take_its_containers_away(number: int, tmp_path: Path) -> None:
    done = tmp_path / "done"
    program = f"""
import signal, sys
from pathlib import Path
from types import SimpleNamespace
from trainyard import suites
def stop(*_): raise KeyboardInterrupt
signal.signal(signal.SIGTERM, stop)
suites._pytest([sys.executable, "-c", {TIDY!r}, {str(done)!r}], Path("."), SimpleNamespace(environment=None))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
        if number == signal.SIGTERM
        else (lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.send_signal(number)
    process.communicate(timeout=30)
    assert done.read_text() == "tidy"


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "not json"])
def test_a_record_that_cannot_be_read_is_no_pass(text: str, root: Path) -> None:
    (root / "out" / ROW.id / suites.PASSED).write_text(text)
    assert not has_passed(root)


def selected(**options: object) -> str:
    """What tests/image says was asked for, with these options of pytest besides what we always give."""
    spec = importlib.util.spec_from_file_location("image_conftest", ROOT / "tests/image/conftest.py")
    assert spec
    assert spec.loader
    conftest = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tests/image"))
        spec.loader.exec_module(conftest)
    given = {"override_ini": ["strict_markers=true", "strict_config=true"], **options}
    config = SimpleNamespace(getoption=given.get, args=["tests/image"], rootpath=ROOT)
    return str(conftest._selected(config))


def test_the_whole_suite_is_no_selection() -> None:
    assert selected() == ""


@pytest.mark.parametrize(
    "options",
    [
        {"keyword": "zero3"},
        {"deselect": ["tests/image/test_sshd.py"]},
        {"ignore": ["tests/image/test_multinode.py"]},
        {"ignore_glob": ["*sshd*"]},
        {"override_ini": ["python_files=test_contract.py"]},
        {"setupplan": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_part_of_the_suite_is_one_however_it_was_left_out(options: dict[str, object]) -> None:
    assert selected(**options)


def test_a_browser_is_built_once_and_only_where_there_is_jupyterlab(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    monkeypatch.setattr(suites, "build_chromium", lambda *arguments: built.append(arguments[3]))
    assert {row.has_jupyter for row in ROWS} == {True, False}
    for row in ROWS:
        built.clear()
        for image in (None, "sha256:a"):
            suites.chromium(replace(ITEM, row=row), root, cast(Engine, Tagged(image)), lambda _step: None)
        assert built == ([suites.chromium_reference(root)] if row.has_jupyter else [])


def test_another_recipe_is_another_browser(root: Path) -> None:
    before = suites.chromium_reference(root)
    (root / suites.CHROMIUM).write_text("FROM scratch")
    assert suites.chromium_reference(root) != before
