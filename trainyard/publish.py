"""Publish: from a tested image to tags that are never wrong.

    check    what is in out/<id> passed its gate and its tests, and is this image
    push     blobs and the manifest by digest, without a tag; read back
    promote  an immutable tag on that digest, then the floating ones; read back
    rollback, prune

All state is in the registry: nothing here remembers anything between two runs.

What the OCI API can and cannot promise.  Setting one tag is one request, so a tag is never half
moved, and a failure before that request leaves it where it was.  There is no compare-and-swap:
each floating tag is looked at when the work starts and again right before it moves, and the work
is refused where it moved in between.  Two publishers that pass that second look within the same
round trip both write; the later one wins, and the other learns so when it reads back.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from trainyard import archive, gate, manifest
from trainyard.archive import Compression, OciImage
from trainyard.engine import Engine
from trainyard.hostenv import Say, silent
from trainyard.model import InputError, Row, StepFailed
from trainyard.plan import CONTENTS_LABEL
from trainyard.registry import (
    INDEX_TYPES,
    OCI_INDEX,
    OCI_MANIFEST,
    Fetched,
    Registry,
    canonical,
    referrers_tag,
    sha256,
    utc,
)

ID_LABEL = "dev.trainyard.id"
CREATED = archive.TITLE + "created"
VERSION = archive.TITLE + "version"  # the contents id
LATEST = "latest"
PUSHED = "pushed.json"
TESTS = "tests.xml"
#: Properties of a test report that name the image it is about, and what was left out of the suite.
IMAGE_PROPERTY = "dev.trainyard.image-id"
SELECTION_PROPERTY = "dev.trainyard.selection"
_CONTENTS = r"[0-9a-f]{16}"
#: Tags that belong to a manifest: its referrers, and cosign's signature, attestation and SBOM.
_OF_A_DIGEST = re.compile(r"sha256-(?P<hex>[0-9a-f]{64})(?P<kind>|\.sig|\.att|\.sbom)")


# -- what may go up ------------------------------------------------------------------------


@dataclass(frozen=True)
class Tested:
    """An image that passed its gate and its tests; only :func:`check` makes one."""

    id: str
    image_id: str
    contents_id: str
    manifest: Mapping[str, Any]
    folder: Path  # out/<id>


def check(row: Row, folder: Path, engine: Engine, reference: str | None = None) -> Tested:
    """Prove that the engine's image is the one that was measured, gated and tested.

    Raises StepFailed that says what is missing and how to get it.
    """
    name = reference or f"trainyard:{row.id}"
    found = manifest.read(folder)
    if found is None:
        raise StepFailed(
            f"{row.id}: no {folder / manifest.FILE}, so nothing is built\nRun: make build MATRIX={row.id}"
        )
    image = engine.image(name)
    if image is None:
        raise StepFailed(f"{row.id}: the engine has no image {name}\nRun: make build MATRIX={row.id}")
    if found.get("image_id") != image.id:
        raise StepFailed(
            f"{row.id}: {name} is {_short(image.id)}, but what was measured is "
            f"{_short(found.get('image_id'))}\nRun: make test MATRIX={row.id}"
        )
    promised = (row.id, found.get("contents_id"))
    if (found.get("id"), image.labels.get(CONTENTS_LABEL)) != promised:
        raise StepFailed(
            f"{row.id}: image and manifest disagree on what it is: {found.get('id')}, contents id "
            f"{found.get('contents_id')} and {image.labels.get(CONTENTS_LABEL)}\n"
            f"Run: make test MATRIX={row.id}"
        )
    if different := gate.differences(row, found):
        raise StepFailed(
            f"{row.id}: the image is not what the row says\n" + "\n".join(f"  - {one}" for one in different)
        )
    _passed(row.id, folder / TESTS, str(image.id), utc(found["built_at"]))
    return Tested(row.id, str(image.id), found["contents_id"], found, folder)


def _passed(row_id: str, report: Path, image_id: str, built: datetime) -> None:
    """Raise StepFailed unless the report is of a whole suite that passed on this image."""
    remedy = f"\nRun: make test MATRIX={row_id}"
    try:
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    except FileNotFoundError:
        raise StepFailed(f"{row_id}: no {report}, so it is not tested{remedy}") from None
    except (OSError, ElementTree.ParseError) as error:
        raise StepFailed(f"{row_id}: {report} cannot be read: {error}{remedy}") from error
    counts = {
        name: sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    }
    if not counts["tests"]:
        raise StepFailed(f"{row_id}: {report} holds no test{remedy}")
    wrong = [f"{counts[name]} {name}" for name in ("failures", "errors", "skipped") if counts[name]]
    if wrong:
        raise StepFailed(f"{row_id}: its tests did not pass: {', '.join(wrong)} in {report}{remedy}")
    for suite in suites:
        tested = datetime.fromisoformat(suite.get("timestamp", "1970-01-01T00:00:00+00:00")).astimezone()
        if tested < built:
            raise StepFailed(
                f"{row_id}: {report} is older than the image: tested {tested:%Y-%m-%d %H:%M}, "
                f"built {built.astimezone(tested.tzinfo):%Y-%m-%d %H:%M}{remedy}"
            )
        said = {one.get("name"): one.get("value") for one in suite.iter("property")}
        if said.get(IMAGE_PROPERTY, image_id) != image_id:
            raise StepFailed(f"{row_id}: {report} is about image {_short(said[IMAGE_PROPERTY])}{remedy}")
        if said.get(SELECTION_PROPERTY):
            raise StepFailed(
                f"{row_id}: {report} is of a part of the suite: {said[SELECTION_PROPERTY]}{remedy}"
            )


# -- push ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pushed:
    """What :func:`push` did; ``digest`` is the manifest's, ``sent`` the bytes of blobs that went up."""

    repository: str
    digest: str
    image_id: str
    size: int
    sent: int
    blobs: int
    blobs_there: int

    @property
    def reference(self) -> str:
        return f"{self.repository}@{self.digest}"


