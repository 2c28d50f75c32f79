"""Names of tags, and which builds prune would take: rules that need no registry."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from trainyard import publish
from trainyard.model import InputError, StepFailed
from trainyard.registry import OCI_INDEX, OCI_MANIFEST, Fetched, NotFound, Registry, canonical, sha256

ROW = "cu121-pt29"


def test_an_immutable_tag_says_row_day_and_contents() -> None:
    when = datetime(2026, 1, 9, 23, 59, tzinfo=UTC)
    assert publish.immutable_tag(ROW, when, "0123456789abcdef") == f"{ROW}-20260109-0123456789abcdef"
    for wrong in ("", "0123", "0123456789ABCDEF", "0123456789abcdef-x"):
        with pytest.raises(StepFailed, match="is not a tag"):
            publish.immutable_tag(ROW, when, wrong)


@dataclass
class Tags:
    """A repository as a dictionary: tag -> manifest."""

    manifests: dict[str, bytes] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    attached: dict[str, list[str]] = field(default_factory=dict)
    name: str = "reg.example/a/b"

    def put(self, tags: Sequence[str], day: int, kind: str = OCI_MANIFEST, **more: Any) -> str:
        notes = {"org.opencontainers.image.created": f"2026-03-{day:02}T02:00:00Z"}
        body = canonical({"annotations": notes} | more)
        digest = sha256(body)
        self.manifests[digest], self.types[digest] = body, kind
        self.named |= dict.fromkeys(tags, digest)
        return digest

    def tags(self) -> tuple[str, ...]:
        return tuple(self.named)

    def digest(self, tag: str) -> str | None:
        return self.named.get(tag)

    def find(self, ref: str) -> Fetched | None:
        digest = self.named.get(ref, ref)
        body = self.manifests.get(digest)
        return None if body is None else Fetched(body, digest, self.types[digest])

    def manifest(self, ref: str) -> Fetched:
        found = self.find(ref)
        if not found:
            raise NotFound(ref, 404)
        return found

    def referrers(self, digest: str) -> list[dict[str, str]]:
        return [{"digest": one} for one in self.attached.get(digest, ())]

    def delete_manifest(self, digest: str) -> bool:
        self.named = {tag: its for tag, its in self.named.items() if its != digest}
        return self.manifests.pop(digest, None) is not None


def tag(day: int, row: str = ROW) -> str:
    return f"{row}-202603{day:02}-{day:016x}"


@pytest.fixture
def repository() -> Tags:
    """Five nights; the floating tag is at the third, a customer's at the first."""
    one = Tags()
    for day in range(1, 6):
        floating = {1: ["customer"], 3: [ROW, "latest"]}.get(day, [])
        one.put([tag(day), *floating], day)
    for day in (1, 2):
        one.put([tag(day, f"{ROW}-base")], day, row="base")
    return one


def prune(repository: Tags, **options: Any) -> publish.Pruned:
    return publish.prune(cast(Registry, repository), [ROW], **options)


def gone(done: publish.Pruned) -> list[str]:
    return [one for removal in done.removed for one in removal.tags]


def test_history_is_of_one_row_and_newest_first(repository: Tags) -> None:
    found = publish.history(cast(Registry, repository), ROW)
    assert [version.tag for version in found] == [tag(day) for day in (5, 4, 3, 2, 1)]
    assert found[0].contents_id == f"{5:016x}"


@pytest.mark.parametrize(
    ("options", "days"),
    [
        ({"keep": 1}, [4, 2]),
        ({"keep": 2}, [2]),
        ({"keep": 9}, []),
        ({"keep": 1, "hold": [f"{ROW}-20260302-*"]}, [4]),
        ({"keep": 1, "hold": ["*"]}, []),
    ],
)
def test_prune_takes_the_oldest_that_nothing_holds(
    repository: Tags, options: dict[str, Any], days: list[int]
) -> None:
    before = dict(repository.named)
    assert gone(prune(repository, **options)) == [tag(day) for day in days]
    assert repository.named == before
    prune(repository, **options, dry_run=False)
    assert set(before) - set(repository.named) == {tag(day) for day in days}


def test_prune_keeps_at_least_one(repository: Tags) -> None:
    with pytest.raises(InputError, match="at least 1"):
        prune(repository, keep=0)


def test_an_older_tag_of_a_manifest_that_stays_is_no_reason_to_delete_it(repository: Tags) -> None:
    repository.named[tag(2)] = repository.named[tag(5)]
    done = prune(repository, keep=1)
    assert gone(done) == [tag(4)]


def test_what_a_kept_index_is_made_of_stays() -> None:
    one = Tags()
    shared, lone = one.put([], 1, part="shared"), one.put([], 1, part="lone")
    old = one.put([tag(1)], 1, OCI_INDEX, manifests=[{"digest": shared}, {"digest": lone}])
    one.put([tag(2)], 2, OCI_INDEX, manifests=[{"digest": shared}])
    one.attached = {old: [one.put([], 1, artifact="sbom")]}
    (removal,) = prune(one, keep=1, dry_run=False).removed
    assert removal.digest == old
    assert set(removal.parts) == {lone, *one.attached[old]}
    assert one.find(shared) is not None
    assert one.find(lone) is None


def test_signatures_go_with_their_image(repository: Tags) -> None:
    signed = repository.named[tag(4)]
    signature = repository.put([f"{signed.replace(':', '-')}.sig"], 4, signature="x")
    (four, _two) = prune(repository, keep=1, dry_run=False).removed
    assert four.parts == (signature,)
    assert repository.find(signature) is None


def test_a_tag_that_moves_onto_a_doomed_build_saves_it(repository: Tags) -> None:
    real, calls = repository.tags, [0]

    def tags() -> tuple[str, ...]:
        calls[0] += 1
        if calls[0] == 2:  # a rollback between prune's list and its first deletion
            repository.named[ROW] = repository.named[tag(4)]
        return real()

    repository.tags = tags  # type: ignore[method-assign]
    with pytest.raises(StepFailed, match=f"{ROW} moved to .* while we were at work"):
        prune(repository, keep=1, dry_run=False)
    assert repository.find(tag(4)) is not None


def test_the_pushed_note_is_for_one_image_and_one_place(tmp_path: Any) -> None:
    note = {"repository": "reg.example/a/b", "digest": "sha256:d", "image_id": "sha256:i"}
    (tmp_path / "pushed.json").write_text(json.dumps(note))
    here = cast(Registry, Tags())
    assert publish.last_pushed(here, tmp_path, "sha256:i") == "sha256:d"
    with pytest.raises(InputError, match=r"is not pushed to reg\.example/a/b yet"):
        publish.last_pushed(here, tmp_path, "sha256:other")
