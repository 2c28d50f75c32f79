"""The reviewed facts of ``compat/*.yaml``, typed.  Nothing is decided here."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from trainyard.model import InputError
from trainyard.yamlfile import Strict, read, validate

FOLDER = Path(__file__).resolve().parent.parent / "compat"

Accelerator = Literal["cuda", "cpu"]


def parts(version: str) -> tuple[int, ...]:
    """``12.4`` as (12, 4), to compare."""
    return tuple(int(number) for number in version.split("."))


def minor_of(version: str) -> str:
    """``2.9`` of ``2.9.1``."""
    return ".".join(version.split(".")[:2])


def major_of(version: str) -> str:
    """``12`` of ``12.4``."""
    return version.split(".")[0]


def within(version: str, ranges: str) -> bool:
    """Is ``version`` in ``">=12.0,<12.5"``?"""
    return all(_satisfies(version, part.strip()) for part in ranges.split(","))


def _satisfies(version: str, bound: str) -> bool:
    match = re.fullmatch(r"(>=|<)([0-9.]+)", bound)
    if not match:
        raise InputError(f'compat: "{bound}" is no bound; write >=VERSION or <VERSION')
    left, right = _padded(version, match[2])
    return left >= right if match[1] == ">=" else left < right


def _padded(a: str, b: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Both of one length, so that 13 and 13.0 are equal."""
    left, right = parts(a), parts(b)
    size = max(len(left), len(right))
    return left + (0,) * (size - len(left)), right + (0,) * (size - len(right))


def older(a: str, b: str) -> bool:
    """Is version ``a`` older than ``b``?"""
    left, right = _padded(a, b)
    return left < right


class Aarch64(Strict):
    """What PyPI carries of a torch for arm64 Linux."""

    build: str
    archs: list[str]


class TorchRelease(Strict):
    """One torch version."""

    builds: list[str]
    pypi: str
    cudnn: str
    nccl: str
    toolkit: str | None = None
    python: list[str]
    glibc: str
    glibc_of: dict[str, str] = Field(default_factory=dict)
    cxx11_abi: bool
    cxx11_abi_of: dict[str, bool] = Field(default_factory=dict)
    archs: dict[str, list[str]]
    aarch64: Aarch64 | None = None
    sources: list[str]


class ExtensionGcc(Strict):
    """Host compilers that torch's BuildExtension accepts."""

    source: str
    below: dict[str, int]
    relaxed: dict[str, dict[str, int]]


class Fsdp2(Strict):
    """Where FSDP2 is public, and where it also trains without a GPU."""

    since: str
    on_cpu_since: str
    source: str


class TorchFacts(Strict):
    """``torch.yaml``."""

    sources: dict[str, str]
    torch: dict[str, TorchRelease]
    extension_gcc: ExtensionGcc
    fsdp2: Fsdp2

    def gcc_below(self, torch: str, toolkit: str) -> int | None:
        """The first gcc major that torch refuses for a toolkit, or None for no bound."""
        bound = self.extension_gcc.below.get(toolkit)
        for since, table in self.extension_gcc.relaxed.items():
            if not older(torch, since):
                bound = table.get(toolkit, bound)
        return bound

    def last_with(self, build: str) -> str | None:
        """The newest torch version that has ``build``."""
        return next((v for v in reversed(self.torch) if build in self.torch[v].builds), None)


class Drivers(Strict):
    """Driver floors per CUDA major."""

    source: str
    floors: dict[str, str]


class Packages(Strict):
    """Suffixes of NVIDIA's Python packages per CUDA major."""

    source: str
    suffix: dict[str, str]


class NvccGcc(Strict):
    """The newest gcc per toolkit."""

    source: str
    max: dict[str, int]


class Arch(Strict):
    """One GPU architecture."""

    first: str | None = None
    dropped: str | None = None
    gpus: list[str]

    def emitted_by(self, toolkit: str) -> bool:
        """Does nvcc of ``toolkit`` (major.minor) generate code for it?"""
        too_old = self.first is not None and older(toolkit, self.first)
        too_new = self.dropped is not None and not older(toolkit, self.dropped)
        return not too_old and not too_new


class Archs(Strict):
    """All GPU architectures."""

    sources: list[str]
    by_arch: dict[str, Arch]


class DebianToolkits(Strict):
    """CUDA compilers in Debian."""

    source: str
    why: str
    by_base: dict[str, list[str]]


class PipToolkits(Strict):
    """CUDA compilers on PyPI."""

    source: str
    versions: list[str]
    extras: list[str]
    packages: list[str]

    def requirement(self, version: str) -> str:
        """What to install for a whole toolkit of one version."""
        return f"cuda-toolkit[{','.join(self.extras)}]=={version}"


class NvidiaImage(Strict):
    """One ``nvidia/cuda`` image."""

    base: str
    image: str


