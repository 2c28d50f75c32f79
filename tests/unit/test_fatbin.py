"""trainyard.fatbin reads the GPU architectures of a library without CUDA tools."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

from trainyard import fatbin

PTX, ELF, LTO = 1, 2, 8


def entry(kind: int, arch: int, payload: int = 24, header: int = 64) -> bytes:
    head = struct.pack("<HHIQIIHHI", kind, 0x101, header, payload, 0, 0, 7, 1, arch)
    return head.ljust(header, b"\0") + b"\xaa" * payload


def container(*parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack("<IHHQ", fatbin.MAGIC, 1, 16, len(body)) + body


def elf(sections: dict[bytes, bytes]) -> bytes:
    """A minimal ELF file with the given sections."""
    names = b"\0"
    body = b""
    headers = [struct.pack("<IIQQQQIIQQ", *[0] * 10)]
    for name, content in [*sections.items(), (b".shstrtab", b"")]:
        offset = len(names)
        names += name + b"\0"
        if name == b".shstrtab":
            content = names
        headers.append(struct.pack("<IIQQQQIIQQ", offset, 1, 0, 0, 64 + len(body), len(content), 0, 0, 1, 0))
        body += content
    head = struct.pack(
        "<6s10xHHIQQQIHHHHHH", b"\x7fELF\x02\x01", 3, 62, 1, 0, 0, 64 + len(body), 0, 64, 0, 0,
        64, len(headers), len(headers) - 1,
    )  # fmt: skip
    return head + body + b"".join(headers)


def library(tmp_path: Path, **sections: bytes) -> Path:
    path = tmp_path / "op.so"
    path.write_bytes(elf({f".{k}".encode(): v for k, v in sections.items()}))
    return path


def test_reads_machine_code_and_ptx_of_every_container(tmp_path: Path) -> None:
    section = container(entry(ELF, 80), entry(ELF, 86), entry(ELF, 90)) + container(
        entry(ELF, 80, payload=40, header=96), entry(PTX, 90)
    )
    path = library(tmp_path, text=b"\x90" * 11, nv_fatbin=section)
    assert fatbin.archs(path) == {"elf": {80, 86, 90}, "ptx": {90}}


def test_skips_padding_between_containers() -> None:
    section = container(entry(ELF, 80, payload=20)) + b"\0" * 4 + b"\0" * 16
    section += container(entry(PTX, 120))
    assert list(fatbin.entries(section)) == [("elf", 80), ("ptx", 120)]


def test_does_not_count_link_time_code() -> None:
    assert list(fatbin.entries(container(entry(LTO, 90), entry(ELF, 80)))) == [("elf", 80)]


def test_a_library_without_device_code_has_no_architectures(tmp_path: Path) -> None:
    assert fatbin.archs(library(tmp_path, text=b"\x90")) == {"elf": set(), "ptx": set()}


def test_an_unknown_layout_is_an_error_and_not_an_empty_answer() -> None:
    with pytest.raises(fatbin.FatbinError, match="no fat binary container"):
        list(fatbin.entries(b"\x01" * 64))
    with pytest.raises(fatbin.FatbinError, match="beyond its section"):
        list(fatbin.entries(container(entry(ELF, 80))[:-8]))
    with pytest.raises(fatbin.FatbinError, match="no fat binary entry"):
        list(fatbin.entries(container(entry(ELF, 0))))


def test_a_file_that_is_not_elf_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "op.so"
    path.write_text("int main() {}")
    with pytest.raises(fatbin.FatbinError, match="not a 64-bit"):
        fatbin.archs(path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the running interpreter's own file")
def test_reads_a_real_elf_file() -> None:
    assert fatbin.archs(Path(sys.executable).resolve()) == {"elf": set(), "ptx": set()}
