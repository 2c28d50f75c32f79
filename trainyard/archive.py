"""An image of the engine as OCI blobs: compressed layers, the config as it is, and a manifest.

The config's bytes are the engine's own, so that its digest is the image id that was tested; each
layer is compared with the config while it is compressed.  Layers go through as a stream and are
kept in a cache (``out/<id>/oci``) by their diff id, so that doing it again compresses nothing.

https://github.com/opencontainers/image-spec/blob/v1.1.1/manifest.md
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Literal, Protocol

import zstandard

from trainyard.engine import Engine
from trainyard.hostenv import Say, silent
from trainyard.model import InputError, StepFailed
from trainyard.registry import OCI_INDEX, OCI_MANIFEST, Descriptor, canonical, sha256

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Compression = Literal["zstd", "gzip"]
COMPRESSIONS: tuple[Compression, ...] = ("zstd", "gzip")
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+"
#: Where an OCI image layout says which image is which.
REF_NAME = "org.opencontainers.image.ref.name"
TITLE = "org.opencontainers.image."
#: 3 of 22 is zstd's default; higher ones cost minutes on an image of 10 GB and save little of it.
ZSTD_LEVEL = 3
#: 6 is what gzip(1) and Docker take.
GZIP_LEVEL = 6
#: Of an image's size, what to expect of it compressed, for the check of the disk.  Measured: cpu-pt213
#: 0.25 with zstd, 0.29 with gzip; CUDA's libraries compress less well.
EXPECTED_RATIO = 0.6
PIECE = 2**20
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class Blob:
    """A file that is one blob of an image."""

    media_type: str
    digest: str
    size: int
    path: Path

    @property
    def descriptor(self) -> Descriptor:
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}

    def open(self) -> BinaryIO:
        return self.path.open("rb")


@dataclass(frozen=True)
class OciImage:
    """An image as it goes to a registry or into a layout."""

    manifest: bytes
    config: Blob
    layers: tuple[Blob, ...]

    @property
    def digest(self) -> str:
        return sha256(self.manifest)

    @property
    def image_id(self) -> str:
        """The engine's id of this image: the digest of its config."""
        return self.config.digest

    @property
    def size(self) -> int:
        """Bytes of all blobs, compressed."""
        return self.config.size + sum(layer.size for layer in self.layers)

    @property
    def descriptor(self) -> Descriptor:
        return {"mediaType": OCI_MANIFEST, "digest": self.digest, "size": len(self.manifest)}


