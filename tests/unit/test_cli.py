"""The command: exit codes, one message and no traceback, help with examples, JSON that parses."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner
from shipped import IDS, ROOT, ROWS

from trainyard import cli, lock, render
from trainyard.lock import Lock
from trainyard.model import StepFailed

VERBS = sorted(cli.main.commands)
Run = Callable[..., "Done"]


@dataclass
class Done:
    """How a run of the command ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one message on stderr."""
        assert self.out == ""
        assert "Traceback" not in self.err
        assert self.err.startswith("error: ")
        assert self.err.count("error: ") == 1
        return self.err.removeprefix("error: ").strip()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run build.py in this process."""
    before = signal.getsignal(signal.SIGTERM)

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["build.py", *arguments])
        code: object = 0
        try:
            cli.run()
        except SystemExit as ended:
            code = ended.code
        captured = capsys.readouterr()
        assert isinstance(code, int)
        return Done(code, captured.out, captured.err)

    yield call
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the checkout with the images of cpu-pt213 and cpu-pt213-base."""
    root = tmp_path / "checkout"
    for name in ("templates", "kernels", "rootfs", "images/cpu-pt213", "images/cpu-pt213-base"):
        shutil.copytree(ROOT / name, root / name, symlinks=True)
    shutil.copy2(ROOT / "images/uv.lock", root / "images")
    monkeypatch.setattr(cli, "ROOT", root)
    return root


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a command asks for an engine."""

    def connect(_say: object) -> None:
        raise AssertionError("asked for an engine")

    monkeypatch.setattr(cli, "connect", connect)


# -- what the user gave is wrong: exit code 2, one message ---------------------------------


def test_the_script_itself_ends_with_2_and_one_message() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "build.py", "explain", "cu121-pt3"], text=True, capture_output=True
    )
    assert done.returncode == 2
    assert Done(2, done.stdout, done.stderr).error.startswith('no image "cu121-pt3"')


@pytest.mark.parametrize("verb", ["list", "explain", "lock", "render", "plan", "build", "test", "doctor"])
@pytest.mark.usefixtures("no_engine")
def test_an_unknown_id_is_answered_with_the_nearest_and_all_ids(verb: str, run: Run) -> None:
    done = run(verb, "cu121-pt92")
    assert done.code == 2
    assert done.error.startswith('no image "cu121-pt92"; did you mean "cu121-pt29"?')
    assert all(id_ in done.error for id_ in IDS)


@pytest.mark.parametrize("name", sorted(p.name for p in (ROOT / "tests/unit/wrong").glob("*.yaml"))[::8])
def test_a_wrong_matrix_is_one_message_with_file_and_line(name: str, run: Run) -> None:
    path = ROOT / "tests/unit/wrong" / name
    done = run("--matrix", str(path), "list")
    assert done.code == 2
    assert done.error.startswith(f"{path}:")


def test_a_matrix_that_is_not_there_is_named(run: Run, tmp_path: Path) -> None:
    done = run("--matrix", str(tmp_path / "none.yaml"), "list")
    assert done.code == 2
    assert str(tmp_path / "none.yaml") in done.error


@pytest.mark.parametrize("arguments", [("nope",), ("list", "--nope"), ("build", "--base", "nope")])
def test_a_wrong_verb_or_option_is_2_and_points_to_the_help(arguments: tuple[str, ...], run: Run) -> None:
    done = run(*arguments)
    assert done.code == 2
    assert "--help" in done.err
    assert "Traceback" not in done.err


# -- the other ends ------------------------------------------------------------------------


def test_a_failed_step_is_1_and_its_message_is_printed_as_it_is(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object) -> None:
        raise StepFailed("[python 2/2] RUN uv\n[bold]exit code: 1")

    monkeypatch.setattr("trainyard.resolve.select", broken)
    done = run("list")
    assert done.code == 1
    assert done.error == "[python 2/2] RUN uv\n[bold]exit code: 1"


