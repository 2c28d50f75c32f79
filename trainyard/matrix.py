"""``matrix.yaml`` as typed values: what the user asked for, before any fact is looked up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Literal

from pydantic import Field

from trainyard.model import Arch, Provider, Where, arch_suffix
from trainyard.yamlfile import (
    Document,
    Key,
    Problem,
    Strict,
    did_you_mean,
    listed,
    read,
    refuse,
    validate,
)

Feature = Literal["deepspeed", "launch", "sshd", "jupyter", "rdma", "devel"]
Isa = Literal["x86-64-v2", "x86-64-v3", "x86-64-v4"]
ArmIsa = Literal["armv8-a", "armv8.2-a", "armv9-a"]

#: Keys that only mean something where there is CUDA.
CUDA_KEYS = ("cuda_level", "cudnn", "nccl", "toolkit", "gpu_archs")
#: An id is a tag, a folder and a CI job, so it is narrower than a Docker tag.
ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
VERSION = re.compile(r"[0-9]+(\.[0-9]+)*")
MINOR = re.compile(r"[0-9]+\.[0-9]+")


class ToolkitEntry(Strict):
    """``toolkit:`` of a stack."""

    provider: Provider
    version: str
    gcc: str


class SkipEntry(Strict):
    """One op under ``skip_ops:``."""

    reason: str
    url: str


class Stack(Strict):
    """One entry under ``stacks:``."""

    summary: str
    base: str
    python: str
    torch: str
    build: str
    cuda_level: str | None = None
    cudnn: str | None = None
    nccl: str | None = None
    deepspeed: str | None = None
    toolkit: ToolkitEntry | None = None
    gpu_archs: list[str] | None = None
    cpu_isa: Isa
    arm_isa: ArmIsa | None = None  # the same for arm64; stacks that have it are built for arm64 too
    ops: list[str] | None = None
    skip_ops: dict[str, SkipEntry] = Field(default_factory=dict)
    allow_unlisted: str | None = None

    @property
    def is_cpu(self) -> bool:
        """Does the stack ask for the CPU build of torch?"""
        return self.build == "cpu"

    @property
    def archs(self) -> tuple[Arch, ...]:
        """The CPU architectures that the stack is built for."""
        return ("amd64", "arm64") if self.arm_isa else ("amd64",)

    def isa(self, arch: Arch) -> str:
        """The instruction set that CPU code may use, as GCC's -march takes it."""
        return self.arm_isa if arch == "arm64" and self.arm_isa else self.cpu_isa


class Variant(Strict):
    """One entry under ``variants:``."""

    features: list[Feature]


class Exclude(Strict):
    """One entry under ``exclude:``: a glob over ids, and why they are not built."""

    id: str
    reason: str


class MatrixFile(Strict):
    """The whole file."""

    default: str
    repository: str
    variants: dict[str, Variant]
    stacks: dict[str, Stack]
    exclude: list[Exclude] = Field(default_factory=list)


@dataclass(frozen=True)
class Cell:
    """One stack times one architecture times one variant that is not excluded."""

    id: str
    stack: str
    variant: str
    arch: Arch


