"""What is published is what was tested, under tags that say so."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import servers
import small
import zstandard
from servers import Opener, Proxy, Server
from small import Maker

from trainyard import archive, publish
from trainyard.engine import Engine
from trainyard.model import InputError, Row, StepFailed
from trainyard.registry import OCI_MANIFEST, Registry, canonical, sha256

AUTH = {"username": servers.USER, "password": servers.PASSWORD}


def publish_one(
    registry: Registry, docker: Engine, one: small.Small, **options: Any
) -> tuple[publish.Pushed, publish.Promoted]:
    pushed = publish.push(registry, docker, one.check(docker))
    return pushed, publish.promote(registry, one.row.id, pushed.digest, **options)


def test_push_sets_no_tag_and_proves_what_went_up(registry: Registry, docker: Engine, image: Maker) -> None:
    one = image()
    pushed = publish.push(registry, docker, one.check(docker))
    assert registry.tags() == ()
    fetched = registry.manifest(pushed.digest)
    assert fetched.json["config"]["digest"] == one.image_id == pushed.image_id
    assert sha256(registry.blob(one.image_id)) == one.image_id
    assert fetched.json["annotations"]["org.opencontainers.image.created"] == "2026-03-01T02:30:00+00:00"
    assert publish.last_pushed(registry, one.folder, one.image_id) == pushed.digest


def test_a_second_push_compresses_and_sends_nothing(
    opened: Opener, proxy: Proxy, docker: Engine, image: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, one = opened(proxy), image()
    first = publish.push(registry, docker, one.check(docker))
    assert first.sent == first.size > 4 * small.MB
    proxy.forget()
    monkeypatch.setattr(docker, "save", lambda *_: pytest.fail("read the image again"))
    second = publish.push(registry, docker, one.check(docker))
    assert (second.sent, second.digest, second.blobs_there) == (0, first.digest, 3)
    assert proxy.count("POST") == proxy.count("PATCH") == 0


def test_tags_are_set_on_the_digest_and_a_second_time_is_nothing(
    opened: Opener, proxy: Proxy, docker: Engine, image: Maker, row: Row
) -> None:
    registry, one = opened(proxy), image(day=4)
    pushed, promoted = publish_one(registry, docker, one, default=True)
    assert promoted.immutable == f"{row.id}-20260305-{one.contents_id}"
    assert sorted(registry.tags()) == sorted([row.id, "latest", promoted.immutable])
    assert {registry.digest(tag) for tag in registry.tags()} == {pushed.digest}
    assert all(moved.changed for moved in promoted.tags)
    proxy.forget()
    again = publish.promote(registry, row.id, pushed.digest, default=True)
    assert not any(moved.changed for moved in again.tags)
    assert proxy.count("PUT") == 0


@pytest.mark.parametrize("compression", archive.COMPRESSIONS)
def test_the_engine_pulls_the_tested_image_by_tag_and_by_digest(
    compression: archive.Compression, registry: Registry, docker: Engine, image: Maker, row: Row
) -> None:
    one = image()
    pushed = publish.push(registry, docker, one.check(docker), compression)
    types = {layer["mediaType"] for layer in registry.manifest(pushed.digest).json["layers"]}
    assert types == {f"application/vnd.oci.image.layer.v1.tar+{compression}"}
    publish.promote(registry, row.id, pushed.digest)
    # 127.0.0.0/8 is insecure for every Docker daemon: it takes any certificate there.
    for name in (f"{registry.name}:{row.id}", f"{registry.name}@{pushed.digest}"):
        docker.client.images.remove(one.image_id, force=True)
        assert docker.image(one.image_id) is None
        docker.client.api.pull(name, auth_config=AUTH)
        pulled = docker.image(name)
        assert pulled is not None
        assert pulled.id == one.image_id
    docker.client.images.remove(one.image_id, force=True)


def test_the_real_image_goes_up_and_down_as_tested(
    published_id: str,
    pytestconfig: pytest.Config,
    server: Server,
    registry: Registry,
    docker: Engine,
    rows: dict[str, Row],
    tmp_path: Path,
    record_testsuite_property: Callable[[str, object], None],
) -> None:
    row = rows[published_id]
    out = tmp_path / "out" / row.id
    out.mkdir(parents=True)
    for name in ("manifest.json", "tests.xml"):
        shutil.copy2(pytestconfig.getoption("--publish-out") / row.id / name, out)
    tested = publish.check(row, out, docker)
    for compression in archive.COMPRESSIONS:
        began = time.monotonic()
        pushed = publish.push(registry, docker, tested, compression)
        record_testsuite_property(
            f"{compression}: seconds of the first push", round(time.monotonic() - began, 1)
        )
        record_testsuite_property(f"{compression}: bytes", pushed.size)
        began = time.monotonic()
        again = publish.push(registry, docker, tested, compression)
        record_testsuite_property(
            f"{compression}: seconds of the second push", round(time.monotonic() - began, 1)
        )
        assert (again.digest, again.sent) == (pushed.digest, 0)
        assert registry.manifest(pushed.digest).json["config"]["digest"] == tested.image_id
        prove_layers(server, registry, pushed.digest, tested.image_id)
        promoted = publish.promote(registry, row.id, pushed.digest, image_id=tested.image_id)
        for name in (f"{registry.name}:{row.id}", pushed.reference):
            docker.client.api.pull(name, auth_config=AUTH)
            pulled = docker.image(name)
            assert pulled is not None
            assert pulled.id == tested.image_id
            docker.untag(name)
        # The next compression is another manifest of the same image, on the same day.
        registry.delete_manifest(promoted.digest)


def prove_layers(server: Server, registry: Registry, digest: str, image_id: str) -> None:
    """Unpack every layer as the registry keeps it, and compare it with the config's diff ids.

    The engine has these layers already, so that its pull alone would prove little.
    """
    diff_ids = json.loads(registry.blob(image_id))["rootfs"]["diff_ids"]
    layers = registry.manifest(digest).json["layers"]
    for layer, diff_id in zip(layers, diff_ids, strict=True):
        packed = server.blob_file(layer["digest"])
        with packed.open("rb") as stream:
            opened = (
                zstandard.ZstdDecompressor().stream_reader(stream)
                if layer["mediaType"].endswith("zstd")
                else gzip.GzipFile(fileobj=stream)
            )
            got = hashlib.sha256()
            while data := opened.read(2**20):
                got.update(data)
        assert f"sha256:{got.hexdigest()}" == diff_id


# -- what may not go up ----------------------------------------------------------------------


def test_an_untested_or_failed_image_is_refused(docker: Engine, image: Maker) -> None:
    one = image()
    built = small.DAY_ONE
    report = one.folder / "tests.xml"
    for wrong, expected in (
        ({"failures": 1}, "did not pass: 1 failures"),
        ({"errors": 2}, "did not pass: 2 errors"),
        ({"skipped": 3}, "did not pass: 3 skipped"),
        ({"tests": 0}, "holds no test"),
        ({"properties": '<property name="dev.trainyard.image-id" value="sha256:ab"/>'}, "is about image ab"),
        (
            {"properties": '<property name="dev.trainyard.selection" value="-k x"/>'},
            "part of the suite: -k x",
        ),
    ):
        small.write_report(one.folder, built, **wrong)
        with pytest.raises(StepFailed, match=expected):
            one.check(docker)
    small.write_report(one.folder, built.replace(year=2025))
    with pytest.raises(StepFailed, match="is older than the image"):
        one.check(docker)
    report.write_text("<testsuites>")
    with pytest.raises(StepFailed, match="cannot be read"):
        one.check(docker)
    report.unlink()
    with pytest.raises(StepFailed, match="so it is not tested"):
        one.check(docker)


def test_another_image_than_the_measured_one_is_refused(docker: Engine, image: Maker, row: Row) -> None:
    one, other = image(), image()
    with pytest.raises(StepFailed, match="but what was measured is"):
        publish.check(row, one.folder, docker, other.reference)
    small.write_manifest(row, one.folder, one.image_id, "f" * 16, small.DAY_ONE)
    with pytest.raises(StepFailed, match="disagree on what it is"):
        one.check(docker)
    (one.folder / "manifest.json").unlink()
    with pytest.raises(StepFailed, match="nothing is built"):
        one.check(docker)


def test_an_image_that_fails_its_gate_is_refused(docker: Engine, image: Maker) -> None:
    one = image()
    found = json.loads((one.folder / "manifest.json").read_text())
    found["measured"]["compilers"] = ["gcc"]
    (one.folder / "manifest.json").write_text(json.dumps(found))
    with pytest.raises(StepFailed, match="compilers in a runtime image"):
        one.check(docker)


# -- tags that are refused -------------------------------------------------------------------


def test_an_immutable_tag_is_never_overwritten(
    registry: Registry, docker: Engine, image: Maker, row: Row, floating: str
) -> None:
    one = image(day=1)
    pushed = publish.push(registry, docker, one.check(docker))
    taken = f"{row.id}-20260302-{one.contents_id}"
    old = registry.manifest(floating)
    registry.put_manifest(taken, old.body, old.media_type)
    with pytest.raises(StepFailed, match=f"never overwritten, and is already {floating}"):
        publish.promote(registry, row.id, pushed.digest, default=True)
    assert registry.digest(taken) == registry.digest(row.id) == registry.digest("latest") == floating


def test_an_older_build_does_not_replace_a_newer_one(
    registry: Registry, docker: Engine, image: Maker, row: Row, floating: str
) -> None:
    pushed = publish.push(registry, docker, image(day=-1).check(docker))
    with pytest.raises(StepFailed, match="holds a newer build"):
        publish.promote(registry, row.id, pushed.digest)
    assert registry.digest(row.id) == floating


def test_a_missing_platform_is_refused(
    registry: Registry, docker: Engine, image: Maker, row: Row, floating: str
) -> None:
    pushed = publish.push(registry, docker, image(day=1).check(docker))
    both = ("linux/amd64", "linux/arm64")
    with pytest.raises(StepFailed, match=r"is not for linux/arm64; it is for linux/amd64"):
        publish.promote(registry, row.id, pushed.digest, platforms=both)
    assert registry.digest(row.id) == floating
    index = publish.combine(registry, [pushed.digest, other_platform(registry, pushed.digest)])
    publish.promote(registry, row.id, index, platforms=both)
    assert registry.digest(row.id) == index


def other_platform(registry: Registry, digest: str) -> str:
    """The same image, said to be for arm64."""
    found = registry.manifest(digest).json
    config = json.loads(registry.blob(found["config"]["digest"]))
    body = canonical(config | {"architecture": "arm64"})
    found["config"] |= {"digest": registry.put_bytes(body), "size": len(body)}
    manifest = canonical(found)
    return registry.put_manifest(sha256(manifest), manifest, OCI_MANIFEST)


def test_another_rows_image_is_refused(
    registry: Registry, docker: Engine, image: Maker, floating: str
) -> None:
    with pytest.raises(StepFailed, match="is an image of cpu-pt213, not of cu121-pt29"):
        publish.promote(registry, "cu121-pt29", floating)
    assert registry.digest("cu121-pt29") is None


def test_another_image_than_the_tested_one_is_not_promoted(
    registry: Registry, docker: Engine, image: Maker, row: Row, floating: str
) -> None:
    one, other = image(day=1), image(day=1)
    pushed = publish.push(registry, docker, one.check(docker))
    with pytest.raises(StepFailed, match="tested is"):
        publish.promote(registry, row.id, pushed.digest, image_id=other.image_id)
    assert registry.digest(row.id) == floating


# -- rollback and prune ----------------------------------------------------------------------


@pytest.fixture
def three(registry: Registry, docker: Engine, image: Maker) -> list[tuple[publish.Pushed, str]]:
    """Three nights of one row, oldest first, each with an SBOM attached; ``latest`` goes along."""
    nights = []
    for day in (0, 1, 2):
        pushed, promoted = publish_one(registry, docker, image(day=day, sizes=(1000,)), default=True)
        registry.attach(
            registry.manifest(pushed.digest).descriptor,
            "application/vnd.cyclonedx+json",
            [("application/vnd.cyclonedx+json", f'{{"night": {day}}}'.encode(), {})],
        )
        nights.append((pushed, promoted.immutable))
    return nights


def test_rollback_goes_back_one_build_at_a_time(
    registry: Registry, three: list[tuple[publish.Pushed, str]], row: Row
) -> None:
    digests = [pushed.digest for pushed, _ in three]
    for expected in (1, 0):
        done = publish.rollback(registry, row.id)
        assert done.immutable == three[expected][1]
        assert registry.digest(row.id) == registry.digest("latest") == digests[expected]
        left = registry.manifest(digests[expected + 1])
        assert registry.digest(f"{row.id}-rolled-back") == left.digest
        image_id, contents = left.json["config"]["digest"], left.json["annotations"][publish.VERSION]
        assert publish.is_rolled_back(registry, row.id, contents, image_id)
    with pytest.raises(InputError, match="nothing is older"):
        publish.rollback(registry, row.id)
    publish.rollback(registry, row.id, to=three[2][1])  # forward: nothing was taken back
    assert registry.digest(row.id) == digests[2]
    newest = registry.manifest(digests[2]).json
    assert not publish.is_rolled_back(
        registry, row.id, newest["annotations"][publish.VERSION], newest["config"]["digest"]
    )
    with pytest.raises(InputError, match="is not an immutable tag"):
        publish.rollback(registry, row.id, to="latest")


def test_rollback_leaves_the_latest_of_another_image(
    registry: Registry, three: list[tuple[publish.Pushed, str]], row: Row
) -> None:
    oldest = registry.manifest(three[0][0].digest)
    registry.put_manifest("latest", oldest.body, oldest.media_type)
    publish.rollback(registry, row.id)
    assert registry.digest(row.id) == three[1][0].digest
    assert registry.digest("latest") == oldest.digest


def test_prune_first_only_says_what_would_go(
    registry: Registry, three: list[tuple[publish.Pushed, str]], row: Row
) -> None:
    before = registry.tags()
    done = publish.prune(registry, [row.id], keep=1)
    assert done.dry_run
    assert [one.tags for one in done.removed] == [(three[1][1],), (three[0][1],)]
    assert [len(one.parts) for one in done.removed] == [2, 2]  # the SBOM, and the list of referrers
    assert registry.tags() == before


def test_prune_never_takes_what_a_floating_tag_points_to(
    registry: Registry, three: list[tuple[publish.Pushed, str]], row: Row
) -> None:
    publish.rollback(registry, row.id, to=three[0][1])
    done = publish.prune(registry, [row.id], keep=1, dry_run=False)
    assert [one.tags for one in done.removed] == [(three[1][1],)]
    assert dict(done.kept) == {
        three[2][1]: f"{row.id}-rolled-back points to it",
        three[0][1]: f"{row.id} points to it",
    }
    gone, kept = three[1][0].digest, (three[0][0].digest, three[2][0].digest)
    assert registry.find(gone) is None
    assert registry.referrers(gone) == []
    for digest in kept:
        assert registry.manifest(digest).digest == digest
        (sbom,) = registry.referrers(digest)
        assert registry.manifest(sbom["digest"]).json["artifactType"] == "application/vnd.cyclonedx+json"
    assert three[1][1] not in registry.tags()
    assert registry.digest(row.id) == registry.digest("latest") == three[0][0].digest


def test_prune_keeps_what_is_held_and_other_rows(
    registry: Registry, three: list[tuple[publish.Pushed, str]], row: Row
) -> None:
    first = registry.manifest(three[0][0].digest)
    registry.put_manifest("customer-42", first.body, first.media_type)
    done = publish.prune(registry, [row.id], keep=1, hold=["*-20260302-*"], dry_run=False)
    assert done.removed == ()
    assert [reason for _, reason in done.kept] == [
        f"{row.id} points to it",
        "held by *-20260302-*",
        "customer-42 points to it",
    ]
    assert publish.prune(registry, ["cpu-pt21"], keep=1, dry_run=False).removed == ()


def test_a_registry_without_deletion_says_so(
    program: Path, server: Server, registry: Registry, three: list[tuple[publish.Pushed, str]], row: Row
) -> None:
    server.kill()
    server.deletes = False
    server.start()
    with pytest.raises(StepFailed, match="does not allow deletion"):
        publish.prune(registry, [row.id], keep=1, dry_run=False)
    assert registry.digest(three[1][1]) == three[1][0].digest


# -- layouts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", archive.COMPRESSIONS)
def test_an_image_travels_by_folder_into_another_engine_and_registry(
    compression: archive.Compression, registry: Registry, docker: Engine, image: Maker, tmp_path: Path
) -> None:
    one = image()
    tested = one.check(docker)
    notes = archive.describe(tested.manifest, {})
    packed = archive.pack(docker, one.image_id, one.folder / "oci", notes, compression)
    folder = archive.export_layout({"registry-tests": packed}, tmp_path / "usb")
    docker.client.images.remove(one.image_id, force=True)
    assert docker.image(one.image_id) is None
    try:
        assert archive.import_layout(folder, docker) == {"registry-tests": one.image_id}
        loaded = docker.image("trainyard:registry-tests")
        assert loaded is not None
        assert loaded.id == one.image_id
    finally:
        docker.untag("trainyard:registry-tests")
        docker.discard(one.image_id)
    (again,) = archive.read_layout(folder).values()
    assert publish.upload(registry, again, one.image_id).digest == packed.digest


def test_a_damaged_folder_is_refused(docker: Engine, image: Maker, tmp_path: Path) -> None:
    one = image()
    packed = archive.pack(docker, one.image_id, one.folder / "oci", {})
    folder = archive.export_layout({"registry-tests": packed}, tmp_path / "usb")
    blob = folder / "blobs" / "sha256" / packed.layers[1].digest.removeprefix("sha256:")
    with blob.open("r+b") as stream:
        stream.seek(100)
        stream.write(b"flipped")
    with pytest.raises(InputError, match="damaged"):
        archive.import_layout(folder, docker)
    blob.unlink()
    with pytest.raises(InputError, match="is missing"):
        archive.import_layout(folder, docker)
    with pytest.raises(InputError, match="not an OCI image layout"):
        archive.import_layout(tmp_path, docker)
    assert docker.image("trainyard:registry-tests") is None
