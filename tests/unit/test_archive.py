"""Compression gives the same bytes for the same bytes; layouts refuse what is damaged."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from trainyard import archive
from trainyard.model import StepFailed
from trainyard.registry import sha256

DATA = random.Random(1).randbytes(3_000_000) + bytes(5_000_000)


@pytest.mark.parametrize("compression", archive.COMPRESSIONS)
def test_the_same_bytes_give_the_same_blob(
    compression: archive.Compression, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for cpus in (1, 2, 7):
        monkeypatch.setattr(os, "cpu_count", lambda cpus=cpus: cpus)
        target = io.BytesIO()
        diff_id, digest, size = archive.compress(io.BytesIO(DATA), target, compression)
        assert (digest, size) == (sha256(target.getvalue()), len(target.getvalue()))
        assert diff_id == sha256(DATA)
        found.append(target.getvalue())
    assert found[0] == found[1] == found[2]
    if compression == "gzip":
        assert found[0][4:8] == bytes(4)  # no time in the header
        assert gzip.decompress(found[0]) == DATA
    else:
        assert zstandard.ZstdDecompressor().stream_reader(io.BytesIO(found[0])).read() == DATA


def tar(members: dict[str, bytes]) -> Iterator[bytes]:
    """An archive in pieces of an odd size."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as made:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            made.addfile(info, io.BytesIO(data))
    whole = target.getvalue()
    yield from (whole[start : start + 777] for start in range(0, len(whole), 777))


def name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


CONFIG = b'{"rootfs": {}}'
LAYERS = (b"base" * 300, b"top" * 500)
#: The archives of Docker since 25 and before.
SHAPES = {
    "blobs": {f"blobs/sha256/{name(data)}": data for data in (LAYERS[1], CONFIG, LAYERS[0])},
    "folders": {
        "1/layer.tar": LAYERS[0],
        "1/json": b"{}",
        f"{name(CONFIG)}.json": CONFIG,
        "2/layer.tar": LAYERS[1],
    },
}


@pytest.mark.parametrize("shape", SHAPES)
def test_layers_are_told_by_what_is_in_them(shape: str, tmp_path: Path) -> None:
    store = archive._Store(tmp_path / "out" / "x" / "oci", "zstd")
    wanted = {sha256(data) for data in LAYERS}
    archive._fill(store, tar(SHAPES[shape]), set(wanted), sha256(CONFIG), lambda _text: None)
    assert store.missing(wanted, sha256(CONFIG)) == []
    for data in LAYERS:
        layer = store.layer(sha256(data))
        assert layer is not None
        assert layer.media_type == "application/vnd.oci.image.layer.v1.tar+zstd"
        with layer.open() as stream:
            assert zstandard.ZstdDecompressor().stream_reader(stream).read() == data
    other = archive._Store(tmp_path / "out" / "y" / "oci", "zstd")
    other.borrow(wanted)
    assert [one for one in wanted if not other.layer(one)] == []
    assert archive._Store(tmp_path / "out" / "x" / "oci", "gzip").missing(wanted, sha256(CONFIG))


def test_an_archive_that_breaks_off_leaves_no_half_layer(tmp_path: Path) -> None:
    def broken() -> Iterator[bytes]:
        pieces = list(tar(SHAPES["blobs"]))
        yield from pieces[:2]

    store = archive._Store(tmp_path / "x" / "oci", "gzip")
    wanted = {sha256(data) for data in LAYERS}
    with pytest.raises(StepFailed, match="broke off; run again"):
        archive._fill(store, broken(), set(wanted), sha256(CONFIG), lambda _text: None)
    assert not list(tmp_path.rglob("*.part"))


def test_a_blob_that_is_cut_short_is_made_again(tmp_path: Path) -> None:
    store = archive._Store(tmp_path / "x" / "oci", "gzip")
    wanted = {sha256(data) for data in LAYERS}
    archive._fill(store, tar(SHAPES["blobs"]), set(wanted), sha256(CONFIG), lambda _text: None)
    layer = store.layer(sha256(LAYERS[0]))
    assert layer is not None
    layer.path.write_bytes(layer.path.read_bytes()[:-1])
    assert store.missing(wanted, sha256(CONFIG)) == [sha256(LAYERS[0])]


def test_annotations_tell_what_was_built_and_no_more() -> None:
    manifest = {
        "id": "cpu-pt213",
        "built_at": "2026-11-30T21:19:38+00:00",
        "contents_id": "5ca5906e4c99d6ed",
        "base": {"name": "debian:bookworm-slim", "digest": "sha256:ab"},
    }
    labels = {
        "org.opencontainers.image.revision": "abc",
        "dev.trainyard.id": "x",
        "org.opencontainers.image.url": "",
    }
    assert archive.describe(manifest, labels, {"org.opencontainers.image.source": "https://s"}) == {
        "org.opencontainers.image.base.digest": "sha256:ab",
        "org.opencontainers.image.base.name": "debian:bookworm-slim",
        "org.opencontainers.image.created": "2026-11-30T21:19:38+00:00",
        "org.opencontainers.image.revision": "abc",
        "org.opencontainers.image.source": "https://s",
        "org.opencontainers.image.title": "cpu-pt213",
        "org.opencontainers.image.version": "5ca5906e4c99d6ed",
    }
