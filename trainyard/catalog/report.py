"""A run of the image tests, from the JUnit report that pytest writes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from trainyard.catalog.files import read_text
from trainyard.model import InputError

Result = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Case:
    """One test."""

    group: str
    name: str
    parameter: str
    result: Result
    seconds: float
    message: str


@dataclass(frozen=True)
class Report:
    """One run of the image tests."""

    started: datetime | None
    cases: tuple[Case, ...]

    def count(self, result: Result) -> int:
        return sum(case.result == result for case in self.cases)

    @cached_property
    def failures(self) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if case.result == "failed")

    @property
    def seconds(self) -> float:
        return sum(case.seconds for case in self.cases)

    @property
    def groups(self) -> dict[str, list[Case]]:
        found: dict[str, list[Case]] = {}
        for case in self.cases:
            found.setdefault(case.group, []).append(case)
        return found


def read(path: Path, id_: str) -> Report:
    """Read a JUnit report of tests/image; pytest ids lose the image's id, which is the page's title.

    Raises InputError where the file is no JUnit report.
    """
    try:
        root = ElementTree.fromstring(read_text(path).encode())
    except ElementTree.ParseError as error:
        raise InputError(f"{path}: no JUnit report ({error}); test again or remove it") from error
    stamps = [suite.get("timestamp") for suite in root.iter("testsuite")]
    started = [_moment(path, stamp) for stamp in stamps if stamp]
    return Report(
        started=min(started, default=None),
        cases=tuple(_case(path, case, id_) for case in root.iter("testcase")),
    )


def _moment(path: Path, stamp: str) -> datetime:
    try:
        moment = datetime.fromisoformat(stamp)
    except ValueError as error:
        raise InputError(f'{path}: "{stamp}" is no time; test again or remove it') from error
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _case(path: Path, case: ElementTree.Element, id_: str) -> Case:
    name, _, inside = case.get("name", "").partition("[")
    parameter = inside.removesuffix("]")
    parameter = "" if parameter == id_ else parameter.removeprefix(f"{id_}-")
    result: Result = "passed"
    message = ""
    for child in case:
        # A test may fail and its teardown skip or fail, too: the first failure is never covered up.
        if child.tag in ("failure", "error", "skipped") and result != "failed":
            result = "skipped" if child.tag == "skipped" else "failed"
            message = child.get("message") or (child.text or "").strip()
    try:
        seconds = float(case.get("time", "0"))
    except ValueError as error:
        raise InputError(f"{path}: the time of {name} is no number; test again or remove it") from error
    return Case(
        group=case.get("classname", "").rsplit(".", 1)[-1].removeprefix("test_").replace("_", " "),
        name=name.removeprefix("test_").replace("_", " "),
        parameter=parameter,
        result=result,
        seconds=seconds,
        message=message,
    )
