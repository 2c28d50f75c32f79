"""What the probe reads: Python's and Debian's own records, and where the bytes of an image are.

The probe as a whole runs inside images (tests/image); here are its parts, on this interpreter.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from email.message import Message
from pathlib import Path

import pytest

from trainyard import probe


def metadata(*fields: tuple[str, str]) -> Message:
    found = Message()
    for name, value in fields:
        found[name] = value
    return found


MIT = ("Classifier", "License :: OSI Approved :: MIT License")
BSD = ("Classifier", "License :: OSI Approved :: BSD License")
OSI = ("Classifier", "License :: OSI Approved")
TOPIC = ("Classifier", "Topic :: Software Development")


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ([("License-Expression", "MIT OR Apache-2.0"), ("License", "old words"), BSD], "MIT OR Apache-2.0"),
        ([("License", "Apache 2.0"), MIT], "Apache 2.0"),
        ([("License", "UNKNOWN"), MIT], "MIT License"),
        ([("License", "Permission is hereby granted, free of charge, " * 9), BSD], "BSD License"),
        ([TOPIC, OSI, MIT, BSD], "MIT License / BSD License"),
        ([("License", "MIT\n   License")], "MIT License"),
        ([TOPIC], None),
    ],
)
def test_licence_is_what_the_package_declares_best(
    fields: list[tuple[str, str]], licence: str | None
) -> None:
    assert probe.pip_licence(metadata(*fields)) == licence


def test_python_packages_have_the_hash_of_their_record() -> None:
    found = {one["name"]: one for one in probe.pip_details()}
    pytest_ = found["pytest"]
    record = importlib.metadata.distribution("pytest").read_text("RECORD")
    assert record is not None
    assert pytest_["version"] == pytest.__version__
    assert pytest_["licence"] == "MIT"
    assert pytest_["record_sha256"] == hashlib.sha256(record.encode()).hexdigest()
    assert pytest_["bytes"] > 100_000


MACHINE_READABLE = """Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: thing

Files: *
Copyright: 2020 Somebody
License: GPL-2+

Files: lib/*
License: BSD-3-clause
 Redistribution and use in source and binary forms
License:
"""


@pytest.mark.parametrize(
    ("text", "licences"),
    [
        (MACHINE_READABLE, ["BSD-3-clause", "GPL-2+"]),
        ("This package was debianized by hand.\n\nLicense: GPL\n", []),
        ("", []),
        (None, []),
    ],
)
def test_debian_licences_come_from_machine_readable_files_only(
    tmp_path: Path, text: str | None, licences: list[str]
) -> None:
    file = tmp_path / "copyright"
    if text is not None:
        file.write_text(text)
    assert probe.debian_licences(file) == licences


def test_files_are_counted_once_and_by_folder(tmp_path: Path) -> None:
    for name, size in {"opt/venv/lib/a": 500, "opt/venv/b": 30, "usr/bin/c": 7, "top": 2}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    os.link(tmp_path / "opt/venv/b", tmp_path / "usr/bin/b")
    (tmp_path / "usr/link").symlink_to(tmp_path / "opt")
    os.mkfifo(tmp_path / "usr/fifo")
    found = probe.files(str(tmp_path))
    folders = {one["path"]: one["bytes"] for one in found["folders"]}
    assert found["count"] == 4
    assert found["bytes"] == 539 == sum(folders.values())
    assert folders["/"] == 2
    assert folders["/opt/venv"] + folders["/usr/bin"] == 537
    assert found["biggest"][0] == {"path": "/opt/venv/lib/a", "bytes": 500}


def test_only_the_biggest_files_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "BIGGEST", 3)
    for size in range(10):
        (tmp_path / str(size)).write_bytes(b"x" * size)
    found = probe.files(str(tmp_path))
    assert [one["bytes"] for one in found["biggest"]] == [9, 8, 7]
    assert (found["count"], found["bytes"]) == (10, 45)


def test_the_hash_is_of_the_first_file_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("words")
    assert (
        probe.sha256(tmp_path / "a", tmp_path / "b", tmp_path / "c") == hashlib.sha256(b"words").hexdigest()
    )
    assert probe.sha256(tmp_path / "a") is None