def test_an_interrupted_command_is_130_and_says_that_nothing_was_tagged(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainyard.resolve.select", interrupted)
    done = run("list")
    assert done.code == 130
    assert "nothing was tagged" in done.err


def test_sigterm_is_as_tidy_as_ctrl_c(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainyard.resolve.select", lambda *_args: signal.raise_signal(signal.SIGTERM))
    assert run("list").code == 130


@pytest.mark.parametrize("verb", [("engine-stop",), ("clean", "--all")])
@pytest.mark.usefixtures("checkout")
def test_what_was_stopped_is_said_once(
    verb: tuple[str, ...], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(say: Callable[[str], None]) -> list[str]:
        say("stopped dockerd (42)")
        return ["stopped dockerd (42)"]

    monkeypatch.setattr("trainyard.daemon.stop", stopped)
    monkeypatch.setattr("trainyard.daemon.purge", stopped)
    done = run(*verb)
    assert (done.out + done.err).count("stopped dockerd (42)") == 1
    assert "no private engine" not in done.out


def test_where_no_engine_runs_engine_stop_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainyard.daemon.stop", lambda _say: [])
    assert run("engine-stop").out == "no private engine is running\n"


# -- help ----------------------------------------------------------------------------------


def test_the_verbs_of_the_design_are_there() -> None:
    assert {"list", "explain", "lock", "render", "plan", "build", "test", "doctor"} <= set(VERBS)


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_verb_ends_with_examples_of_it(verb: str, option: str, run: Run) -> None:
    done = run(verb, option)
    assert done.code == 0
    _, _, examples = done.out.partition("Examples:\n")
    assert examples.strip()
    for line in examples.strip().splitlines():
        assert line.strip().startswith(f"python build.py {verb}")


def test_the_help_lists_every_verb_with_what_it_does(run: Run) -> None:
    done = run("--help")
    assert done.code == 0
    assert "Examples:\n" in done.out
    for verb in VERBS:
        (line,) = [line for line in done.out.splitlines() if line.split()[:1] == [verb]]
        assert len(line.split()) > 2


# -- what is printed -----------------------------------------------------------------------


def test_list_as_json_has_an_entry_for_each_row(run: Run) -> None:
    done = run("list", "--json")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert [one["id"] for one in found] == IDS
    by_id = {one["id"]: one for one in found}
    assert by_id["cu121-pt29"]["driver_floor"] == "525.60.13"
    assert by_id["cpu-pt213"]["cuda"] is None
    assert by_id["cu121-pt29-base"]["deepspeed"] is None


def test_list_prints_a_line_for_each_row_and_no_colour_codes(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = run("list")
    assert done.code == 0
    assert [line.split()[0] for line in done.out.splitlines()[1:]] == IDS
    assert "\x1b" not in done.out


def test_a_selection_is_ids_globs_and_commas_in_the_order_of_the_matrix(run: Run) -> None:
    found = json.loads(run("list", "--json", "cu130-*,cpu-pt213", "cpu-pt213").out)
    assert [one["id"] for one in found] == ["cpu-pt213", *(i for i in IDS if i.startswith("cu130-"))]


def test_explain_tells_which_drivers_run_an_image(run: Run) -> None:
    done = run("explain", "cu121-pt29")
    assert (done.code, done.err) == (0, "")
    assert "525.60.13" in done.out
    assert "12.8" in done.out


def test_explain_as_json_parses(run: Run) -> None:
    found = json.loads(run("explain", "cu121-pt29,cpu-pt213", "--json").out)
    assert len(found) == 2
    assert "525.60.13" in json.dumps(found)


# -- lock and render, on a copy ------------------------------------------------------------


def test_the_shipped_locks_and_dockerfiles_are_current(run: Run) -> None:
    assert run("lock", "--check") == Done(0, "all locks are current\n", "")
    assert run("render", "--check") == Done(0, "all Dockerfiles are current\n", "")


def test_render_check_names_what_differs_and_changes_nothing(run: Run, checkout: Path) -> None:
    path = checkout / "images/cpu-pt213/Dockerfile"
    path.write_text("FROM scratch\n")
    done = run("render", "--check", "cpu-pt213,cpu-pt213-base")
    assert done.code == 1
    assert "images/cpu-pt213/Dockerfile: differs from the matrix and templates\n1 differ" in done.out
    assert path.read_text() == "FROM scratch\n"


def test_render_writes_what_differs_and_then_nothing(run: Run, checkout: Path) -> None:
    path = checkout / "images/cpu-pt213/Dockerfile"
    path.write_text("FROM scratch\n")
    assert run("render", "cpu-pt213*-base,cpu-pt213").out == "images/cpu-pt213/Dockerfile: written\n"
    assert path.read_text() == (ROOT / "images/cpu-pt213/Dockerfile").read_text()
    assert run("render", "cpu-pt213*-base,cpu-pt213") == Done(0, "", "")


def test_lock_check_says_why_a_lock_is_stale_and_changes_nothing(run: Run, checkout: Path) -> None:
    path = checkout / "images/cpu-pt213-base/requirements.lock"
    text = path.read_text().replace("torch==2.13.0", "torch==2.12.0").replace("# inputs ", "# inputs 0")
    path.write_text(text)
    done = run("lock", "--check", "cpu-pt213-base")
    assert done.code == 1
    assert "images/cpu-pt213-base/requirements.lock: stale: the row asks for torch==2.13.0" in done.out
    assert path.read_text() == text


def test_lock_makes_only_what_is_stale(run: Run, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def make(one: Lock, *_args: object, **_options: object) -> None:
        made.append(one.path.relative_to(checkout))

    monkeypatch.setattr(lock, "make", make)
    assert run("lock", "cpu-pt213,cpu-pt213-base").code == 0
    assert made == []
    (checkout / "images/cpu-pt213/build.lock").unlink()
    assert run("lock", "cpu-pt213,cpu-pt213-base").code == 0
    assert made == [Path("images/cpu-pt213/build.lock")]


@pytest.mark.parametrize("verb", ["plan", "build", "test"])
@pytest.mark.parametrize(
    ("file", "remedy"),
    [
        ("requirements.lock", "python build.py lock cpu-pt213"),
        ("Dockerfile", "python build.py render cpu-pt213"),
    ],
)
@pytest.mark.usefixtures("no_engine")
def test_stale_files_are_refused_with_the_remedy_before_an_engine_is_asked_for(
    verb: str, file: str, remedy: str, run: Run, checkout: Path
) -> None:
    (checkout / "images/cpu-pt213" / file).unlink()
    done = run(verb, "cpu-pt213")
    assert done.code == 2
    assert f"images/cpu-pt213/{file}: " in done.error
    assert done.error.endswith(f"Run: {remedy}")


def test_rows_and_images_are_the_same_set() -> None:
    assert {path.name for path in (ROOT / "images").iterdir() if path.is_dir()} == {row.id for row in ROWS}


def test_an_empty_selection_from_make_still_means_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make render` passes an empty word: the README and strangers are part of everything."""
    asked: list[bool] = []

    def readme(_rows: object, check: bool) -> list[Path]:
        asked.append(check)
        return []

    monkeypatch.setattr(cli, "_readme", readme)
    CliRunner().invoke(cli.main, ["render", "--check", ""])
    assert asked == [True]


def test_a_file_that_cannot_be_written_is_one_message(run: Run) -> None:
    done = run("keygen", "/proc/no-such-folder")
    assert done.code == 2
    assert "/proc/no-such-folder cannot be used" in done.error


def test_half_a_key_pair_is_not_made(run: Run, tmp_path: Path) -> None:
    (tmp_path / "cosign.pub").write_text("somebody's")
    done = run("keygen", str(tmp_path))
    assert (done.code, [path.name for path in tmp_path.iterdir()]) == (2, ["cosign.pub"])


def test_whoever_reads_may_leave() -> None:
    pipe = f"{sys.executable} build.py list all --json | head -n 1"
    done = subprocess.run(["sh", "-c", pipe], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[\n", "")


def test_diff_compares_the_very_files_it_is_given(run: Run, tmp_path: Path) -> None:
    shipped = json.loads((ROOT / "tests/unit/data/manifest-cpu-pt213.json").read_text())
    (tmp_path / "after.json").write_text(json.dumps(shipped))
    shipped["measured"]["python"] = "3.10.1"
    (tmp_path / "before.json").write_text(json.dumps(shipped))
    (tmp_path / "manifest.json").write_text(json.dumps(shipped))
    done = run("diff", str(tmp_path / "before.json"), str(tmp_path / "after.json"))
    assert "3.10.1" in done.out
    (tmp_path / "other.json").write_text("{}")
    assert "no manifest of an image" in run("diff", str(tmp_path / "other.json"), "cpu-pt213").error


def test_what_bootstrap_says_is_not_taken_for_output() -> None:
    """`make jobs >> $GITHUB_OUTPUT` is the first command on a fresh runner."""
    script = (ROOT / "scripts/bootstrap").read_text()
    printing = [line for line in script.splitlines() if line.strip().startswith("printf")]
    assert printing
    assert all(line.endswith(">&2") for line in printing)


def test_a_checkout_made_under_a_strict_umask_gives_images_for_everybody(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "rootfs", tmp_path / "rootfs")
    for path in (tmp_path / "rootfs").rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
    said: list[str] = []
    row = next(row for row in ROWS if row.id == "cpu-pt213")
    render.open_modes(row, tmp_path, said.append)
    for part in render.rootfs_parts(row):
        for path in (tmp_path / "rootfs" / part).rglob("*"):
            same = (ROOT / path.relative_to(tmp_path)).stat().st_mode & 0o111
            assert path.stat().st_mode & 0o044 == 0o044, path
            assert path.stat().st_mode & 0o111 == same, path
    assert len(said) == 1
    render.open_modes(row, tmp_path, said.append)
    assert len(said) == 1  # nothing is left to do
