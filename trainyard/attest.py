"""What is said about a published image, beside it in the registry, and signed.

Four files are attached: the bill of materials, the provenance, Trainyard's manifest and the test report.
Each is signed by itself, since the image's signature does not cover what refers to it; the image comes
last, so that an image with our signature has everything.  :mod:`trainyard.verify` checks all of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainyard import explain, provenance, render, sbom, signing
from trainyard.model import Row, StepFailed
from trainyard.publish import TESTS
from trainyard.registry import Descriptor, Fetched

MANIFEST_TYPE = "application/vnd.trainyard.manifest+json"
TESTS_TYPE = "application/vnd.trainyard.tests+xml"
#: What every published image has attached: type, and the name that the file gets where it is saved.
ATTACHED = {
    MANIFEST_TYPE: "manifest.json",
    sbom.MEDIA_TYPE: "sbom.json",
    provenance.MEDIA_TYPE: "provenance.intoto.json",
    TESTS_TYPE: TESTS,
}
TITLE = "org.opencontainers.image.title"


class Target(signing.Store, Protocol):
    """What attaching needs of :class:`trainyard.registry.Registry`: one repository."""

    def manifest(self, ref: str) -> Fetched:
        """The manifest under a tag or digest."""

    def referrers(self, digest: str) -> list[Descriptor]:
        """What is attached to a manifest."""

    def attach(
        self, subject: Descriptor, artifact_type: str, layers: Sequence[tuple[str, bytes, Mapping[str, str]]]
    ) -> Descriptor:
        """Attach files to a manifest; attaching the same twice is one."""


def documents(
    row: Row,
    manifest: Mapping[str, Any],
    root: Path,
    subject: tuple[str, str],
    source: provenance.Source | None,
    run: provenance.Run,
) -> dict[str, bytes]:
    """The files to attach to an image, by type.

    ``subject`` is the repository's name and the digest that the image was published under.  Locks are
    read from the checkout ``root``, the test report from its ``out/``.  Raises StepFailed where they
    are no longer those that the image was built from and tested with.
    """
    _check_locks(row, manifest, root)
    locks = {path.name: path.read_bytes() for path in sorted((root / "images" / row.id).glob("*.lock"))}
    report = root / "out" / row.id / TESTS
    if not report.exists():
        raise StepFailed(f"{row.id}: no {report}, so it is not tested\nRun: make test MATRIX={row.id}")
    tests = report.read_bytes()
    measured = (json.dumps(manifest, indent=2, sort_keys=True) + "\n").encode()
    return {
        MANIFEST_TYPE: measured,
        sbom.MEDIA_TYPE: sbom.document(manifest, locks["requirements.lock"].decode(), subject[1]),
        provenance.MEDIA_TYPE: provenance.statement(
            manifest,
            explain.as_json(row),
            locks,
            subject,
            source,
            run,
            {ATTACHED[MANIFEST_TYPE]: measured, TESTS: tests},
        ),
        TESTS_TYPE: tests,
    }


def _check_locks(row: Row, manifest: Mapping[str, Any], root: Path) -> None:
    now = render.input_digests(row, root, manifest["base"]["digest"])
    built = manifest.get("inputs", {})
    changed = [name for name in now if name.endswith(".lock") and built.get(name) != now[name]]
    if changed:
        raise StepFailed(
            f"{row.id}: changed since it was built: {', '.join(changed)}\n"
            f"Run: make test MATRIX={row.id}, and publish that"
        )


def attach(
    target: Target, digest: str, files: Mapping[str, bytes], signer: signing.Signer | None
) -> dict[str, str]:
    """Attach files to a published image, and sign them and it; return the digest of each by type.

    Attaching again adds nothing, nor does signing by key.  Without a signer nothing is signed, and
    ``verify`` says so.
    """
    subject = target.manifest(digest).descriptor
    attached = {}
    for kind, body in files.items():
        one = target.attach(subject, kind, [(kind, body, {TITLE: ATTACHED[kind]})])
        attached[kind] = str(one["digest"])
    if signer:
        signer.sign(target, [*attached.values(), digest])
    return attached


def fetch(target: Target, ref: str) -> dict[str, bytes]:
    """What is attached to a published image, by file name; of several of a kind, the last one.

    Nothing is checked but digests; :mod:`trainyard.verify` is what trusts.
    """
    found = {}
    for one in target.referrers(target.manifest(ref).digest):
        name = ATTACHED.get(str(one.get("artifactType")))
        if name:
            (layer,) = target.manifest(one["digest"]).json["layers"]
            found[name] = target.blob(layer["digest"])
    return found


def fetch_manifest(target: Target, ref: str) -> dict[str, Any]:
    """Trainyard's manifest of a published image.  Raises StepFailed where none is attached."""
    body = fetch(target, ref).get(ATTACHED[MANIFEST_TYPE])
    if body is None:
        raise StepFailed(f"{ref}: no Trainyard manifest is attached to it")
    measured: dict[str, Any] = json.loads(body)
    return measured
