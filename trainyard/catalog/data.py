"""Gather what the catalog shows, typed: one :class:`Entry` per row, with a status that can be trusted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path
from typing import Any, Literal

from trainyard import diff, gate
from trainyard.catalog import report
from trainyard.catalog.files import read_json, read_text
from trainyard.catalog.measured import Manifest, typed
from trainyard.catalog.report import Case, Report
from trainyard.model import InputError, Row

Kind = Literal["tested", "built", "failed", "differs", "missing"]

#: The nights that a page lists.  Older ones stay in the folder; a page says how many there are.
NIGHTS = 30
#: The bill of materials of a build, beside its manifest.
SBOM = "sbom.json"
#: Files of a build that the site carries along, and what a page calls them.
FILES = {
    "manifest.json": "manifest: everything that was measured",
    "tests.xml": "test report (JUnit)",
    SBOM: "SBOM (CycloneDX)",
    "diff.json": "differences to the build before",
}
NIGHT = re.compile(r"(\d{4})(\d{2})(\d{2})-([0-9a-z]+)")


@dataclass(frozen=True)
class Sources:
    """Where everything comes from."""

    rows: tuple[Row, ...]
    out: Path  # out/<id>/manifest.json, tests.xml and, where there are any, sbom.json, changelog.md
    images: Path  # images/<id>/Dockerfile, requirements.lock
    history: Path | None = None  # history/<id>/<YYYYMMDD>-<contents id>/ with the same files as out/<id>
    registry: str | None = None  # ghcr.io/org/trainyard; None: images are only on this machine
    repository: str = "trainyard"  # the name that local images are tagged with
    source_url: str | None = None  # the checkout on the web; None: Dockerfiles and locks are copied


@dataclass(frozen=True)
class Status:
    """What can be claimed of an image, and why not more."""

    kind: Kind
    reasons: tuple[str, ...] = ()
    passed: int = 0
    skipped: int = 0

    @property
    def short(self) -> str:
        return SHORT[self.kind]

    @property
    def label(self) -> str:
        return LABELS[self.kind]

    @property
    def tests(self) -> str:
        if self.kind == "failed":
            return f"{len(self.reasons)} failed, {self.passed} passed"
        if not self.passed:
            return ""
        return f"{self.passed} passed" + (f", {self.skipped} skipped" if self.skipped else "")


SHORT: dict[Kind, str] = {
    "tested": "tested",
    "built": "built only",
    "failed": "failed",
    "differs": "differs",
    "missing": "not built",
}
LABELS: dict[Kind, str] = {
    "tested": "built and tested",
    "built": "built, not tested",
    "failed": "tests failed",
    "differs": "built, but not what its row says now",
    "missing": "not built",
}


@dataclass(frozen=True)
class Build:
    """One build with all that is known of it."""

    folder: Path
    manifest: Manifest
    report: Report | None
    raw: dict[str, Any]  # the manifest as the gate takes it

    @property
    def components(self) -> int | None:
        """The number of components in the SBOM; None where there is no SBOM."""
        path = self.folder / SBOM
        if not path.exists():
            return None
        found = read_json(path)
        if found.get("bomFormat") != "CycloneDX":
            raise InputError(f"{path}: not a CycloneDX SBOM; make it anew or remove it")
        return len(found.get("components", []))


@dataclass(frozen=True)
class Night:
    """One entry of the history: what a page says of an older build."""

    date: str  # YYYY-MM-DD; and HH:MM in UTC where a day has more than one
    tag: str  # <id>-<YYYYMMDD>-<contents id>
    contents_id: str
    image_id: str
    size_bytes: int
    status: Status
    changelog: str | None  # Markdown; None for the first night that is kept


@dataclass(frozen=True)
class Entry:
    """Everything that the catalog says about one row."""

    row: Row
    build: Build | None
    status: Status
    nights: tuple[Night, ...]  # newest first
    older_nights: int  # how many more there are

    @property
    def current(self) -> Night | None:
        """The night that the shown build was published in; None where it was not."""
        if self.build is None:
            return None
        image_id = self.build.manifest.image_id
        return next((night for night in self.nights if night.image_id == image_id), None)

    @property
    def published(self) -> Night | None:
        """The night whose image a floating tag may point to: the newest that passed its tests."""
        return next((night for night in self.nights if night.status.kind == "tested"), None)


def entries(sources: Sources) -> Iterator[Entry]:
    """Each row's entry, one at a time: a thousand manifests need not lie in memory together.

    Raises InputError that names the first file that cannot be used.
    """
    for row in sources.rows:
        yield _entry(row, sources)


def _entry(row: Row, sources: Sources) -> Entry:
    folders = _night_folders(sources.history / row.id) if sources.history else []
    builds = [_build(row.id, folder) for folder in folders[:NIGHTS]]
    builds.sort(key=lambda one: (one.folder.name[:8], one.manifest.built_at), reverse=True)
    days = Counter(one.folder.name[:8] for one in builds)
    local = sources.out / row.id
    candidates = ([_build(row.id, local)] if (local / "manifest.json").exists() else []) + builds
    build = max(candidates, key=lambda one: one.manifest.built_at, default=None)
    return Entry(
        row=row,
        build=build,
        status=judge(row, build),
        nights=tuple(
            _night(row.id, one, before, days[one.folder.name[:8]] > 1)
            for one, before in zip(builds, [*builds[1:], None], strict=False)
        ),
        older_nights=max(len(folders) - NIGHTS, 0),
    )


def _night_folders(folder: Path) -> list[Path]:
    """The nights of an image, newest first.  A name with a dot is a download that is not done."""
    found = [path for path in folder.iterdir() if "." not in path.name] if folder.exists() else []
    for path in found:
        if not NIGHT.fullmatch(path.name):
            raise InputError(f"{path}: not the name of a night, <YYYYMMDD>-<contents id>; move it away")
    return sorted(found, key=lambda path: path.name, reverse=True)


def _night(id_: str, build: Build, before: Build | None, with_time: bool) -> Night:
    name = build.folder.name
    date = f"{name[:4]}-{name[4:6]}-{name[6:8]}"
    if with_time:
        date += f" {build.manifest.built_at.astimezone(UTC):%H:%M}"
    return Night(
        date=date,
        tag=f"{id_}-{name}",
        contents_id=build.manifest.contents_id,
        image_id=build.manifest.image_id,
        size_bytes=build.manifest.size_bytes,
        status=judge(None, build),
        changelog=_changelog(build, before),
    )


def _changelog(build: Build, before: Build | None) -> str | None:
    """What was written when it was published; else what differs from the night before, if known."""
    written = build.folder / "changelog.md"
    if written.exists():
        return read_text(written)
    if before is None:
        return None
    try:
        return diff.markdown(diff.diff(before.raw, build.raw))
    except KeyError as error:
        path = before.folder / "manifest.json"
        raise InputError(f"{path}: cannot be compared: {error} is not in it; move it away") from error


def _build(id_: str, folder: Path) -> Build:
    path = folder / "manifest.json"
    raw = read_json(path)
    manifest = typed(raw, path)
    if manifest.id != id_:
        raise InputError(f"{path}: the manifest of {manifest.id}, in the folder of {id_}; move it there")
    tests = folder / "tests.xml"
    return Build(folder, manifest, report.read(tests, id_) if tests.exists() else None, raw)


def judge(row: Row | None, build: Build | None) -> Status:
    """The status of a build.  Without a row, as for older builds, contents are not compared.

    A report counts only where it is known to be younger than the build.
    """
    if build is None:
        return Status("missing")
    tests = build.report
    if tests and tests.started is None:
        tests, why = None, "its test report does not say when it ran"
    elif tests and tests.started and tests.started < build.manifest.built_at:
        tests, why = None, "its test report is older than the build"
    elif tests is None:
        why = "there is no test report"
    else:
        why = "no test ran" + (f": {tests.count('skipped')} were skipped" if tests.cases else "")
    passed, skipped = (tests.count("passed"), tests.count("skipped")) if tests else (0, 0)
    if tests and tests.failures:
        return Status("failed", tuple(_named(case) for case in tests.failures), passed, skipped)
    if row is not None and (found := differences(row, build)):
        return Status("differs", tuple(found), passed, skipped)
    return Status("tested", (), passed, skipped) if passed else Status("built", (why,))


def _named(case: Case) -> str:
    return f"{case.group}: {case.name}" + (f" [{case.parameter}]" if case.parameter else "")


def differences(row: Row, build: Build) -> list[str]:
    """What the gate says of a build against today's row."""
    try:
        return gate.differences(row, build.raw)
    except KeyError as error:
        path = build.folder / "manifest.json"
        raise InputError(f"{path}: {error} is not in it; build the image again") from error
