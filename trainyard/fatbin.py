"""Which GPU architectures a CUDA shared library was compiled for.

``cuobjdump --list-elf --list-ptx`` tells the same, but it belongs to the CUDA toolkit, which
neither a runtime image nor a test host has.  nvcc puts device code into the ELF section
``.nv_fatbin`` (``__nv_relfatbin`` for relocatable code) as a chain of containers::

    container  u32 magic 0xBA55ED50 | u16 version | u16 header size | u64 size of the entries
    entry      u16 kind (1 PTX, 2 ELF) | u16 attributes | u32 header size | u64 payload size
               u32 compressed size | u32 unknown | u16 minor | u16 major | u32 architecture | ...

The layout is not published by NVIDIA.  It is the one that ``fatbinary`` of CUDA 11 to 13
writes, and anything else raises :class:`FatbinError` rather than being read wrongly.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

MAGIC = 0xBA55ED50
KINDS = {1: "ptx", 2: "elf"}
SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHI")


class FatbinError(ValueError):
    """The file is not an ELF library, or its device code has an unknown layout."""


def archs(path: str | Path) -> dict[str, set[int]]:
    """The architectures in a library: ``{"elf": {80, 86, 90}, "ptx": {90}}``.

    ``elf`` is machine code for exactly these GPUs (86 is ``sm_86``), ``ptx`` can still be
    compiled for newer ones.  Both are empty for a library without device code.
    """
    found: dict[str, set[int]] = {"elf": set(), "ptx": set()}
    for section in sections(Path(path), *SECTIONS):
        for kind, arch in entries(section):
            found[kind].add(arch)
    return found


def entries(section: bytes) -> Iterator[tuple[str, int]]:
    """``("elf", 80), ("ptx", 90), ...`` of one ``.nv_fatbin`` section, in file order."""
    at = 0
    while at + _CONTAINER.size <= len(section):
        magic, version, header, size = _CONTAINER.unpack_from(section, at)
        if magic == 0:  # padding between containers
            at += 8
            continue
        if magic != MAGIC or version != 1 or header < _CONTAINER.size:
            raise FatbinError(f"no fat binary container at offset {at}: {magic:#x} v{version}")
        end = at + header + size
        if end > len(section):
            raise FatbinError(f"the container at offset {at} ends beyond its section")
        yield from _container(section, at + header, end)
        at = -(-end // 8) * 8


def _container(section: bytes, at: int, end: int) -> Iterator[tuple[str, int]]:
    while at < end:
        if at + _ENTRY.size > end:
            raise FatbinError(f"a cut off entry at offset {at}")
        kind, _, header, payload, _, _, _, _, arch = _ENTRY.unpack_from(section, at)
        if header < _ENTRY.size or not 10 <= arch < 1000:
            raise FatbinError(f"no fat binary entry at offset {at}: kind {kind}, sm_{arch}")
        if kind in KINDS:  # others hold link-time IR, which no driver loads
            yield KINDS[kind], arch
        at += header + payload


def sections(path: Path, *wanted: bytes) -> Iterator[bytes]:
    """The contents of the sections with one of these names, of a 64-bit little-endian ELF."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise FatbinError(f"{path} is not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    if table + entry_size * count > len(data):
        raise FatbinError(f"the section table of {path} is cut off")
    headers = [
        struct.unpack_from("<IIQQQQ", data, table + i * entry_size) for i in range(count)
    ]  # name, type, flags, address, offset, size
    if not headers:
        return
    names = headers[names_index][4]
    for name, kind, _, _, offset, size in headers:
        start = names + name
        if data[start : data.index(b"\0", start)] in wanted and kind != 8:  # 8: no bits
            yield data[offset : offset + size]
