"""The command line; with :mod:`trainyard.cli_publish`, the only module that prints.

Exit codes: 0 done, 1 a build, test or gate failed, 2 the input is wrong, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainyard import (
    bases,
    builder,
    bump,
    daemon,
    doctor,
    explain,
    lock,
    manifest,
    matrix,
    readme,
    render,
    resolve,
    suites,
)
from trainyard.engine import LOST, Engine, connect
from trainyard.facts import load_facts
from trainyard.hostenv import host_arch
from trainyard.model import InputError, Row, StepFailed
from trainyard.plan import Item, check_generated
from trainyard.plan import plan as make_plan

ROOT = Path(__file__).resolve().parents[1]
#: What ends one row, and none of the others where they are to go on.
ROW_FAILED = (StepFailed, InputError, *LOST)

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


@dataclass
class App:
    """What every verb starts from."""

    path: Path

    @cached_property
    def matrix(self) -> matrix.Matrix:
        return matrix.load(self.path)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        return resolve.rows(self.matrix)

    named: frozenset[str] = frozenset()  # ids that the user wrote out

    def select(self, words: Sequence[str], default: str | None = None) -> tuple[Row, ...]:
        self.named = frozenset(part.strip() for word in words for part in word.split(","))
        chosen = ",".join(word for word in words if word)
        return resolve.select(self.rows, chosen, default or self.matrix.default)


def say(text: str) -> None:
    """Progress for people: to stderr, so that stdout stays what was asked for."""
    err.print(f"[dim]{escape(text)}[/dim]")


def examples(*lines: str) -> str:
    """The end of a verb's help."""
    return "\b\nExamples:\n" + "\n".join(f"  python build.py {line}" for line in lines)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=examples("list", "explain cu121-pt29", "build cpu-pt213", "test 'cu*'", "doctor"),
)
@click.option(
    "--matrix",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    default=ROOT / "matrix.yaml",
    help="The matrix to use instead of matrix.yaml.",
)
@click.pass_context
def main(context: click.Context, path: Path) -> None:
    """Build LLM-training images that have trained with ZeRO-3 before anybody pulls them."""
    context.obj = App(path)


def selection(function: Callable[..., None]) -> Callable[..., None]:
    return click.argument("selection", nargs=-1)(function)


as_json = click.option("--json", "json_", is_flag=True, help="Print JSON.")


@main.command("list", epilog=examples("list", "list 'cu*'", "list --json", "list all --format github"))
@selection
@as_json
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "json", "github"]),
    default="table",
    help="github: one line `matrix={...}`, for a workflow's job matrix.",
)
@click.pass_obj
def list_(app: App, selection: tuple[str, ...], json_: bool, format_: str) -> None:
    """List the images: what is inside, which drivers run it, built or not.

    SELECTION: ids, globs and commas; everything where it is empty.
    """
    rows = app.select(selection, default="all")
    if format_ == "github":
        jobs = [{"id": row.id, "gpu": not row.is_cpu, "arch": row.arch} for row in rows]
        click.echo(f"matrix={json.dumps({'include': jobs})}")
        return
    found = [_listed(row) for row in rows]
    if json_ or format_ == "json":
        click.echo(json.dumps(found, indent=2))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("ID", "TORCH", "CUDA", "CUDNN", "NCCL", "DEEPSPEED", "OPS", "DRIVER", "NVIDIA-SMI", "BUILT"):
        table.add_column(name, no_wrap=True)
    for one in found:
        cells = [one["id"], one["torch"], one["cuda"], one["cudnn"], one["nccl"], one["deepspeed"]]
        cells += [str(one["ops"] or ""), _at_least(one["driver_floor"]), _at_least(one["cuda_level"])]
        table.add_row(*(cell or "-" for cell in cells), one["built"] or "no")
    # A table that is cut off or wrapped cannot be read by grep either, so it may be wide.
    Console(width=200, highlight=False).print(table, crop=False)


def _at_least(version: str | None) -> str:
    return f">= {version}" if version else ""


