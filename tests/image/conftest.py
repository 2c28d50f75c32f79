"""Run this folder against built images: ``pytest tests/image --images cpu-pt213,cu121-pt29``.

A test asks for the ``image`` fixture and runs once per image; its pytest id is the image's id.
Whatever does not apply to a row is deselected (``@pytest.mark.only("has_deepspeed")`` names a
property of the row), never skipped: a skip is turned into a failure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import testinfra

sys.path.insert(0, str(Path(__file__).parent))  # whatever import mode pytest uses

from containers import Container, Image, required_gpus, start

from trainyard import engine, resolve
from trainyard.model import Row
from trainyard.publish import IMAGE_PROPERTY, SELECTION_PROPERTY

ROWS = pytest.StashKey[dict[str, Row]]()
NOTES = pytest.StashKey[dict[str, list[str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which images, and what they may use."""
    group = parser.getgroup("trainyard")
    group.addoption("--images", default="", help="image ids, separated by commas")
    group.addoption("--image-ref", help="the image to test (one id); default trainyard:<id>")
    group.addoption("--matrix", type=Path, help="default: matrix.yaml in the checkout")
    group.addoption(
        "--gpus",
        default=os.environ.get("GPUS") or ("all" if required_gpus() else ""),
        help="GPUs for the containers of CUDA images: all or N",
    )
    group.addoption(
        "--twin",
        type=Path,
        help="folder with DeepSpeed built for the CPU, for CUDA images on hosts without a GPU;"
        " default out/<id>/twin",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Look the images up before anything is collected."""
    config.addinivalue_line(
        "markers", "only(condition): for rows where this property is true ('not ' negates)"
    )
    config.stash[NOTES] = {}
    config.stash[ROWS] = _rows(config)


def _rows(config: pytest.Config) -> dict[str, Row]:
    ids = [part for part in config.getoption("--images", default="").split(",") if part]
    if not ids:
        return {}
    path = config.getoption("--matrix") or config.rootpath / "matrix.yaml"
    known = {row.id: row for row in resolve.rows(resolve.load(path))}
    for image_id in ids:
        if image_id not in known:
            raise pytest.UsageError(f"--images: {image_id} is not one of {', '.join(known)}")
    if config.getoption("--image-ref") and len(ids) > 1:
        raise pytest.UsageError("--image-ref needs exactly one id in --images")
    return {image_id: known[image_id] for image_id in ids}


# -- which tests run -----------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Once per image; and where a test asks for ``op``, once per prebuilt op of the image."""
    if "image" not in metafunc.fixturenames:
        return
    rows = metafunc.config.stash[ROWS]
    if not rows:
        raise pytest.UsageError("name the images to test: --images ID,ID")
    if "op" in metafunc.fixturenames:
        pairs = [(row.id, op) for row in rows.values() for op in row.ops]
        names = [f"{image_id}-{op}" for image_id, op in pairs]
        metafunc.parametrize(("image", "op"), pairs, indirect=["image"], ids=names, scope="session")
    else:
        ids = list(rows)
        metafunc.parametrize("image", ids, indirect=True, ids=ids, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what does not apply to a row."""
    rows = config.stash[ROWS]
    chosen: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        callspec = getattr(item, "callspec", None)
        image_id = callspec.params.get("image") if callspec else None
        if image_id is None or not isinstance(image_id, str):  # no rows with this parameter
            (dropped if "image" in getattr(item, "fixturenames", ()) else chosen).append(item)
            continue
        conditions = [mark.args[0] for mark in item.iter_markers("only")]
        applies = all(_holds(c, rows[image_id], config) for c in conditions)
        (chosen if applies else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = chosen


def _holds(condition: str, row: Row, config: pytest.Config) -> bool:
    negated = condition.startswith("not ")
    name = condition.removeprefix("not ")
    if name == "gpus_given":
        value = bool(config.getoption("--gpus")) and not row.is_cpu
    elif name == "gpu_required":
        value = required_gpus() > 0 and not row.is_cpu
    elif name == "trains_fsdp2_here":
        value = row.fsdp2_on_cpu or (bool(config.getoption("--gpus")) and not row.is_cpu)
    else:
        value = bool(getattr(row, name))
    return value != negated


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure: no test passes by not running."""
    report = yield
    if report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped, which is not allowed here: {report.longrepr}"
    return report


# -- the image -----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def image(
    request: pytest.FixtureRequest, record_testsuite_property: Callable[[str, object], None]
) -> Iterator[Image]:
    """The image under test, with one container that lives as long as its tests."""
    config = request.config
    row = config.stash[ROWS][request.param]
    ref = config.getoption("--image-ref") or f"trainyard:{row.id}"
    gpus = "" if row.is_cpu else config.getoption("--gpus")
    found = engine.connect()
    twin = None if row.is_cpu or gpus else _twin(config, row)
    raw = start(found.client, ref, gpus, twin)
    # What was tested, for whoever publishes: this image, and all of the suite or a part of it.
    record_testsuite_property(IMAGE_PROPERTY, str(found.client.images.get(ref).id))
    record_testsuite_property(SELECTION_PROPERTY, _selected(config))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DOCKER_HOST", found.host)
            patch.setenv("PATH", str(Path(found.docker).parent), prepend=os.pathsep)
            yield Image(
                row=row,
                ref=ref,
                client=found.client,
                container=Container(raw, engine.EMULATION if found.emulates(ref) else 1),
                host=testinfra.get_host(f"docker://{raw.id}"),
                gpus=gpus,
                twin=twin,
                notes=config.stash[NOTES].setdefault(row.id, []),
            )
    finally:
        raw.remove(force=True, v=True)


def _selected(config: pytest.Config) -> str:
    """What was asked for beside this whole folder; empty where nothing was."""
    parts = [config.getoption("keyword"), config.getoption("markexpr")]
    for option in ("deselect", "ignore", "ignore_glob"):
        parts += map(str, config.getoption(option) or ())
    # of the settings, those that say what is collected; --strict-markers is one too, for example
    collecting = ("python_", "norecursedirs", "testpaths", "collect_")
    parts += [one for one in config.getoption("override_ini") or () if one.startswith(collecting)]
    parts += [name for name in ("setuponly", "setupplan") if config.getoption(name)]
    folder = str(Path(__file__).parent.relative_to(config.rootpath))
    parts += [one for one in config.args if one.rstrip("/") not in (folder, str(Path(__file__).parent))]
    return " ".join(part for part in parts if part)


def _twin(config: pytest.Config, row: Row) -> Path | None:
    path: Path = config.getoption("--twin") or config.rootpath / "out" / row.id / "twin"
    return path.resolve() if (path / "deepspeed").is_dir() else None


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what ran on which backend."""
    notes = config.stash[NOTES]
    if not any(notes.values()):
        return
    terminalreporter.section("what ran")
    for image_id, lines in notes.items():
        for line in lines:
            terminalreporter.line(f"{image_id}: {line}")