def push(
    registry: Registry,
    engine: Engine,
    tested: Tested,
    compression: Compression = "zstd",
    extra: Mapping[str, str] | None = None,
    say: Say = silent,
) -> Pushed:
    """Upload a tested image without a tag, and read it back: its config is the tested image.

    ``extra`` are annotations beside those that :func:`archive.describe` makes.  Leaves
    ``pushed.json`` in ``out/<id>`` as a note for :func:`last_pushed`.
    """
    with engine.exclusive(f"push {tested.id}", say):
        image = engine.image(tested.image_id)
        labels = image.labels if image else {}
        packed = archive.pack(
            engine,
            tested.image_id,
            tested.folder / "oci",
            archive.describe(tested.manifest, labels, extra),
            compression,
            say,
        )
        done = upload(registry, packed, tested.image_id, say)
        archive.write(
            tested.folder / PUSHED,
            canonical({"repository": done.repository, "digest": done.digest, "image_id": done.image_id}),
        )
    return done


def upload(registry: Registry, image: OciImage, image_id: str, say: Say = silent) -> Pushed:
    """Put an image's blobs and its manifest, by digest, and read the manifest back.

    Raises StepFailed where the config is not ``image_id``, before and after.
    """
    if image.image_id != image_id:
        raise StepFailed(f"tested is {image_id}, but what would go up is {image.image_id}")
    sent = there = 0
    blobs = {blob.digest: blob for blob in (*image.layers, image.config)}
    for number, blob in enumerate(blobs.values(), 1):
        say(f"{registry.name}: blob {number} of {len(blobs)}, {blob.size / 1e6:.1f} MB")
        count = registry.put_blob(blob.digest, blob.open, blob.size)
        sent += count
        there += not count
    digest = registry.put_manifest(image.digest, image.manifest, OCI_MANIFEST)
    back = registry.manifest(digest)
    if back.json["config"]["digest"] != image_id:
        raise StepFailed(f"{registry.name}@{digest}: its config is not the tested image {image_id}")
    return Pushed(registry.name, digest, image_id, image.size, sent, len(blobs), there)