def _listed(row: Row) -> dict[str, Any]:
    built = manifest.read(ROOT / "out" / row.id)
    return {
        "id": row.id,
        "torch": row.torch.version,
        "build": row.torch.build,
        "cuda": row.torch.cuda,
        "cudnn": row.cudnn,
        "nccl": row.nccl,
        "python": row.python,
        "base": row.base.name,
        "platform": row.platform,
        "deepspeed": row.deepspeed,
        "ops": len(row.ops),
        "cuda_level": row.cuda_level,
        "driver_floor": row.driver_floor,
        "features": sorted(row.features),
        "built": f"{size(built['size_bytes'])}, {built['built_at'][:10]}" if built else None,
    }


@main.command("explain", epilog=examples("explain cu121-pt29", "explain cpu-pt213 --json"))
@selection
@as_json
@click.pass_obj
def explain_(app: App, selection: tuple[str, ...], json_: bool) -> None:
    """Say what will be inside and why, without building.

    SELECTION: ids, globs and commas, or `all`; the matrix's default where it is empty.
    """
    rows = app.select(selection)
    if json_:
        click.echo(json.dumps([explain.as_json(row) for row in rows], indent=2))
        return
    click.echo("\n\n".join(explain.explain(row).rstrip() for row in rows))


@main.command("lock", epilog=examples("lock", "lock --check", "lock cu121-pt29 --upgrade"))
@selection
@click.option("--check", is_flag=True, help="Only say which locks are stale and why; exit code 1 if any is.")
@click.option("--upgrade", is_flag=True, help="Take the newest versions that the rows allow.")
@click.option(
    "--wheelhouse",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    multiple=True,
    help="A folder with wheels that PyPI does not carry; PIP_FIND_LINKS counts too.",
)
@click.pass_obj
def lock_(
    app: App, selection: tuple[str, ...], check: bool, upgrade: bool, wheelhouse: tuple[Path, ...]
) -> None:
    """Lock every Python package with its hashes, for all rows or a SELECTION."""
    rows = app.select(selection, default="all")
    stale = 0
    for one in [
        lock.uv_lock(ROOT / "images"),
        *(part for row in rows for part in lock.locks(row, ROOT / "images")),
    ]:
        why = one.why_stale()
        name = one.path.relative_to(ROOT)
        if check and why:
            stale += 1
            out.print(f"{name}: stale: {escape(why)}")
        elif not check and (why or upgrade):
            say(f"{name}: locking ({why or 'newest versions'})")
            lock.make(one, wheelhouse, upgrade=upgrade)
    if check:
        out.print(f"{stale} stale" if stale else "all locks are current")
        sys.exit(1 if stale else 0)


@main.command("bump", epilog=examples("bump", "bump cu121-pt29", "bump all --write"))
@selection
@click.option("--write", is_flag=True, help="Write the newer packages into the locks.")
@as_json
@click.pass_obj
def bump_(app: App, selection: tuple[str, ...], write: bool, json_: bool) -> None:
    """Say what could be newer: releases that the rows do not use, and packages in their locks.

    SELECTION: ids, globs and commas; everything where it is empty.  Releases are never written:
    whoever takes one adds what was checked to compat/ and edits matrix.yaml.
    """
    report = []
    for row in app.select(selection, default="all"):
        say(f"{row.id}: asking the index")
        newer = bump.releases(row, load_facts())
        moved = bump.upgrade(lock.locks(row, ROOT / "images"), (), write)
        report.append((row, newer, {path: changes for path, changes in moved.items() if changes}))
    if json_:
        click.echo(json.dumps([_bumped(*one) for one in report], indent=2))
        return
    for row, newer, moved in report:
        out.print(f"[bold]{row.id}[/]: {'up to date' if not (newer or moved) else ''}")
        for one in newer:
            known = {True: ", in compat/", False: ", not in compat/ yet", None: ""}[one.listed]
            out.print(f"  {one.field}: {one.has}, newest {one.newest}{known}")
        for path, changes in moved.items():
            out.print(f"  {path.relative_to(ROOT)}: {'written' if write else 'would change'}")
            for change in changes:
                out.print(f"    {escape(str(change))}")


def _bumped(row: Row, newer: Sequence[bump.Release], moved: dict[Path, list[bump.Change]]) -> dict[str, Any]:
    return {
        "id": row.id,
        "releases": [asdict(one) for one in newer],
        "locks": {str(p.relative_to(ROOT)): [asdict(c) for c in changes] for p, changes in moved.items()},
    }


