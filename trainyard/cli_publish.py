"""The verbs that leave this machine: push, promote, rollback, prune, verify, diff, catalog, nightly."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.markup import escape

from trainyard import (
    archive,
    attest,
    catalog,
    diff,
    keyless,
    keys,
    manifest,
    mirrors,
    nightly,
    provenance,
    publish,
    sbom,
    signing,
    verify,
)
from trainyard import bake as bake_file
from trainyard import registry as registries
from trainyard.cli import (
    ROOT,
    App,
    as_json,
    base_option,
    build_one,
    complain,
    examples,
    main,
    out,
    prepare,
    run_suite,
    say,
    selection,
    size,
)
from trainyard.engine import Engine, connect
from trainyard.hostenv import find_ca
from trainyard.model import InputError, Row, StepFailed

registry_option = click.option(
    "--registry", "-r", envvar="REGISTRY", required=True, metavar="HOST/ORG/NAME", help="Where images live."
)
plain_option = click.option("--plain-http", is_flag=True, help="No TLS; only to this machine itself.")
key_option = click.option(
    "--key", envvar="COSIGN_KEY", help="Private key to sign with: a file or env://NAME; COSIGN_PASSWORD."
)
keyless_option = click.option(
    "--keyless",
    "without_key",
    is_flag=True,
    envvar="COSIGN_KEYLESS",
    help="Sign as this CI job, with cosign.",
)
compression_option = click.option(
    "--compression", type=click.Choice(["zstd", "gzip"]), default="zstd", show_default=True, help="Of layers."
)


def registry_options(function: Callable[..., None]) -> Callable[..., None]:
    """Where to publish, for a verb that needs it."""
    return registry_option(plain_option(function))


def signing_options(function: Callable[..., None]) -> Callable[..., None]:
    """How to sign; without either, nothing is signed."""
    return key_option(keyless_option(function))


def _signer(
    where: registries.Registry, plain_http: bool, key: str | None, without_key: bool
) -> signing.Signer | None:
    """Who signs.  What is wrong is said here, before anything is built or uploaded."""
    if key and without_key:
        raise InputError("--key (COSIGN_KEY) and --keyless (COSIGN_KEYLESS) are two ways to sign; give one")
    if without_key:
        return keyless.signer(where, plain_http)
    return signing.KeySigner(keys.private_key(key, os.environ)) if key else None


def _push(
    row: Row,
    engine: Engine,
    where: registries.Registry,
    compression: archive.Compression,
    signer: signing.Signer | None,
) -> publish.Pushed:
    """Upload, attach SBOM, provenance, manifest and test report, and sign; no tag yet."""
    tested = publish.check(row, ROOT / "out" / row.id, engine)
    pushed = publish.push(where, engine, tested, compression, say=say)
    run = provenance.find_run(os.environ, tested.manifest)
    source = provenance.find_source(ROOT)
    files = attest.documents(row, tested.manifest, ROOT, (where.name, pushed.digest), source, run)
    attest.attach(where, pushed.digest, files, signer)
    archive.write(tested.folder / catalog.SBOM, files[sbom.MEDIA_TYPE])
    return pushed


def _promote(
    app: App, row: Row, pushed: publish.Pushed, where: registries.Registry, since: dict[str, str | None]
) -> publish.Promoted:
    """Set the tags of what was just pushed."""
    default = row.id == app.matrix.default
    platforms, image_id = (row.platform,), pushed.image_id
    return publish.promote(
        where, row.id, pushed.digest, default, since, platforms=platforms, image_id=image_id, say=say
    )


def _show_pushed(row: Row, pushed: publish.Pushed, signed: bool) -> None:
    there = f" ({pushed.blobs_there} of {pushed.blobs} blobs were there)" if pushed.blobs_there else ""
    sign = "signed" if signed else "not signed"
    out.print(f"{row.id}: {pushed.reference}")
    out.print(f"  {size(pushed.size)}, sent {size(pushed.sent)}{there}; {sign}")


def _show_promoted(done: publish.Promoted) -> None:
    for moved in done.tags:
        before = f" (was {moved.before[:19]})" if moved.before and moved.changed else ""
        out.print(f"  {moved.tag} -> {done.digest[:19]}{before}{'' if moved.changed else ' (already)'}")


@main.command(
    "push",
    epilog=examples("push cpu-pt213 -r ghcr.io/acme/trainyard", "push all -r r.example/t --key cosign.key"),
)
@selection
@registry_options
@compression_option
@signing_options
@click.option("--promote", "then_promote", is_flag=True, help="Also set the tags.")
@click.pass_obj
def push_(
    app: App,
    selection: tuple[str, ...],
    registry: str,
    plain_http: bool,
    compression: archive.Compression,
    key: str | None,
    without_key: bool,
    then_promote: bool,
) -> None:
    """Upload tested images by digest, with SBOM, provenance and signature; no tag moves.

    SELECTION: ids, globs and commas, or `all`; the matrix's default where it is empty.  What failed
    its gate or its tests, or was not tested as it is, is refused.
    """
    where = registries.connect(registry, plain_http, say=say)
    signer = _signer(where, plain_http, key, without_key)
    engine = connect(say)
    for row in app.select(selection):
        since = publish.look(where, row.id, row.id == app.matrix.default)
        pushed = _push(row, engine, where, compression, signer)
        _show_pushed(row, pushed, signer is not None)
        if then_promote:
            _show_promoted(_promote(app, row, pushed, where, since))


@main.command("promote", epilog=examples("promote cpu-pt213 -r ghcr.io/acme/trainyard"))
@selection
@registry_options
@click.option("--digest", help="The pushed manifest; by default the one that `push` noted in out/<id>.")
@click.pass_obj
def promote_(
    app: App, selection: tuple[str, ...], registry: str, plain_http: bool, digest: str | None
) -> None:
    """Set tags on what was pushed: an immutable one, then the floating ones; nothing is uploaded.

    SELECTION: ids, globs and commas; the matrix's default where it is empty.
    """
    where = registries.connect(registry, plain_http, say=say)
    rows = app.select(selection)
    if digest and len(rows) != 1:
        raise InputError(f"--digest names one image, but {len(rows)} are selected")
    for row in rows:
        found = manifest.read(ROOT / "out" / row.id) or {}
        image_id = None if digest else str(found.get("image_id"))
        pushed = digest or publish.last_pushed(where, ROOT / "out" / row.id, str(image_id))
        default = row.id == app.matrix.default
        out.print(f"{row.id}: {where.name}")
        platforms = (row.platform,)
        promoted = publish.promote(
            where, row.id, pushed, default, platforms=platforms, image_id=image_id, say=say
        )
        _show_promoted(promoted)


@main.command("rollback", epilog=examples("rollback cpu-pt213 -r ghcr.io/acme/trainyard"))
@click.argument("image_id", metavar="ID")
@registry_options
@click.option("--to", help="An immutable tag or digest; by default the build before this one.")
@click.pass_obj
def rollback_(app: App, image_id: str, registry: str, plain_http: bool, to: str | None) -> None:
    """Point the floating tag of ID at an earlier build."""
    (row,) = app.select((image_id,))
    where = registries.connect(registry, plain_http, say=say)
    done = publish.rollback(where, row.id, to, say)
    out.print(f"{row.id}: {done.immutable}")
    _show_promoted(done)


@main.command("prune", epilog=examples("prune all -r ghcr.io/acme/trainyard --keep 7", "prune all --yes"))
@selection
@registry_options
@click.option("--keep", type=int, default=7, show_default=True, help="Newest builds of each row that stay.")
@click.option("--hold", multiple=True, metavar="GLOB", help="Tags that stay whatever their age.")
@click.option("--yes", is_flag=True, help="Delete; without it, only say what would go.")
@click.pass_obj
def prune_(
    app: App,
    selection: tuple[str, ...],
    registry: str,
    plain_http: bool,
    keep: int,
    hold: tuple[str, ...],
    yes: bool,
) -> None:
    """Delete old builds from the registry; never what a floating tag points to."""
    where = registries.connect(registry, plain_http, say=say)
    ids = [row.id for row in app.select(selection, default="all")]
    done = publish.prune(where, ids, keep, hold, dry_run=not yes, say=say)
    for one in done.removed:
        out.print(f"{'deleted' if yes else 'would delete'} {', '.join(one.tags)} ({one.created:%Y-%m-%d})")
    for tag, reason in done.kept:
        out.print(f"kept {tag}: {reason}")
    if done.removed and not yes:
        out.print("This was a dry run; --yes deletes.")


@main.command(
    "verify",
    epilog=examples(
        "verify ghcr.io/acme/trainyard:cpu-pt213 --key cosign.pub",
        "verify r.example/t:cpu-pt213 --identity ci@acme.example --issuer https://accounts.acme.example",
    ),
)
@click.argument("reference", metavar="REF")
@click.option(
    "--key", envvar="COSIGN_PUBLIC_KEY", help="Signed by key: the public one, a file or env://NAME."
)
@click.option("--identity", metavar="WHO", help="Signed keyless: who signed; a workflow's URL, an address.")
@click.option("--identity-regexp", metavar="REGEXP", help="Instead of WHO; Go's syntax, so use ^ and $.")
@click.option("--issuer", metavar="URL", help="Who vouched for WHO.")
@plain_option
@as_json
def verify_(
    reference: str,
    key: str | None,
    identity: str | None,
    identity_regexp: str | None,
    issuer: str | None,
    plain_http: bool,
    json_: bool,
) -> None:
    """Check signature, digest, SBOM, provenance, manifest and test report of a published image.

    Whose signature counts: --key, or --identity and --issuer.
    """
    where = registries.connect(reference, plain_http, say=say)
    trust: signing.Trust
    if key and (identity or identity_regexp or issuer):
        raise InputError("--key (COSIGN_PUBLIC_KEY) and --identity are two ways to verify; give one")
    if not (key or identity or identity_regexp or issuer):
        raise InputError("whose signature counts? Give --key, or --identity and --issuer")
    if key:
        trust = signing.KeyTrust(keys.public_key(key, os.environ))
    else:
        trust = keyless.trust(where, issuer or "", identity or "", identity_regexp or "", plain_http)
    parsed = registries.parse(reference)
    checks = verify.verify(where, parsed.version, trust)
    if json_:
        click.echo(json.dumps(verify.as_json(checks), indent=2))
    else:
        for check in checks:
            mark = "[green]  ok[/]" if check.ok else "[red]FAIL[/]"
            out.print(f"{mark}  {check.name}: {escape(check.detail)}")
    sys.exit(0 if verify.ok(checks) else 1)


@main.command("keygen", epilog=examples("keygen"))
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=".")
def keygen_(folder: Path) -> None:
    """Make a key pair to sign with: cosign.key, encrypted with COSIGN_PASSWORD, and cosign.pub."""
    private, public = keys.generate(os.environ.get(keys.PASSWORD_VARIABLE, ""))
    pair = ((folder / "cosign.key", private, 0o600), (folder / "cosign.pub", public, 0o644))
    for path, _, _ in pair:
        if path.exists():
            raise InputError(f"{path} exists; keys are never overwritten")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be used: {error.strerror}") from error
    for path, body, mode in pair:
        path.touch(mode=mode)
        path.write_bytes(body)
        out.print(str(path))


@main.command("sbom", epilog=examples("sbom cpu-pt213 > sbom.json"))
@click.argument("image_id", metavar="ID")
@click.pass_obj
def sbom_(app: App, image_id: str) -> None:
    """Print the CycloneDX SBOM of a built image, as measured inside it."""
    (row,) = app.select((image_id,))
    found = manifest.read(ROOT / "out" / row.id)
    if found is None:
        raise StepFailed(f"{row.id} is not built\nRun: make build MATRIX={row.id}")
    click.echo(sbom.document(found, (ROOT / "images" / row.id / "requirements.lock").read_text()))


@main.command(
    "diff",
    epilog=examples(
        "diff cpu-pt213 history/cpu-pt213/20261129-0123456789abcdef", "diff r.example/t:a r.example/t:b"
    ),
)
@click.argument("before")
@click.argument("after")
@plain_option
@click.option("--markdown", is_flag=True, help="Print Markdown, as in a changelog.")
@as_json
@click.pass_obj
def diff_(app: App, before: str, after: str, plain_http: bool, markdown: bool, json_: bool) -> None:
    """Say what differs between two images: an ID that is built, a manifest.json, or a REF."""
    found = diff.diff(_measured(app, before, plain_http), _measured(app, after, plain_http))
    if json_:
        click.echo(json.dumps(diff.as_json(found), indent=2))
    else:
        click.echo(diff.markdown(found) if markdown else diff.text(found))


def _measured(app: App, name: str, plain_http: bool) -> dict[str, Any]:
    """The manifest of a built id, in a file, or attached to a published image."""
    if name in {row.id for row in app.rows}:
        found = manifest.read(ROOT / "out" / name)
        if found is None:
            raise StepFailed(f"{name} is not built\nRun: make build MATRIX={name}")
        return found
    path = Path(name)
    if path.exists():
        found = manifest.read(path)
        if found is None or "measured" not in found:
            raise InputError(f"{name}: no manifest of an image that can be read")
        return found
    return attest.fetch_manifest(
        registries.connect(name, plain_http, say=say), registries.parse(name).version
    )


@main.command("catalog", epilog=examples("catalog", "catalog --history history -r ghcr.io/acme/trainyard"))
@click.option("--to", type=click.Path(path_type=Path), default=ROOT / "out" / "catalog", help="Where to.")
@click.option("--history", type=click.Path(path_type=Path, file_okay=False), help="Nights kept by `nightly`.")
@click.option("--registry", "-r", envvar="REGISTRY", metavar="HOST/ORG/NAME", help="For the pull commands.")
@click.option("--source-url", help="Where images/ can be browsed; without it the files are copied.")
@click.option("--fetch", is_flag=True, help="First fetch published builds from the registry into --history.")
@plain_option
@click.pass_obj
def catalog_(
    app: App,
    to: Path,
    history: Path | None,
    registry: str | None,
    source_url: str | None,
    fetch: bool,
    plain_http: bool,
) -> None:
    """Write the catalog, a static site: all images, what is inside, how they did in their tests."""
    if fetch:
        if not (registry and history):
            raise InputError("--fetch needs --registry to fetch from and --history to fetch into")
        nightly.collect(registries.connect(registry, plain_http, say=say), app.rows, history)
    out.print(str(_catalog(app, to, history, registry, source_url)))


def _catalog(app: App, to: Path, history: Path | None, registry: str | None, source_url: str | None) -> Path:
    sources = catalog.Sources(
        rows=app.rows,
        out=ROOT / "out",
        images=ROOT / "images",
        history=history,
        registry=registry,
        repository=app.matrix.repository,
        source_url=source_url,
    )
    return catalog.build(sources, to)


@main.command("bake", epilog=examples("bake all -r ghcr.io/acme/trainyard > docker-bake.json"))
@selection
@registry_option
@click.option("--cache", metavar="HOST/ORG/NAME", help="Repository for build caches.")
@click.pass_obj
def bake_(app: App, selection: tuple[str, ...], registry: str, cache: str | None) -> None:
    """Print a docker-bake.json, for BuildKit builders that are not on this machine.

    With TRAINYARD_MIRRORS, what builds are told of the mirrors lands in out/<id>/secrets.
    """
    rows, site = app.select(selection), mirrors.configured()
    secrets = {
        row.id: mirrors.write(mirrors.secrets(site, row, find_ca()), ROOT / "out" / row.id / "secrets")
        for row in rows
    }
    options = bake_file.Options(registry, cache, find_ca(), site, secrets)
    click.echo(json.dumps(bake_file.bake(rows, ROOT, options), indent=2))


@main.command("export", epilog=examples("export /media/usb cpu-pt213,cu121-pt29"))
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@selection
@compression_option
@click.pass_obj
def export_(app: App, folder: Path, selection: tuple[str, ...], compression: archive.Compression) -> None:
    """Write tested images as an OCI layout, for a site without a network."""
    engine = connect(say)
    packed = {}
    for row in app.select(selection):
        tested = publish.check(row, ROOT / "out" / row.id, engine)
        image = engine.image(tested.image_id)
        about = archive.describe(tested.manifest, image.labels if image else {})
        packed[row.id] = archive.pack(engine, tested.image_id, tested.folder / "oci", about, compression, say)
    out.print(str(archive.export_layout(packed, folder, say)))


@main.command("import", epilog=examples("import /media/usb"))
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True))
def import_(folder: Path) -> None:
    """Load images from an OCI layout into the engine, as trainyard:<id>."""
    for name, image_id in archive.import_layout(folder, connect(say), say).items():
        out.print(f"trainyard:{name}  {image_id}")


@main.command("nightly", epilog=examples("nightly all -r ghcr.io/acme/trainyard --history history"))
@selection
@base_option
@click.option("--registry", "-r", envvar="REGISTRY", metavar="HOST/ORG/NAME", help="Publish there.")
@plain_option
@compression_option
@signing_options
@click.option("--history", type=click.Path(path_type=Path, file_okay=False), help="Keep nights there.")
@click.option("--max-age", type=int, default=30, show_default=True, help="Days until a rebuild.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done, and why.")
@as_json
@click.pass_obj
def nightly_(
    app: App,
    selection: tuple[str, ...],
    base_mode: Any,
    registry: str | None,
    plain_http: bool,
    compression: archive.Compression,
    key: str | None,
    without_key: bool,
    history: Path | None,
    max_age: int,
    dry_run: bool,
    json_: bool,
) -> None:
    """Build, test and publish what changed; leave the rest alone; write the catalog; sum up.

    SELECTION: ids, globs and commas; everything where it is empty.  A row that fails stops no
    other; the exit code is 1 where any failed or a published tag is stale.
    """
    rows = app.select(selection, default="all")
    where = registries.connect(registry, plain_http, say=say) if registry else None
    signer = _signer(where, plain_http, key, without_key) if where and not dry_run else None
    engine, items = prepare(app, rows, base_mode)
    tasks = nightly.plan(items, ROOT, engine, where, max_age)
    for task in tasks:
        say(f"{task.item.row.id}: {task.work}: {task.why}")
    if dry_run:
        if json_:
            click.echo(json.dumps([{"id": t.item.row.id, "work": t.work, "why": t.why} for t in tasks]))
        return

    def do(task: nightly.Task) -> str | None:
        row = task.item.row
        if task.work == "build":
            build_one(engine, replace(task.item, why=task.why))
        if task.work in ("build", "test"):
            run_suite(engine, task.item)
        if where is None:
            return None
        since = publish.look(where, row.id, row.id == app.matrix.default)
        pushed = _push(row, engine, where, compression, signer)
        return _promote(app, row, pushed, where, since).immutable

    outcomes = nightly.carry_out(tasks, do)
    if history:
        nightly.remember(outcomes, ROOT / "out", history)
    index = _catalog(app, ROOT / "out" / "catalog", history, registry, None)
    if where:
        outcomes += nightly.stale(items, where, max_age)
    _sum_up(outcomes, index, json_)


def _sum_up(outcomes: tuple[nightly.Outcome, ...], index: Path, json_: bool) -> None:
    failed = [one for one in outcomes if one.failed]
    if json_:
        click.echo(json.dumps([asdict(one) for one in outcomes], indent=2))
    else:
        for one in outcomes:
            state = "[red]failed[/]" if one.failed else f"[green]{one.work}[/]"
            out.print(f"{one.id}: {state}: {escape(one.why)}{f' -> {one.tag}' if one.tag else ''}")
        done = sum(one.work != "nothing" and not one.failed for one in outcomes)
        out.print(f"{done} done, {len(failed)} failed; catalog: {index}")
    for one in failed:
        complain(StepFailed(f"{one.id}: {one.failed}"))
    sys.exit(1 if failed else 0)