def last_pushed(registry: Registry, folder: Path, image_id: str) -> str:
    """The digest under which this image went to this repository, by push's note.

    Only a note: :func:`promote` asks the registry for everything.  Raises InputError without one.
    """
    try:
        note = json.loads((folder / PUSHED).read_text())
        if (note["repository"], note["image_id"]) == (registry.name, image_id):
            return str(note["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise InputError(f"{folder.name}: {_short(image_id)} is not pushed to {registry.name} yet\nPush it first")


def combine(registry: Registry, digests: Sequence[str]) -> str:
    """Put an index of one image for several platforms, by digest; return it.

    All must be the same row.  Raises InputError where two are for one platform.
    """
    parts = [registry.manifest(digest) for digest in digests]
    configs = [_config(registry, part) for part in parts]
    platforms = [_platform(config) for config in configs]
    if len(set(platforms)) != len(platforms):
        raise InputError(f"two images for one platform: {', '.join(sorted(platforms))}")
    if len({_labels(config).get(ID_LABEL) for config in configs}) != 1:
        raise InputError(f"images of different rows do not make one: {', '.join(digests)}")
    entries = [
        part.descriptor | {"platform": {"os": config["os"], "architecture": config["architecture"]}}
        for part, config in zip(parts, configs, strict=True)
    ]
    body = canonical(
        {
            "schemaVersion": 2,
            "mediaType": OCI_INDEX,
            "manifests": entries,
            "annotations": parts[0].json.get("annotations") or {},
        }
    )
    return registry.put_manifest(sha256(body), body, OCI_INDEX)


# -- tags ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moved:
    """A tag that was set: ``before`` is None where it is new."""

    tag: str
    before: str | None
    after: str

    @property
    def changed(self) -> bool:
        return self.before != self.after


@dataclass(frozen=True)
class Promoted:
    """What :func:`promote` or :func:`rollback` did."""

    repository: str
    id: str
    digest: str
    immutable: str
    tags: tuple[Moved, ...]  # the immutable one first; those that were right already are not ``changed``


@dataclass(frozen=True)
class Version:
    """An immutable tag in the registry."""

    tag: str
    digest: str
    created: datetime
    contents_id: str


def immutable_tag(row_id: str, created: datetime, contents_id: str) -> str:
    """``ID-YYYYMMDD-contentsid``, by the day in UTC on which the image was built."""
    tag = f"{row_id}-{created:%Y%m%d}-{contents_id}"
    if not re.fullmatch(_CONTENTS, contents_id) or len(tag) > 128:
        raise StepFailed(
            f"{tag!r} is not a tag: a contents id is 16 hexadecimal digits, a tag up to 128 characters"
        )
    return tag


def _immutable(row_id: str) -> re.Pattern[str]:
    """The shape of a row's immutable tags, which is no other row's: ``a-base-...`` is not of ``a``."""
    return re.compile(rf"{re.escape(row_id)}-\d{{8}}-{_CONTENTS}")


def look(registry: Registry, row_id: str, default: bool = False) -> dict[str, str | None]:
    """Where the floating tags point now: what :func:`promote` takes as ``since``."""
    return {tag: registry.digest(tag) for tag in _floating(row_id, default)}


def _floating(row_id: str, default: bool) -> tuple[str, ...]:
    return (row_id, LATEST) if default else (row_id,)


def promote(
    registry: Registry,
    row_id: str,
    digest: str,
    default: bool = False,
    since: Mapping[str, str | None] | None = None,
    platforms: Collection[str] = ("linux/amd64",),
    image_id: str | None = None,
    say: Say = silent,
) -> Promoted:
    """Set the immutable tag on a pushed manifest, then the floating ones; read all of them back.

    ``default`` also moves ``latest``.  ``since`` is what :func:`look` said before the work began;
    without it, promote looks first.  ``platforms`` are those that the tag promises.  ``image_id``
    is what was tested, where one platform is promised.  Nothing is uploaded.

    Raises StepFailed, and leaves the floating tags where they were, where the manifest is not this
    row's, lacks a platform, where the immutable tag is another manifest's, where a floating tag
    moved meanwhile, or holds a newer build.
    """
    before = look(registry, row_id, default) | dict(since or {})
    fetched = registry.manifest(digest)
    about = _about(registry, fetched, platforms)
    if about.id != row_id:
        raise StepFailed(f"{registry.name}@{digest} is an image of {about.id or 'no row'}, not of {row_id}")
    if image_id and about.image_ids != (image_id,):
        raise StepFailed(
            f"{registry.name}@{digest} is image {_short(about.image_ids[0])}; tested is {_short(image_id)}"
        )
    for tag in (row_id, LATEST):
        _no_newer(registry, tag, before.get(tag), about, digest)
    fixed = immutable_tag(row_id, about.created, about.contents_id)
    moved = [_put_immutable(registry, fixed, fetched, say)]
    for tag in _floating(row_id, default):
        moved.append(_move(registry, tag, before.get(tag), fetched, say))
    _read_back(registry, [one.tag for one in moved], digest)
    return Promoted(registry.name, row_id, digest, fixed, tuple(moved))


def _no_newer(registry: Registry, tag: str, held: str | None, about: _About, digest: str) -> None:
    """Refuse to put an older build over a newer one of the same row: that is what rollback is for."""
    if held is None or held == digest or not (there := registry.find(held)):
        return
    try:
        other = _about(registry, there, ())
    except NotAnImage:  # whatever somebody put there, it is no build of ours
        return
    if other.id == about.id and other.created > about.created:
        raise StepFailed(
            f"{registry.name}:{tag} holds a newer build, of {other.created:%Y-%m-%d %H:%M} ({held}); "
            f"this one is of {about.created:%Y-%m-%d %H:%M}\nTo go back: rollback {about.id} --to TAG"
        )


def _put_immutable(registry: Registry, tag: str, fetched: Fetched, say: Say) -> Moved:
    there = registry.digest(tag)
    if there is None:
        say(f"{registry.name}: {tag} -> {_short(fetched.digest)}")
        registry.put_manifest(tag, fetched.body, fetched.media_type)
        back = registry.digest(tag)
    else:
        back = there
    if back != fetched.digest:
        raise StepFailed(
            f"{registry.name}:{tag} is never overwritten, and is already {back}; "
            f"this image is {fetched.digest}\nThe same inputs were built, or the same image was packed "
            "(another compression, other annotations), twice for one day\nPromote the one that is there, "
            "or build again tomorrow"
        )
    return Moved(tag, there, fetched.digest)


def _move(registry: Registry, tag: str, expected: str | None, fetched: Fetched, say: Say) -> Moved:
    """Move a floating tag that is still where it was when the work began."""
    now = registry.digest(tag)
    if now == fetched.digest:
        return Moved(tag, now, fetched.digest)
    if now != expected:
        raise StepFailed(
            f"{registry.name}:{tag} moved while we were at work: it was {expected or 'not there'}, "
            f"and is now {now or 'gone'}\nAnother publisher was here; look at its image, then promote again"
        )
    say(f"{registry.name}: {tag} -> {_short(fetched.digest)}")
    registry.put_manifest(tag, fetched.body, fetched.media_type)
    return Moved(tag, now, fetched.digest)


def _read_back(registry: Registry, tags: Iterable[str], digest: str) -> None:
    for tag in tags:
        if (found := registry.digest(tag)) != digest:
            raise StepFailed(
                f"{registry.name}:{tag} should be {digest}, and reads back as {found or 'nothing'}\n"
                "Another publisher moved it at the same moment; look at its image, then promote again"
            )


# -- what a manifest is about --------------------------------------------------------------


class NotAnImage(StepFailed):
    """A manifest of something else."""


@dataclass(frozen=True)
class _About:
    """What a manifest in the registry says it is, from its config and annotations."""

    id: str
    contents_id: str
    created: datetime
    image_ids: tuple[str, ...]


def _about(registry: Registry, fetched: Fetched, platforms: Collection[str]) -> _About:
    """Read a manifest's configs; raise StepFailed where a promised platform is missing."""
    children = _children(registry, fetched)
    configs = [_config(registry, child) for child in children]
    found = [_platform(config) for config in configs]
    if missing := sorted(set(platforms) - set(found)):
        raise StepFailed(
            f"{registry.name}@{fetched.digest} is not for {', '.join(missing)}; it is for {', '.join(found)}"
        )
    labels = _labels(configs[0])
    return _About(
        id=labels.get(ID_LABEL, ""),
        contents_id=labels.get(CONTENTS_LABEL, ""),
        created=_created(registry, fetched),
        image_ids=tuple(child.json["config"]["digest"] for child in children),
    )


def _created(registry: Registry, fetched: Fetched) -> datetime:
    """When it was built: by the manifest's annotation, which push always makes, else by the config."""
    noted = (fetched.json.get("annotations") or {}).get(CREATED)
    if not noted:
        child = _children(registry, fetched)[0]
        noted = (child.json.get("annotations") or {}).get(CREATED) or _config(registry, child).get("created")
    return utc(noted or "1970-01-01T00:00:00Z")


def _children(registry: Registry, fetched: Fetched) -> list[Fetched]:
    if fetched.media_type not in INDEX_TYPES:
        return [fetched]
    entries = fetched.json.get("manifests") or []
    # BuildKit's attestations are entries for a platform of their own.
    images = [e for e in entries if (e.get("platform") or {}).get("architecture") != "unknown"]
    if not images:
        raise NotAnImage(f"{registry.name}@{fetched.digest} is an index without an image")
    return [registry.manifest(entry["digest"]) for entry in images]


def _config(registry: Registry, fetched: Fetched) -> dict[str, Any]:
    try:
        found = json.loads(registry.blob(fetched.json["config"]["digest"]))
        return dict(found)
    except (KeyError, ValueError, TypeError) as error:
        raise NotAnImage(f"{registry.name}@{fetched.digest} is not an image") from error


def _labels(config: Mapping[str, Any]) -> dict[str, str]:
    return dict((config.get("config") or {}).get("Labels") or {})


def _platform(config: Mapping[str, Any]) -> str:
    parts = (config.get("os", ""), config.get("architecture", ""), config.get("variant", ""))
    return "/".join(str(part) for part in parts if part)


# -- history, rollback, prune --------------------------------------------------------------


def history(registry: Registry, row_id: str, tags: Iterable[str] | None = None) -> tuple[Version, ...]:
    """The immutable tags of a row, newest build first."""
    shape = _immutable(row_id)
    found = []
    for tag in registry.tags() if tags is None else tags:
        if shape.fullmatch(tag) and (fetched := registry.find(tag)):  # else deleted since the list was made
            created = _created(registry, fetched)
            found.append(Version(tag, fetched.digest, created, contents_id=tag.rsplit("-", 1)[1]))
    return tuple(sorted(found, key=lambda one: (one.created, one.tag), reverse=True))


def rollback(registry: Registry, row_id: str, to: str | None = None, say: Say = silent) -> Promoted:
    """Point the floating tag at the build before the one it holds, or at the immutable tag ``to``.

    ``latest`` goes along where it holds the same manifest.  What the tag held is marked first, so
    that a nightly does not set it again; see :func:`is_rolled_back`.  Raises InputError where there
    is nothing to go back to, StepFailed where a tag moved meanwhile.
    """
    before = look(registry, row_id, default=True)
    versions = history(registry, row_id)
    target = _target(registry, row_id, before[row_id], versions, to)
    fetched = registry.manifest(target.digest)
    left = next((one for one in versions if one.digest == before[row_id]), None)
    if left and target.created < left.created:
        leaving = registry.manifest(left.digest)
        registry.put_manifest(_rolled_back(row_id), leaving.body, leaving.media_type)
    along = before[row_id] is not None and before[LATEST] == before[row_id]
    moved = [_move(registry, tag, before[tag], fetched, say) for tag in _floating(row_id, along)]
    _read_back(registry, [one.tag for one in moved], target.digest)
    return Promoted(registry.name, row_id, target.digest, target.tag, tuple(moved))


def _rolled_back(row_id: str) -> str:
    """The tag on what the last rollback left: the registry is the only memory of that."""
    return f"{row_id}-rolled-back"


def is_rolled_back(registry: Registry, row_id: str, contents_id: str, image_id: str | None) -> bool:
    """Was a build of these contents, or this very image, taken back, and nothing promoted since?"""
    marked, held = registry.find(_rolled_back(row_id)), registry.find(row_id)
    if marked is None or held is None or marked.digest == held.digest:
        return False
    contents = [(one.json.get("annotations") or {}).get(VERSION) for one in (marked, held)]
    same_image = image_id is not None and (marked.json.get("config") or {}).get("digest") == image_id
    return same_image or (contents[0] == contents_id and contents[1] != contents_id)


def _target(
    registry: Registry, row_id: str, held: str | None, versions: Sequence[Version], to: str | None
) -> Version:
    known = ", ".join(version.tag for version in versions) or "none"
    if to is not None:
        for version in versions:
            if to in (version.tag, version.digest):
                return version
        raise InputError(f"{registry.name}: {to} is not an immutable tag of {row_id}\nThere are: {known}")
    for number, version in enumerate(versions):
        if version.digest == held:
            older = [one for one in versions[number + 1 :] if one.digest != held]
            if older:
                return older[0]
            raise InputError(
                f"{registry.name}: {row_id} holds {version.tag}, and nothing is older\nThere are: {known}"
            )
    raise InputError(
        f"{registry.name}: {row_id} is {held or 'not there'}, which no immutable tag names; say --to\n"
        f"There are: {known}"
    )


@dataclass(frozen=True)
class Removal:
    """A manifest that goes, or in a dry run would go: its tags, and what goes with it."""

    digest: str
    tags: tuple[str, ...]
    created: datetime
    parts: tuple[str, ...]  # digests: an index's images, its referrers and signatures
    part_tags: tuple[str, ...]  # the tags of those


@dataclass(frozen=True)
class Pruned:
    """What :func:`prune` did, or in a dry run would do.  ``kept`` gives each tag its reason."""

    repository: str
    dry_run: bool
    removed: tuple[Removal, ...]
    kept: tuple[tuple[str, str], ...]


def prune(
    registry: Registry,
    row_ids: Sequence[str],
    keep: int,
    hold: Collection[str] = (),
    dry_run: bool = True,
    say: Say = silent,
) -> Pruned:
    """Delete old builds: of each row all but the ``keep`` newest immutable tags.

    Never what any other tag of the repository points to, nor what that is made of, nor what is
    attached to it; nor tags that match a pattern of ``hold``.  Deleting is by digest, and tags are
    read again right before each.  The registry frees the disk when it collects its garbage.
    """
    if keep < 1:
        raise InputError(f"keep {keep}: at least 1")
    tags = registry.tags()
    held = _held(registry, row_ids, tags)
    versions = [
        (number, version)
        for row_id in row_ids
        for number, version in enumerate(history(registry, row_id, tags))
    ]
    kept: list[tuple[str, str]] = []
    for number, version in versions:
        pattern = next((one for one in hold if fnmatch.fnmatchcase(version.tag, one)), None)
        if version.digest in held:
            kept.append((version.tag, f"{held[version.digest]} points to it"))
        elif pattern or number < keep:
            kept.append((version.tag, f"held by {pattern}" if pattern else f"one of the newest {keep}"))
            for digest in _closure(registry.manifest(version.digest)):
                held.setdefault(digest, version.tag)
    removed = []
    for digest, group in _by_digest(version for _, version in versions).items():
        if digest not in held:
            removal = _removal(registry, digest, group, tags, held)
            if not dry_run:
                _remove(registry, removal, row_ids, say)
            removed.append(removal)
    return Pruned(registry.name, dry_run, tuple(removed), tuple(kept))


def _by_digest(versions: Iterable[Version]) -> dict[str, list[Version]]:
    found: dict[str, list[Version]] = {}
    for version in versions:
        found.setdefault(version.digest, []).append(version)
    return found


def _held(registry: Registry, row_ids: Sequence[str], tags: Iterable[str]) -> dict[str, str]:
    """Digests that stay, with the tag that is the reason: everything but the rows' immutable tags.

    Also what those manifests are made of: an index's images.
    """
    shapes = [_immutable(row_id) for row_id in row_ids]
    held: dict[str, str] = {}
    for tag in sorted(tags, key=lambda one: one not in row_ids):  # a row's own tag is the better reason
        if _OF_A_DIGEST.fullmatch(tag) or any(shape.fullmatch(tag) for shape in shapes):
            continue
        if fetched := registry.find(tag):
            for digest in _closure(fetched):
                held.setdefault(digest, tag)
    return held


def _closure(fetched: Fetched) -> Iterator[str]:
    """The digests of a manifest and, of an index, of its images."""
    yield fetched.digest
    if fetched.media_type in INDEX_TYPES:
        yield from (entry["digest"] for entry in fetched.json.get("manifests") or ())


def _removal(
    registry: Registry,
    digest: str,
    versions: Sequence[Version],
    tags: Iterable[str],
    held: Collection[str],
) -> Removal:
    images = [one for one in _closure(registry.manifest(digest)) if one not in held]
    parts = dict.fromkeys(images[1:])
    names = []
    for image in images:
        attached = [one["digest"] for one in registry.referrers(image)]
        parts |= dict.fromkeys(attached)
        owners = tuple(referrers_tag(one) for one in (image, *attached))  # each can have its signature
        for tag in tags:
            if _OF_A_DIGEST.fullmatch(tag) and tag.startswith(owners) and (its := registry.digest(tag)):
                parts[its] = None
                names.append(tag)
    going = tuple(one for one in parts if one not in held)
    return Removal(digest, tuple(v.tag for v in versions), versions[0].created, going, tuple(names))


def _remove(registry: Registry, removal: Removal, row_ids: Sequence[str], say: Say) -> None:
    """Delete one manifest and what belongs to it, after a last look at where all other tags point.

    The image goes first: a failure after it leaves a few kilobytes that nothing names, the other
    way round it would leave an image without its signature.
    """
    now = _held(registry, row_ids, registry.tags())
    if removal.digest in now:
        raise StepFailed(
            f"{registry.name}:{now[removal.digest]} moved to {removal.digest} while we were at work; "
            "it stays\nRun prune again"
        )
    for digest in (removal.digest, *removal.parts):
        if digest not in now:
            say(f"{registry.name}: deleting {_short(digest)}")
            registry.delete_manifest(digest)


def _short(digest: str | None) -> str:
    """Enough of a digest for people."""
    return str(digest).removeprefix("sha256:")[:12]