class NvidiaToolkits(Strict):
    """CUDA compilers in NVIDIA's images."""

    source: str
    images: dict[str, NvidiaImage]


class Toolkits(Strict):
    """All providers."""

    debian: DebianToolkits
    pip: PipToolkits
    nvidia: NvidiaToolkits


class CudaFacts(Strict):
    """``cuda.yaml``."""

    builds: dict[str, str]
    drivers: Drivers
    packages: Packages
    nvcc_gcc: NvccGcc
    archs: Archs
    toolkits: Toolkits

    def cuda_of(self, build: str) -> str:
        """``12.8`` of ``cu128``; for a build nobody listed, read off its name."""
        return self.builds.get(build) or f"{build[2:-1]}.{build[-1]}"


class Op(Strict):
    """One DeepSpeed op on one accelerator."""

    flag: str
    since: str | None = None
    until: str | None = None
    default: bool = False
    twin: bool = False
    with_: list[str] = Field(default_factory=list, alias="with")  # ops that DeepSpeed builds along
    unbuildable: str | None = None  # why no image here can have it

    def in_version(self, deepspeed: str) -> bool:
        """Does this DeepSpeed have the op?"""
        too_old = self.since is not None and older(deepspeed, self.since)
        gone = self.until is not None and not older(deepspeed, self.until)
        return not too_old and not gone


class KnownBad(Strict):
    """A combination that fails, with the report."""

    deepspeed: str
    torch: str | None = None
    cuda: str | None = None
    toolkit: str | None = None
    python: str | None = None
    op: str | None = None
    why: str
    use: str
    url: str


class MinorMismatchStep(Strict):
    """CUDA minors that a DeepSpeed version started to accept."""

    since: str
    minors: list[str]


class MinorMismatch(Strict):
    """DeepSpeed's table of CUDA minors that may be mixed."""

    source: str
    accepted: list[MinorMismatchStep]

    def minors(self, deepspeed: str) -> frozenset[str]:
        """The minors that this DeepSpeed accepts in a mix."""
        steps = (step for step in self.accepted if not older(deepspeed, step.since))
        return frozenset(minor for step in steps for minor in step.minors)


class ArchLetters(Strict):
    """Why 9.0a is refused."""

    url: str


class Bf16Off(Strict):
    """The major at which an arch list turns BF16 code off."""

    major: int
    source: str


class NeedsSetuptools(Strict):
    """Where ``import deepspeed`` needs setuptools."""

    python: str
    deepspeed: str
    url: str


class NeedsCurand(Strict):
    """Where the ops need cuRAND and torch does not bring it."""

    torch: str
    requirement: str
    source: str


class ZeroOnGloo(Strict):
    """From when on ZeRO stages 1 and 2 train without a GPU."""

    since: str
    source: str


class ImportWithoutNvcc(Strict):
    """Where ``import deepspeed`` needs nvcc or a variable."""

    env: str
    value: str
    env_since: str
    fixed: str
    url: str


class DeepSpeedFacts(Strict):
    """``deepspeed.yaml``."""

    sources: dict[str, str]
    versions: list[str]
    recommended: dict[str, str]
    ops: dict[Accelerator, dict[str, Op]]
    known_bad: list[KnownBad]
    minor_mismatch: MinorMismatch
    arch_letters: ArchLetters
    bf16_off_at_major: Bf16Off
    needs_setuptools: NeedsSetuptools
    needs_curand: NeedsCurand
    zero_1_2_on_gloo: ZeroOnGloo
    import_without_nvcc: ImportWithoutNvcc

    def ops_of(self, accelerator: Accelerator, deepspeed: str) -> dict[str, Op]:
        """The ops that one DeepSpeed version has."""
        ops = self.ops[accelerator]
        return {name: op for name, op in ops.items() if op.in_version(deepspeed)}


class BaseFacts(Strict):
    """One entry of ``bases.yaml``."""

    suite: str
    image: str
    python: str
    gcc: int
    gccs: list[int]
    glibc: str
    libaio: str
    source: str


class BasesFile(Strict):
    """``bases.yaml``."""

    bases: dict[str, BaseFacts]


class Facts(Strict):
    """All of ``compat/``."""

    torch: TorchFacts
    cuda: CudaFacts
    deepspeed: DeepSpeedFacts
    bases: dict[str, BaseFacts]


@cache
def load_facts(folder: Path = FOLDER) -> Facts:
    """Read ``compat/*.yaml``; a mistake in them is an :class:`InputError` with its line."""
    return Facts(
        torch=validate(read(folder / "torch.yaml"), TorchFacts),
        cuda=validate(read(folder / "cuda.yaml"), CudaFacts),
        deepspeed=validate(read(folder / "deepspeed.yaml"), DeepSpeedFacts),
        bases=validate(read(folder / "bases.yaml"), BasesFile).bases,
    )
