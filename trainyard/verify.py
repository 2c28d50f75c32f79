"""Verify a published image: is what a name points to what was built, tested and signed?

A signature covers one manifest and, through its digests, the config and the layers.  What is attached
(bill of materials, provenance, Trainyard's manifest, test report) refers *to* the image, so the image's
signature says nothing about it: each attached manifest has a signature of its own, and one without is
taken for not there.  Anyone who may push may attach things.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, Protocol
from xml.etree import ElementTree

from trainyard import provenance, sbom, signing
from trainyard.attest import ATTACHED, MANIFEST_TYPE, TESTS_TYPE
from trainyard.model import StepFailed
from trainyard.plan import CONTENTS_LABEL
from trainyard.publish import ID_LABEL, IMAGE_PROPERTY, LATEST
from trainyard.registry import INDEX_TYPES, Descriptor, Fetched, sha256

#: A tag that never moves: the image id, the day, the contents id.
IMMUTABLE = re.compile(r"(?P<id>.+)-\d{8}-(?P<contents>[0-9a-f]{16})")
#: Parts of a list that a message names.
NAMED = 3


class Source(signing.Store, Protocol):
    """What verifying needs of :class:`trainyard.registry.Registry`: one repository."""

    def manifest(self, ref: str) -> Fetched:
        """The manifest under a tag or digest.  Raises a StepFailed where there is none."""

    def referrers(self, digest: str) -> list[Descriptor]:
        """What is attached to a manifest."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str


class _Wrong(Exception):
    """A check found something wrong; ``str()`` is its detail."""


@dataclass(frozen=True)
class _Image:
    """The image in the registry."""

    fetched: Fetched
    config_digest: str
    labels: Mapping[str, str]


def verify(source: Source, ref: str, trust: signing.Trust) -> tuple[Check, ...]:
    """Check what a tag or digest of the repository points to; every check that was made, in order.

    ``trust`` says whose signatures count.  The image is sound only where all checks are ok.  Raises
    StepFailed (of the registry) where the name points to nothing or cannot be read at all.
    """
    fetched = source.manifest(ref)
    return tuple(_checks(source, ref, fetched, trust))


def ok(checks: tuple[Check, ...]) -> bool:
    """Whether there are checks, and all of them passed."""
    return bool(checks) and all(check.ok for check in checks)


def as_json(checks: tuple[Check, ...]) -> list[dict[str, Any]]:
    """The checks as plain data."""
    return [asdict(check) for check in checks]


def _checks(source: Source, ref: str, fetched: Fetched, trust: signing.Trust) -> Iterator[Check]:
    if fetched.media_type not in INDEX_TYPES:
        yield from _image_checks(source, ref, ref, fetched, trust)
        return
    yield _check("index", lambda: _manifest(ref, fetched))
    yield _check("signature", lambda: _signature(source, fetched.digest, trust))
    entries = fetched.json.get("manifests") or ()
    if not entries:
        yield Check("platforms", False, "the index names no image")
    for entry in entries:
        platform = "/".join((entry.get("platform") or {}).get(part, "?") for part in ("os", "architecture"))
        digest = str(entry.get("digest"))
        try:
            image = source.manifest(digest)
        except StepFailed as error:
            yield Check(f"{platform} manifest", False, str(error))
            continue
        for check in _image_checks(source, digest, ref, image, trust):
            yield replace(check, name=f"{platform} {check.name}")


def _image_checks(
    source: Source, ref: str, name: str, fetched: Fetched, trust: signing.Trust
) -> Iterator[Check]:
    """The checks of one image; ``ref`` is what it was fetched by, ``name`` what was asked for."""
    yield _check("manifest", lambda: _manifest(ref, fetched))
    yield _check("signature", lambda: _signature(source, fetched.digest, trust))
    image: list[_Image] = []
    yield _check("config", lambda: _config(source, fetched, image))
    if not image:
        return  # whatever else is attached cannot be about this
    yield _check("tag", lambda: _tag(name, image[0].labels))

    listed = cache(lambda: source.referrers(fetched.digest))
    attached = {one: _attached(source, fetched.digest, listed, one, trust) for one in ATTACHED}
    measured: list[dict[str, Any]] = []
    yield _check("trainyard manifest", lambda: _trainyard(attached[MANIFEST_TYPE](), image[0], measured))
    if measured:
        own = measured[0]
        yield _check("sbom", lambda: _sbom(attached[sbom.MEDIA_TYPE](), own, fetched.digest))
        yield _check(
            "provenance", lambda: _provenance(attached[provenance.MEDIA_TYPE](), own, fetched.digest)
        )
        yield _check("tests", lambda: _tests(attached[TESTS_TYPE](), own["id"], own["image_id"]))


def _check(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name, True, look())
    except (_Wrong, StepFailed) as error:
        return Check(name, False, str(error))


# -- the image -----------------------------------------------------------------------------


def _manifest(ref: str, fetched: Fetched) -> str:
    digest = sha256(fetched.body)
    if digest != fetched.digest or (ref.startswith("sha256:") and digest != ref):
        raise _Wrong(f"the registry has {digest} where it says {ref}")
    return digest


def _signature(source: Source, digest: str, trust: signing.Trust) -> str:
    found = trust.look(source, digest)
    if not found.signed:
        raise _Wrong(found.detail)
    return found.detail


def _config(source: Source, fetched: Fetched, image: list[_Image]) -> str:
    try:
        digest = str(fetched.json["config"]["digest"])
        body = source.blob(digest)
        if sha256(body) != digest:
            raise _Wrong(f"the registry has other bytes than {digest}")
        config = json.loads(body)
        diff_ids, layers = config["rootfs"]["diff_ids"], fetched.json["layers"]
        labels = config["config"].get("Labels") or {}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _Wrong(f"not an image: {error!r}") from error
    if len(diff_ids) != len(layers):
        raise _Wrong(f"the config is of {len(diff_ids)} layers, the manifest has {len(layers)}")
    image.append(_Image(fetched, digest, labels))
    return f"{digest}, {len(layers)} layers"