@dataclass(frozen=True)
class Matrix:
    """A matrix that is consistent in itself."""

    document: Document
    file: MatrixFile

    @property
    def path(self) -> Path:
        """Where the matrix was read from."""
        return self.document.path

    @property
    def default(self) -> str:
        """The id that commands take when none is named."""
        return self.file.default

    @property
    def repository(self) -> str:
        """The repository name that images are tagged with."""
        return self.file.repository

    def where(self, *keys: Key) -> Where:
        """The ``file:line`` of the value at ``keys``."""
        return self.document.where(*keys)

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Every image to build, in file order."""
        return tuple(cell for cell in self.all_cells if self.excluded(cell.id) is None)

    @cached_property
    def all_cells(self) -> tuple[Cell, ...]:
        """Every stack times its architectures times every variant, in file order."""
        return tuple(
            Cell(stack + arch_suffix(arch) + variant, stack, variant, arch)
            for stack, entry in self.file.stacks.items()
            for arch in entry.archs
            for variant in self.file.variants
        )

    def excluded(self, row_id: str) -> Exclude | None:
        """The entry that excludes ``row_id``, if one does."""
        for entry in self.file.exclude:
            if fnmatchcase(row_id, entry.id):
                return entry
        return None


def load(path: Path) -> Matrix:
    """Read and check a matrix.  Facts about versions are checked later, by ``resolve.rows``."""
    document = read(path)
    matrix = Matrix(document, validate(document, MatrixFile))
    refuse(_problems(matrix))
    return matrix


def _problems(matrix: Matrix) -> Iterator[Problem]:
    yield from _sections(matrix)
    yield from _ids(matrix)
    yield from _excludes(matrix)
    yield from _default(matrix)
    for name, stack in matrix.file.stacks.items():
        yield from _stack(matrix, name, stack)


def _sections(matrix: Matrix) -> Iterator[Problem]:
    for section in ("variants", "stacks"):
        if not getattr(matrix.file, section):
            yield Problem(matrix.where(section), f"{section}: is empty; write at least one entry")
    if not re.fullmatch(r"[a-z0-9]+([._/-]+[a-z0-9]+)*", matrix.repository):
        text = f'repository: "{matrix.repository}" is no image name; use a-z, 0-9, ".", "_", "-"'
        yield Problem(matrix.where("repository"), text)


def _ids(matrix: Matrix) -> Iterator[Problem]:
    seen: dict[str, str] = {}
    for cell in matrix.all_cells:
        where = matrix.where("stacks", cell.stack)
        made_of = f'stack "{cell.stack}" with variant "{cell.variant}"'
        if not ID.fullmatch(cell.id):
            text = (
                f'{made_of} gives the id "{cell.id}", which is no good as a tag and folder; '
                'use at most 128 of a-z, 0-9, ".", "_" and "-", starting with a letter or digit'
            )
            yield Problem(where, text)
        if cell.id in seen:
            text = f'duplicate id "{cell.id}": {made_of} and {seen[cell.id]}; rename the stack'
            yield Problem(where, text)
        seen.setdefault(cell.id, made_of)


def _excludes(matrix: Matrix) -> Iterator[Problem]:
    ids = [cell.id for cell in matrix.all_cells]
    for number, entry in enumerate(matrix.file.exclude):
        where = matrix.where("exclude", number, "id")
        if not any(fnmatchcase(row_id, entry.id) for row_id in ids):
            text = f'exclude: "{entry.id}" matches no id{did_you_mean(entry.id, ids)}'
            yield Problem(where, f"{text}; ids: {listed(ids)}")
        if not entry.reason.strip():
            text = f'exclude: "{entry.id}" has an empty reason; say why it is not built'
            yield Problem(matrix.where("exclude", number, "reason"), text)


def _default(matrix: Matrix) -> Iterator[Problem]:
    where = matrix.where("default")
    ids = [cell.id for cell in matrix.cells]
    entry = matrix.excluded(matrix.default)
    if matrix.default in ids:
        return
    if entry:
        text = f'default: "{matrix.default}" is excluded by "{entry.id}" ({entry.reason})'
    else:
        text = f'default: there is no "{matrix.default}"{did_you_mean(matrix.default, ids)}'
    yield Problem(where, f"{text}; ids: {listed(ids)}")


def _stack(matrix: Matrix, name: str, stack: Stack) -> Iterator[Problem]:
    def at(*keys: Key) -> Where:
        return matrix.where("stacks", name, *keys)

    for field, text in (*_shape(stack), *_accelerator(stack), *_name(name, stack)):
        yield Problem(at(*field), f"stack {name}: {text}")
    wants = [v for v, entry in matrix.file.variants.items() if "deepspeed" in entry.features]
    if wants and stack.deepspeed is None:
        text = f'no deepspeed version, but variant "{wants[0]}" has the feature deepspeed; add one'
        yield Problem(at(), f"stack {name}: {text}")


Finding = tuple[tuple[Key, ...], str]


def _shape(stack: Stack) -> Iterator[Finding]:
    """Values that are strings but not of the right form."""
    for field in ("python", "cuda_level"):
        value = getattr(stack, field)
        if value is not None and not MINOR.fullmatch(value):
            yield (field,), f'{field} "{value}" is not major.minor; write for example "3.13"'
    for field in ("torch", "cudnn", "nccl", "deepspeed"):
        value = getattr(stack, field)
        if value is not None and not VERSION.fullmatch(value):
            yield (field,), f'{field} "{value}" is no exact version; write for example "2.9.1"'
    if stack.toolkit and not VERSION.fullmatch(stack.toolkit.version):
        text = f'toolkit.version "{stack.toolkit.version}" is no version; write for example "12.4"'
        yield ("toolkit", "version"), text
    if stack.toolkit and not stack.toolkit.gcc.isdecimal():
        text = f'toolkit.gcc "{stack.toolkit.gcc}" is no major; write for example "13"'
        yield ("toolkit", "gcc"), text
    for field in ("summary", "allow_unlisted"):
        value = getattr(stack, field)
        if value is not None and not value.strip():
            yield (field,), f"{field} is empty; write a sentence"
    for op, entry in stack.skip_ops.items():
        if not entry.reason.strip() or not entry.url.startswith("https://"):
            yield ("skip_ops", op), f"skip_ops.{op} needs a reason and an https:// url"
    for number, arch in enumerate(stack.gpu_archs or ()):
        if not re.fullmatch(r"[0-9]+\.[0-9]+[af]?(\+PTX)?", arch):
            text = f'gpu_archs "{arch}" is no architecture; write for example "8.0" or "9.0+PTX"'
            yield ("gpu_archs", number), text


def _accelerator(stack: Stack) -> Iterator[Finding]:
    """CUDA keys belong on CUDA rows, all of them, and on no CPU row."""
    if stack.is_cpu:
        for field in CUDA_KEYS:
            if getattr(stack, field) is not None:
                yield (field,), f"{field} means nothing with build cpu; remove it"
        return
    if not re.fullmatch(r"cu[0-9]{3,}", stack.build):
        yield ("build",), f'build "{stack.build}" is no torch build; write cpu, or cu128 or alike'
    missing = [field for field in CUDA_KEYS if not getattr(stack, field)]
    if missing:
        yield (), f"build {stack.build} needs {listed(missing)} too"


def _name(name: str, stack: Stack) -> Iterator[Finding]:
    """``cu121`` and ``pt29`` in an id are promises."""
    level = re.match(r"cu(\d+)(\d)(?=-|$)", name)
    if level:
        promised = f"{level[1]}.{level[2]}"
        if stack.cuda_level != promised:
            is_now = f'cuda_level is "{stack.cuda_level}"' if stack.cuda_level else "it has none"
            start = f'the id starts with "{level[0]}", so cuda_level must be "{promised}"'
            yield ("cuda_level",), f"{start}, but {is_now}"
    if re.match(r"cpu(?=-|$)", name) and not stack.is_cpu:
        text = f'the id starts with "cpu", so build must be cpu, but it is "{stack.build}"'
        yield ("build",), text
    for part in name.split("-"):
        digits = "".join(stack.torch.split(".")[:2])
        if re.fullmatch(r"pt\d+", part) and part[2:] != digits:
            text = f'the id says "{part}", but torch "{stack.torch}" would be "pt{digits}"'
            yield ("torch",), text