@main.command("render", epilog=examples("render", "render --check", "render cpu-pt213"))
@selection
@click.option("--check", is_flag=True, help="Only say which Dockerfiles differ; exit code 1 if any does.")
@click.pass_obj
def render_(app: App, selection: tuple[str, ...], check: bool) -> None:
    """Render images/<id>/Dockerfile for all rows or a SELECTION."""
    rows = app.select(selection, default="all")
    drift = [path for row in rows if (path := _render_one(row, check))]
    if not any(selection) and app.path.resolve() == ROOT / "matrix.yaml":
        drift += _strangers({row.id for row in rows}, check) + _readme(rows, check)
    for path in drift:
        out.print(
            f"{path.relative_to(ROOT)}: {'differs from the matrix and templates' if check else 'written'}"
        )
    if check:
        out.print(f"{len(drift)} differ" if drift else "all Dockerfiles are current")
        sys.exit(1 if drift else 0)


def _render_one(row: Row, check: bool) -> Path | None:
    path = ROOT / "images" / row.id / "Dockerfile"
    text = render.render(row, ROOT)
    if path.exists() and path.read_text() == text:
        return None
    if not check:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


def _readme(rows: Sequence[Row], check: bool) -> list[Path]:
    path = ROOT / "README.md"
    text = path.read_text()
    fresh = readme.update(text, rows)
    if fresh != text and not check:
        path.write_text(fresh)
    return [path] if fresh != text else []


def _strangers(ids: set[str], check: bool) -> list[Path]:
    """Folders of rows that the matrix no longer has."""
    found = [path for path in (ROOT / "images").iterdir() if path.is_dir() and path.name not in ids]
    if not check:
        for path in found:
            shutil.rmtree(path)
    return found


base_option = click.option(
    "--base",
    "base_mode",
    type=click.Choice(["auto", "registry", "bootstrap"]),
    default="auto",
    envvar="BASE",
    show_default=True,
    help="Where the base image comes from; auto bootstraps where no registry answers.",
)


def prepare(
    app: App, rows: Sequence[Row], base_mode: bases.Mode, force: bool = False
) -> tuple[Engine, tuple[Item, ...]]:
    """What `plan`, `build` and `test` share: checks, an engine, bases, the plan."""
    check_generated(rows, ROOT)
    for row in rows:
        render.open_modes(row, ROOT, say)
    engine = connect(say)
    rows = _runnable(app, rows, engine)
    found = {
        base.key: bases.resolve_base(base, base_mode, engine, say)
        for base in {row.base.key: row.base for row in rows}.values()
    }
    return engine, make_plan(rows, ROOT, engine, found, force=force)


def _runnable(app: App, rows: Sequence[Row], engine: Engine) -> tuple[Row, ...]:
    """The rows whose platform the engine can run; others that only a glob named are left out, aloud.

    Raises InputError where a row that was named, or every row, is for another platform.
    """
    if all(row.arch == host_arch() for row in rows) and engine.address.private:
        return tuple(rows)  # the usual case: nothing to ask
    there = engine.platforms()
    foreign = [row for row in rows if row.platform not in there]
    if not foreign:
        return tuple(rows)
    ids = ", ".join(row.id for row in foreign)
    remedy = (
        f"the engine runs {', '.join(there)}. Build on such a machine, or let this one emulate it: "
        "apt-get install qemu-user-static binfmt-support"
    )
    if len(foreign) == len(rows) or any(row.id in app.named for row in foreign):
        raise InputError(f"{ids}: for {foreign[0].platform}; {remedy}")
    say(f"left out: {ids}, for {foreign[0].platform}; {remedy}")
    return tuple(row for row in rows if row.platform in there)


@main.command("plan", epilog=examples("plan all"))
@selection
@base_option
@as_json
@click.pass_obj
def plan_(app: App, selection: tuple[str, ...], base_mode: bases.Mode, json_: bool) -> None:
    """Say what `build` would build, and why.

    SELECTION: ids, globs and commas, or `all`; the matrix's default where it is empty.
    """
    _, items = prepare(app, app.select(selection), base_mode)
    if json_:
        click.echo(json.dumps([{"id": i.row.id, "contents_id": i.contents_id, "why": i.why} for i in items]))
        return
    for item in items:
        out.print(f"{item.row.id}: {'build: ' + item.why if item.why else 'up to date'}")