def describe(
    manifest: Mapping[str, Any], labels: Mapping[str, str], extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The manifest's annotations: the image's own OCI labels, what was measured, and ``extra``.

    No time of day and nothing of this host goes in, so that the same image has the same manifest.
    https://github.com/opencontainers/image-spec/blob/v1.1.1/annotations.md
    """
    found = {key: value for key, value in labels.items() if key.startswith(TITLE) and value}
    base = manifest["base"]
    found |= {
        f"{TITLE}title": manifest["id"],
        f"{TITLE}created": manifest["built_at"],
        f"{TITLE}version": manifest["contents_id"],
        f"{TITLE}base.name": base["name"],
        f"{TITLE}base.digest": base["digest"],
    }
    return dict(sorted((found | dict(extra or {})).items()))


# -- packing -------------------------------------------------------------------------------


def pack(
    engine: Engine,
    image_id: str,
    cache: Path,
    notes: Mapping[str, str],
    compression: Compression = "zstd",
    say: Say = silent,
) -> OciImage:
    """The image as OCI blobs in ``cache``, of which only what is missing is made.

    Raises StepFailed where the disk is too small, or where the engine gives a config or a layer
    that is not the image's.
    """
    if compression not in COMPRESSIONS:
        raise InputError(f"compression {compression!r}: one of {', '.join(COMPRESSIONS)}")
    image = engine.image(image_id)
    if image is None or image.id is None:
        raise StepFailed(f"the engine does not have image {image_id}")
    diff_ids: list[str] = image.attrs["RootFS"]["Layers"]
    store = _Store(cache, compression)
    store.borrow(diff_ids)
    missing = store.missing(diff_ids, image.id)
    if missing:
        _need_disk(engine, image.id, cache, image.attrs["Size"])
        count = sum(1 for diff_id in missing if diff_id)
        say(f"reading the image; {count} of {len(diff_ids)} layers to compress with {compression}")
        _fill(store, engine.save(image.id, PIECE), set(missing), image.id, say)
    config = store.config(image.id)
    if config is None:
        raise StepFailed(
            f"{image.id}: the engine has no config with this digest, so it cannot be proven that what was "
            "tested is what goes up\nIts images are kept by containerd, where an id is a manifest's digest\n"
            'Use an engine with "containerd-snapshotter": false in its "features", or the private one'
        )
    return _assemble(store, config, diff_ids, notes)


def _assemble(store: _Store, config: Blob, diff_ids: Sequence[str], notes: Mapping[str, str]) -> OciImage:
    promised = json.loads(config.path.read_bytes())["rootfs"]["diff_ids"]
    if promised != list(diff_ids):
        raise StepFailed(f"{config.digest}: the engine's list of layers is not that of the image's config")
    found = [store.layer(diff_id) for diff_id in diff_ids]
    layers = tuple(layer for layer in found if layer)
    if len(layers) != len(diff_ids):
        lacking = [diff_id for diff_id, layer in zip(diff_ids, found, strict=True) if not layer]
        raise StepFailed(f"{config.digest}: the engine did not give layer {lacking[0]}")
    store.sweep(diff_ids, config)
    manifest: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": config.descriptor,
        "layers": [layer.descriptor for layer in layers],
        "annotations": dict(notes),
    }
    return OciImage(canonical(manifest), config, layers)


class _Store:
    """The cache: ``blobs/sha256/<hex>``, and ``layers/<diff id>.<compression>.json`` to find them."""

    def __init__(self, folder: Path, compression: Compression) -> None:
        self.folder = folder
        self.compression = compression
        self.blobs = folder / "blobs" / "sha256"

    def blob_path(self, digest: str) -> Path:
        return self.blobs / _hex(digest)

    def note_path(self, diff_id: str) -> Path:
        return self.folder / "layers" / f"{_hex(diff_id)}.{self.compression}.json"

    def layer(self, diff_id: str) -> Blob | None:
        try:
            note = json.loads(self.note_path(diff_id).read_text())
            found = Blob(note["mediaType"], note["digest"], note["size"], self.blob_path(note["digest"]))
            return found if found.path.stat().st_size == found.size else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def config(self, image_id: str) -> Blob | None:
        try:
            body = self.blob_path(image_id).read_bytes()
        except OSError:
            return None
        if sha256(body) != image_id:
            return None
        return Blob(CONFIG_TYPE, image_id, len(body), self.blob_path(image_id))

    def missing(self, diff_ids: Iterable[str], image_id: str) -> list[str]:
        """What has to come from the engine: layers by diff id; the config counts as ""."""
        wanted = [diff_id for diff_id in dict.fromkeys(diff_ids) if not self.layer(diff_id)]
        return wanted or ([] if self.config(image_id) else [""])

    def borrow(self, diff_ids: Iterable[str]) -> None:
        """Take what the caches of other images beside this one have compressed: links, no copies."""
        for diff_id in diff_ids:
            if self.layer(diff_id):
                continue
            for other in sorted(self.folder.parent.parent.glob(f"*/{self.folder.name}")):
                theirs = _Store(other, self.compression).layer(diff_id)
                if theirs and other != self.folder and self._link(theirs):
                    self.note(diff_id, theirs)
                    break

    def _link(self, theirs: Blob) -> bool:
        mine = self.blob_path(theirs.digest)
        mine.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(theirs.path, mine)
        except FileExistsError:
            return True
        except OSError:  # another disk, or it is gone by now: compressing it again is the answer
            return False
        return True

    def note(self, diff_id: str, blob: Blob) -> None:
        path = self.note_path(diff_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps(blob.descriptor))
        part.rename(path)

    def keep(self, part: Path, digest: str) -> Path:
        path = self.blob_path(digest)
        part.rename(path)
        return path

    def sweep(self, diff_ids: Sequence[str], config: Blob) -> None:
        """Forget what earlier builds of this image left, and half files of a killed run."""
        mine = {_hex(diff_id) for diff_id in diff_ids}
        kept = {_hex(config.digest)}
        for path in (self.folder / "layers").glob("*.json"):
            if path.name.split(".")[0] not in mine:
                path.unlink(missing_ok=True)
                continue
            with suppress(OSError, ValueError, KeyError):
                kept.add(_hex(json.loads(path.read_text())["digest"]))
        for path in self.blobs.iterdir():
            if path.name not in kept and not _is_anothers(path):
                path.unlink(missing_ok=True)


def _is_anothers(path: Path) -> bool:
    """Whether this is a half file of a process that is at work."""
    if not path.name.endswith(".part"):
        return False
    pid = path.name.split(".")[-2]
    return pid != str(os.getpid()) and Path("/proc", pid).exists()


def _hex(digest: str) -> str:
    found = _DIGEST.fullmatch(digest)
    if not found:
        raise StepFailed(f"{digest!r} is not a sha256 digest")
    return found[1]


def _need_disk(engine: Engine, image_id: str, cache: Path, size: int) -> None:
    """Refuse at once where the disk cannot hold what packing writes.

    The engine writes the whole image to its own folder before it sends the first byte:
    https://github.com/moby/moby/blob/v26.1.5/image/tarexport/save.go
    """
    cache.mkdir(parents=True, exist_ok=True)
    here = int(size * EXPECTED_RATIO)
    free = shutil.disk_usage(cache).free
    engines = engine.free_bytes()
    root = engine.data_root()
    same = engines is not None and os.stat(root).st_dev == os.stat(cache).st_dev
    need = here + (size if same else 0)
    if free < need:
        raise StepFailed(
            f"packing {image_id[:19]} takes about {need / 1e9:.1f} GB in {cache}"
            f"{' and the engine, which share a disk' if same else ''}; {free / 1e9:.1f} GB are free\n"
            "Free some: docker image prune, docker builder prune, or out/*/oci of published images"
        )
    if engines is not None and not same and engines < size:
        raise StepFailed(
            f"the engine writes {image_id[:19]} to {root} before it gives it away, {size / 1e9:.1f} GB; "
            f"{engines / 1e9:.1f} GB are free there\nFree some: docker image prune, docker builder prune"
        )


def _fill(store: _Store, saved: Iterator[bytes], wanted: set[str], image_id: str, say: Say) -> None:
    """Read the engine's archive until everything that is wanted has come by.

    Files are told by the digest of what is in them, never by their names, which differ between
    the archives of Docker before 25 (``<id>/layer.tar``) and after (``blobs/sha256/<hex>``).
    """
    store.blobs.mkdir(parents=True, exist_ok=True)
    wanted.discard("")
    need_config = store.config(image_id) is None
    stream = io.BufferedReader(_Reader(saved), PIECE)
    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=PIECE) as tar:
            for member in tar:
                if not (wanted or need_config):
                    break
                if not member.isreg():
                    continue
                source = tar.extractfile(member)
                assert source is not None
                named = f"sha256:{Path(member.name).name}"
                if member.name.endswith(".tar") or named in wanted:
                    _take_layer(store, source, wanted, say)
                elif need_config and member.size < 2**24:
                    need_config = not _take_config(store, source.read(), image_id)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise StepFailed(
                f"{store.folder}: the disk is full; what is compressed so far stays\n"
                "Free some: docker image prune, docker builder prune, or out/*/oci of published images"
            ) from error
        raise
    except tarfile.TarError as error:
        raise StepFailed(f"the engine's archive of {image_id[:19]} broke off; run again") from error


def _take_config(store: _Store, body: bytes, image_id: str) -> bool:
    if sha256(body) != image_id:
        return False
    part = store.blobs / f"{_hex(image_id)}.{os.getpid()}.part"
    part.write_bytes(body)
    store.keep(part, image_id)
    return True


def _take_layer(store: _Store, source: IO[bytes], wanted: set[str], say: Say) -> None:
    part = store.blobs / f"layer.{os.getpid()}.part"
    try:
        with part.open("wb") as target:
            diff_id, digest, size = compress(source, target, store.compression)
        if diff_id not in wanted:
            return
        path = store.keep(part, digest)
    finally:
        part.unlink(missing_ok=True)
    store.note(diff_id, Blob(LAYER_TYPE + store.compression, digest, size, path))
    wanted.remove(diff_id)
    say(f"compressed {diff_id[:19]}: {size / 1e6:.0f} MB")


class _Compressor(Protocol):
    def compress(self, data: bytes, /) -> bytes: ...
    def flush(self) -> bytes: ...


def compress(source: IO[bytes], target: IO[bytes], compression: Compression) -> tuple[str, str, int]:
    """Compress a stream; return the digests of what went in and what came out, and its size.

    The same bytes give the same bytes: gzip's header gets no time, and zstd's result does not
    depend on how many threads it has (while none at all gives another, so never 0).
    """
    compressor: _Compressor
    if compression == "zstd":
        threads = max(1, os.cpu_count() or 1)
        compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, threads=threads).compressobj()
    else:
        # 31: a gzip header, in which zlib writes no name and no time
        compressor = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, 31)
    inside, outside, size = hashlib.sha256(), hashlib.sha256(), 0

    def put(data: bytes) -> None:
        nonlocal size
        outside.update(data)
        size += len(data)
        target.write(data)

    while data := source.read(PIECE):
        inside.update(data)
        put(compressor.compress(data))
    put(compressor.flush())
    return f"sha256:{inside.hexdigest()}", f"sha256:{outside.hexdigest()}", size


class _Reader(io.RawIOBase):
    """A stream of chunks as a file that tarfile can read."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        target = memoryview(buffer)
        count = min(len(target), len(self._rest))
        target[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


# -- layouts: a folder instead of a registry -----------------------------------------------


def export_layout(images: Mapping[str, OciImage], folder: Path, say: Say = silent) -> Path:
    """Write images, by name, as an OCI image layout; what is in the folder already stays.

    Every blob is read and compared with its digest on the way.  The folder also holds a
    ``manifest.json``, so that ``tar -C DIR -c . | docker load`` works without Trainyard.
    https://github.com/opencontainers/image-spec/blob/v1.1.1/image-layout.md
    """
    store = folder / "blobs" / "sha256"
    store.mkdir(parents=True, exist_ok=True)
    index = _index(folder) if (folder / "index.json").exists() else {"manifests": []}
    entries = [
        entry for entry in index["manifests"] if (entry.get("annotations") or {}).get(REF_NAME) not in images
    ]
    for name, image in images.items():
        for blob in (image.config, *image.layers):
            if (store / _hex(blob.digest)).exists():
                continue
            say(f"{name}: {blob.digest[:19]}: {blob.size / 1e6:.0f} MB")
            _copy(blob, store)
        write(store / _hex(image.digest), image.manifest)
        entries.append(image.descriptor | {"annotations": {REF_NAME: name}})
    write(folder / "oci-layout", canonical({"imageLayoutVersion": "1.0.0"}))
    fresh = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": entries}
    write(folder / "index.json", canonical(fresh))
    write(folder / "manifest.json", json.dumps(_load_list(read_layout(folder))).encode())
    return folder


def _load_list(images: Mapping[str, OciImage]) -> list[dict[str, Any]]:
    """What ``docker load`` looks for: which config and which layers, base first."""
    return [
        {
            "Config": f"blobs/sha256/{_hex(image.config.digest)}",
            "RepoTags": [f"trainyard:{name}"],
            "Layers": [f"blobs/sha256/{_hex(layer.digest)}" for layer in image.layers],
        }
        for name, image in images.items()
    ]


def read_layout(folder: Path) -> dict[str, OciImage]:
    """The images of a layout, by name.  Raises InputError where it is none or lacks something."""
    found = {}
    for entry in _index(folder)["manifests"]:
        name = (entry.get("annotations") or {}).get(REF_NAME)
        if entry.get("mediaType") != OCI_MANIFEST or not name:
            continue
        body = _blob_path(folder, entry).read_bytes()
        if sha256(body) != entry["digest"]:
            raise InputError(f"{folder}: the manifest of {name} is damaged: it is not {entry['digest']}")
        manifest = json.loads(body)
        found[str(name)] = OciImage(
            body,
            _blob(folder, manifest["config"]),
            tuple(_blob(folder, layer) for layer in manifest["layers"]),
        )
    if not found:
        raise InputError(f"{folder}: this layout holds no image with a name")
    return found


def _index(folder: Path) -> dict[str, Any]:
    try:
        json.loads((folder / "oci-layout").read_text())["imageLayoutVersion"]
        found = json.loads((folder / "index.json").read_text())
        found["manifests"] = list(found["manifests"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder}: not an OCI image layout: it needs oci-layout and index.json") from error
    return dict(found)


def _blob_path(folder: Path, descriptor: Mapping[str, Any]) -> Path:
    path = folder / "blobs" / "sha256" / _hex(str(descriptor.get("digest")))
    if not path.is_file() or path.stat().st_size != descriptor.get("size"):
        raise InputError(
            f"{folder}: {descriptor.get('digest')} is missing or not whole; copy the folder again"
        )
    return path


def _blob(folder: Path, descriptor: Mapping[str, Any]) -> Blob:
    path = _blob_path(folder, descriptor)
    return Blob(str(descriptor["mediaType"]), str(descriptor["digest"]), int(descriptor["size"]), path)


def import_layout(folder: Path, engine: Engine, say: Say = silent) -> dict[str, str]:
    """Load a layout's images into the engine as ``trainyard:<name>``; return their ids by name.

    Raises InputError where a blob is damaged, StepFailed where the engine has another image after it.
    """
    images = read_layout(folder)
    for blob in {blob.digest: blob for one in images.values() for blob in (one.config, *one.layers)}.values():
        _prove(blob)
    for name, image in images.items():
        say(f"{name}: loading {image.size / 1e6:.0f} MB")
        # Without a name first: the name moves only once the image is known to be the right one.
        engine.load(name, _load_stream(image))
        if engine.image(image.image_id) is None:
            raise StepFailed(
                f"{name}: the engine loaded something that is not {image.image_id}; {name} stays as it was"
            )
        engine.tag(image.image_id, "trainyard", name)
    return {name: image.image_id for name, image in images.items()}


def _load_stream(image: OciImage) -> Iterator[bytes]:
    """One image as the tar archive that ``docker load`` takes."""
    listed = _load_list({"": image})
    listed[0]["RepoTags"] = None
    yield from _member("manifest.json", len(body := json.dumps(listed).encode()), lambda: iter((body,)))
    for blob in {blob.digest: blob for blob in (image.config, *image.layers)}.values():
        yield from _member(f"blobs/sha256/{_hex(blob.digest)}", blob.size, lambda b=blob: _pieces(b))  # type: ignore[misc]
    yield b"\0" * tarfile.BLOCKSIZE * 2


def _member(name: str, size: int, content: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
    info = tarfile.TarInfo(name)
    info.size = size
    yield info.tobuf(tarfile.GNU_FORMAT)
    yield from content()
    yield b"\0" * (-size % tarfile.BLOCKSIZE)


def _pieces(blob: Blob) -> Iterator[bytes]:
    with blob.open() as stream:
        while data := stream.read(PIECE):
            yield data


def _prove(blob: Blob) -> None:
    with blob.path.open("rb") as stream:
        got = f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"
    if got != blob.digest:
        raise InputError(f"{blob.path}: damaged: its digest is {got}; copy it again")


def _copy(blob: Blob, store: Path) -> None:
    """Copy a blob, and put it in place only when it is what its digest says."""
    part = store / f"{_hex(blob.digest)}.{os.getpid()}.part"
    try:
        got = hashlib.sha256()
        with part.open("wb") as target:
            for data in _pieces(blob):
                got.update(data)
                target.write(data)
        if f"sha256:{got.hexdigest()}" != blob.digest:
            raise StepFailed(
                f"{blob.path}: damaged: its digest is sha256:{got.hexdigest()}; remove {store.parent}"
            )
        part.rename(store / _hex(blob.digest))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise StepFailed(f"{store}: the disk is full; free some and run again") from error
        raise
    finally:
        part.unlink(missing_ok=True)


def write(path: Path, body: bytes) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(body)
    part.rename(path)
