"""Workflows are thin: pinned actions, least permissions, and only commands that exist and are tested."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from shipped import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        yield from job["steps"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_with_their_version_beside(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if "uses:" in line]
    assert lines
    for line in lines:
        assert re.search(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_nothing_is_permitted_that_a_job_does_not_ask_for(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        assert job["permissions"]["contents"] == "read"
        assert "timeout-minutes" in job


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_command_is_one_that_exists(path: Path) -> None:
    for step in steps(path):
        if "run" not in step:
            continue
        words = [word for word in step["run"].split() if word != "sudo" and not word.startswith("--")]
        if words[0] == "make":
            assert words[1] in TARGETS, step["run"]
        else:
            assert (ROOT / words[0]).stat().st_mode & 0o111, step["run"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_no_expression_is_pasted_into_a_shell(path: Path) -> None:
    """What a variable holds would be run: https://docs.github.com/actions/reference/security/secure-use"""
    for step in steps(path):
        assert "${{" not in step.get("run", "")