@main.command("build", epilog=examples("build", "build cu121-pt29", "build 'cu*'", "build all --keep-going"))
@selection
@base_option
@click.option("--force", is_flag=True, help="Build even what is up to date.")
@click.option("--keep-going", is_flag=True, help="Go on with the other rows when one fails.")
@click.pass_obj
def build_(
    app: App, selection: tuple[str, ...], base_mode: bases.Mode, force: bool, keep_going: bool
) -> None:
    """Build, measure and gate images; tag those that are what their row says.

    SELECTION: ids, globs and commas, or `all`; the matrix's default where it is empty.
    """
    engine, items = prepare(app, app.select(selection), base_mode, force)
    failed = []
    for item in items:
        try:
            build_one(engine, item)
        except ROW_FAILED as error:
            failed.append(item.row.id)
            if not keep_going:
                raise
            complain(error)
    if failed:
        raise StepFailed(f"failed: {', '.join(failed)}; built or current: {len(items) - len(failed)}")


def build_one(engine: Engine, item: Item) -> None:
    """Build one row where its plan says so, and show what it is."""
    with engine.exclusive(item.row.id, say):
        if item.why is None:
            found = manifest.read(ROOT / "out" / item.row.id)
            say(f"{item.row.id}: up to date")
        else:
            say(f"{item.row.id}: building: {item.why}")
            engine.make_room(builder.need_bytes(item.row), say)
            with progress(item.row.id) as on_step:
                found = builder.build(item, ROOT, engine, on_step)
    if found:
        _show(found)


def _show(found: dict[str, Any]) -> None:
    """What was built, as measured, and where to go next."""
    inside = found["measured"]
    torch, ops = inside["torch"], inside["deepspeed"] or {"version": "none", "ops": {}}
    reference = f"trainyard:{found['id']}"
    lines = [
        ("image", f"{reference}  {found['image_id'].removeprefix('sha256:')[:12]}"),
        ("size", f"{size(found['size_bytes'])} in {len(found['layers'])} layers"),
        ("base", f"{inside['os']} from {found['base']['origin']} ({found['base']['name']})"),
        ("python", inside["python"]),
        (
            "torch",
            f"{torch['version']}" + (f", built for CUDA {torch['cuda']}" if torch["cuda"] else ", CPU"),
        ),
    ]
    for name in ("cudnn", "nccl"):
        if inside[name]:
            lines.append((name, inside[name]["version"]))
    lines.append(("deepspeed", ops["version"]))
    if ops["ops"]:
        lines.append(("kernels", ", ".join(ops["ops"])))
        archs = sorted({arch for op in ops["ops"].values() for arch in op["elf"]})
        if archs:
            lines.append(("gpu code", ", ".join(archs)))
    lines += [
        ("manifest", f"out/{found['id']}/manifest.json"),
        ("next", f"docker run --rm -it {reference}   |   make test MATRIX={found['id']}"),
    ]
    for name, text in lines:
        out.print(f"{name:>10}  {escape(text)}")


@main.command(
    "test", epilog=examples("test cpu-pt213", "test cpu-pt213,cu121-pt29", "test cu121-pt29 -- -k zero3")
)
@click.argument("selection", required=False, default="")
@click.argument("pytest_args", nargs=-1, type=click.UNPROCESSED)
@base_option
@click.option("--keep-going", is_flag=True, help="Go on with the other rows when one fails.")
@click.pass_obj
def test_(
    app: App, selection: str, pytest_args: tuple[str, ...], base_mode: bases.Mode, keep_going: bool
) -> None:
    """Build what is missing, then run the image tests: the contract, and ZeRO-3 on two ranks.

    SELECTION: ids, globs and commas, or `all`; the matrix's default where it is empty.
    What follows goes to pytest.  REQUIRE_GPU=n fails where fewer GPUs are there.
    """
    engine, items = prepare(app, app.select((selection,) if selection else ()), base_mode)
    failed = []
    for item in items:
        try:
            build_one(engine, item)
            run_suite(engine, item, pytest_args)
        except ROW_FAILED as error:
            failed.append(item.row.id)
            if not keep_going:
                raise
            complain(error)
    if failed:
        raise StepFailed(f"failed: {', '.join(failed)}")