def _tag(ref: str, labels: Mapping[str, str]) -> str:
    """Is the image one that this tag may point to?  Its labels are covered by the signature."""
    name = labels.get(ID_LABEL)
    if not name:
        raise _Wrong(f"the image has no label {ID_LABEL}; Trainyard did not build it")
    if ref.startswith("sha256:") or ref == LATEST:
        return f"{name}, asked for {'by digest' if ref != LATEST else 'as the default'}"
    contents = labels.get(CONTENTS_LABEL)
    found = IMMUTABLE.fullmatch(ref)
    if found and found["id"] == name:
        if found["contents"] != contents:
            raise _Wrong(f"the tag says contents {found['contents']}, the image has {contents}")
        return f"{name} with contents {contents}"
    if ref != name:
        raise _Wrong(f"the tag says {ref}, the image is {name}")
    return name


# -- what is attached ----------------------------------------------------------------------


def _attached(
    source: Source,
    digest: str,
    listed: Callable[[], list[Descriptor]],
    kind: str,
    trust: signing.Trust,
) -> Callable[[], bytes]:
    """A function that fetches the attached file of a kind: the one with a signature that counts."""

    def fetch() -> bytes:
        found = [one for one in listed() if one.get("artifactType") == kind]
        # Of several the last one counts: a file that is attached again replaces the first.
        last = (one["digest"] for one in reversed(found) if trust.look(source, one["digest"]).signed)
        signed = next(last, None)
        if signed is None:
            raise _Wrong(
                f"{len(found)} attached, none of them signed by {trust.who}" if found else "not attached"
            )
        manifest = source.manifest(signed)
        try:
            if manifest.json["subject"]["digest"] != digest:
                raise _Wrong(f"{signed} is attached to another image")
            (layer,) = manifest.json["layers"]
            body = source.blob(layer["digest"])
        except (KeyError, TypeError, ValueError) as error:
            raise _Wrong(f"{signed} is not one file: {error!r}") from error
        if sha256(body) != layer["digest"]:
            raise _Wrong(f"the registry has other bytes than {layer['digest']}")
        return body

    return fetch


def _trainyard(body: bytes, image: _Image, measured: list[dict[str, Any]]) -> str:
    try:
        found = json.loads(body)
        name, image_id, contents = found["id"], found["image_id"], found["contents_id"]
        packages = len(found["measured"]["pip"]), len(found["measured"]["apt"])
    except (ValueError, KeyError, TypeError) as error:
        raise _Wrong(f"not a manifest: {error!r}") from error
    if image_id != image.config_digest:
        raise _Wrong(f"measured in {image_id}, but the image's config is {image.config_digest}")
    if (name, contents) != (image.labels.get(ID_LABEL), image.labels.get(CONTENTS_LABEL)):
        raise _Wrong(f"of {name} with contents {contents}, but the image's labels say otherwise")
    measured.append(found)
    return f"measured in this image: {packages[0]} Python and {packages[1]} Debian packages"


def _sbom(body: bytes, measured: Mapping[str, Any], digest: str) -> str:
    try:
        found = sbom.read(body)
    except ValueError as error:
        raise _Wrong(str(error)) from error
    if found.image_id != measured["image_id"] or found.digest not in (None, digest):
        raise _Wrong(f"of another image: {found.id} {found.digest or found.image_id}")
    inside = {
        (kind, name, version)
        for kind in ("pip", "apt")
        for name, version in measured["measured"][kind].items()
    }
    if different := sorted(inside ^ found.packages):
        names = ", ".join(f"{name} {version}" for _, name, version in different[:NAMED])
        more = f" and {len(different) - NAMED} more" if len(different) > NAMED else ""
        raise _Wrong(f"not the packages that were measured: {names}{more}")
    return f"CycloneDX, {len(found.packages)} packages, as measured"


def _provenance(body: bytes, measured: Mapping[str, Any], digest: str) -> str:
    try:
        found = provenance.read(body)
    except ValueError as error:
        raise _Wrong(str(error)) from error
    if digest not in found.digests:
        raise _Wrong(f"its subject is {', '.join(sorted(found.digests)) or 'nothing'}")
    if (found.id, found.contents_id) != (measured["id"], measured["contents_id"]):
        raise _Wrong(f"of {found.id} with contents {found.contents_id}")
    return f"built by {found.builder}" + (f" from commit {found.commit[:12]}" if found.commit else "")


def _tests(body: bytes, name: str, image_id: str) -> str:
    try:
        report = ElementTree.fromstring(body)
    except ElementTree.ParseError as error:
        raise _Wrong(f"not a JUnit report: {error}") from error
    about = {one.get("value") for one in report.iter("property") if one.get("name") == IMAGE_PROPERTY}
    if about - {image_id}:
        raise _Wrong(f"of another image: {', '.join(sorted(str(one) for one in about - {image_id}))}")
    cases = list(report.iter("testcase"))
    # Exactly: the tests of cpu-pt213-base also start with "[cpu-pt213".
    here = [case for case in cases if case.get("name", "").endswith(f"[{name}]")]
    failed = [
        case.get("name", "") for case in cases for kind in ("failure", "error") if case.find(kind) is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    if failed:
        raise _Wrong(f"{len(failed)} of {len(cases)} failed: {', '.join(failed[:NAMED])}")
    if not here or skipped == len(cases):
        raise _Wrong(f"no test of {name} ran")
    return f"{len(cases) - skipped} passed" + (f", {skipped} skipped" if skipped else "")