def run_suite(engine: Engine, item: Item, pytest_args: Sequence[str] = ()) -> None:
    """Run the image tests of one built row."""
    with engine.exclusive(item.row.id, say):
        with progress(f"{item.row.id} twin") as on_step:
            twin = suites.twin(item, ROOT, engine, on_step)
        with progress(f"{item.row.id} browser") as on_step:
            suites.chromium(item, ROOT, engine, on_step)
        suites.run(item, ROOT, engine, twin, pytest_args, say)


@main.command("doctor", epilog=examples("doctor", "doctor 'cu*'", "doctor --json"))
@selection
@as_json
@click.pass_obj
def doctor_(app: App, selection: tuple[str, ...], json_: bool) -> None:
    """Look at this host: engine, disk, base registry, proxy CA, wheelhouse, GPUs; with remedies."""
    rows = app.select(selection)
    checks = doctor.checks(
        need_bytes=sum(builder.need_bytes(row) for row in rows),
        bases={row.base for row in rows},
    )
    if json_:
        click.echo(json.dumps([doctor.as_json(check) for check in checks], indent=2))
    else:
        colours = {"ok": "green", "warn": "yellow", "fail": "red"}
        for check in checks:
            mark = f"[{colours[check.status]}]{check.status:>4}[/]"
            out.print(f"{mark}  {check.name}: {escape(check.detail)}")
            if check.remedy:
                out.print(f"      -> {escape(check.remedy)}")
    sys.exit(1 if any(check.status == "fail" for check in checks) else 0)


@main.command("engine-stop", epilog=examples("engine-stop"))
def engine_stop() -> None:
    """Stop the private engine.  Images and caches stay."""
    if not daemon.stop(say):
        out.print("no private engine is running")


@main.command("clean", epilog=examples("clean", "clean --all"))
@click.option("--all", "everything", is_flag=True, help="Also empty the private engine: images and caches.")
def clean(everything: bool) -> None:
    """Remove out/; with --all, also every image and cache of the private engine."""
    shutil.rmtree(ROOT / "out", ignore_errors=True)
    out.print("removed out/")
    if everything:
        daemon.purge(say)


def size(count: int) -> str:
    """Bytes for people, in decimal units as registries show them."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


@contextmanager
def progress(label: str) -> Iterator[Callable[[str], None]]:
    """Yield what a build tells its steps to: a spinner on a terminal, lines elsewhere."""
    if not err.is_terminal:
        yield lambda step: say(f"{label}: {short(step)}")
        return
    began = time.monotonic()
    with err.status(f"{label}: starting") as status:

        def on_step(step: str) -> None:
            minutes, seconds = divmod(int(time.monotonic() - began), 60)
            status.update(f"{label}: {minutes}:{seconds:02} {escape(short(step))}")

        yield on_step


def short(step: str) -> str:
    """A build step without what is the same in every one: mounts, shell options, secrets."""
    step = re.sub(
        r"--mount=\S+ |set -eux?; |if \[ -s /run/secrets/\S+ \].*?fi; |DEBIAN_FRONTEND=\S+ ", "", step
    )
    return step if len(step) <= 100 else step[:97] + "..."


def complain(error: Exception) -> None:
    err.print(f"[bold red]error:[/] {escape(str(error))}")


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def run() -> None:
    """Run the command with the exit codes that this module's docstring promises."""
    signal.signal(signal.SIGTERM, _interrupt)  # as tidy as Ctrl-C
    try:
        main(standalone_mode=False)
    except InputError as error:
        complain(error)
        sys.exit(2)
    except StepFailed as error:
        complain(error)
        sys.exit(1)
    except LOST as error:
        complain(StepFailed(f"the engine does not answer: {error}\nThe same command goes on from here."))
        sys.exit(1)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BrokenPipeError:  # `build.py list | head`: whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        complain(StepFailed(f"{error.filename}: {error.strerror}" if error.filename else str(error)))
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        err.print("[yellow]interrupted[/]: nothing was tagged; the same command goes on from here")
        sys.exit(130)


# Last, since its verbs are added to `main` above.
from trainyard import cli_publish as cli_publish  # noqa: E402
