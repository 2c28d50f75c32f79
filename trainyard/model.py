"""The typed values that travel between the steps (matrix -> resolve -> lock -> render -> ...).

Nothing here reads files, talks to an engine or prints.  Conditions that templates and
messages need are named properties of :class:`Row`, so that no template compares versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

DEBIAN_STUBS = "/usr/lib/x86_64-linux-gnu/stubs"
Provider = Literal["debian", "pip", "nvidia"]
Arch = Literal["amd64", "arm64"]  # as Debian and Docker call them


def arch_suffix(arch: Arch) -> str:
    """What an id says of its architecture: nothing for the usual one."""
    return "" if arch == "amd64" else f"-{arch}"


class InputError(Exception):
    """What the user gave is wrong.  ``str()`` is the whole message; the CLI exits with 2."""


class StepFailed(Exception):
    """A build, measurement, test or gate failed.  The CLI exits with 1."""


@dataclass(frozen=True)
class Where:
    """A place in a file, for messages: ``matrix.yaml:12``."""

    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class Base:
    """A base operating system, as listed in ``compat/bases.yaml``."""

    name: str  # debian-13
    suite: str  # trixie
    image: str  # debian:trixie-slim, the official image in a registry
    python: str  # 3.13, the distribution's python3
    gcc: int  # major of the default gcc
    glibc: str  # 2.41
    libaio: str  # libaio1t64, the package that holds libaio.so.1*
    arch: Arch = "amd64"  # the same image in the registry, another one where it is bootstrapped

    @property
    def key(self) -> str:
        """What tells two bases apart: ``debian-13``, ``debian-13-arm64``."""
        return f"{self.name}{arch_suffix(self.arch)}"

    @property
    def apt_cache(self) -> str:
        """What names the cache of downloaded packages."""
        return f"{self.suite}{arch_suffix(self.arch)}"


@dataclass(frozen=True)
class TorchBuild:
    """One published build of torch."""

    version: str  # 2.9.1
    build: str  # cu128 or cpu
    cuda: str | None  # 12.8; None for cpu
    on_pypi: bool  # is this the build that PyPI carries?
    cxx11_abi: bool

    @property
    def minor(self) -> str:
        """``2.9`` of ``2.9.1``: what DeepSpeed compares when it loads a prebuilt op."""
        return ".".join(self.version.split(".")[:2])

    @property
    def requirement(self) -> str:
        """The pip requirement that selects exactly this build."""
        return f"torch=={self.version}" + ("" if self.on_pypi else f"+{self.build}")


@dataclass(frozen=True)
class Toolkit:
    """The CUDA compiler that builds the kernels."""

    provider: Provider
    version: str  # 12.4 (major.minor), or 13.0.3 for the pip metapackage
    gcc: int  # major of the host compiler that nvcc uses
    image: str | None = None  # nvidia/cuda:...-devel-... where provider is nvidia
    requirement: str | None = None  # what is installed where provider is pip

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])


@dataclass(frozen=True)
class SkippedOp:
    """An op that a row cannot build, said openly in the matrix."""

    op: str
    reason: str
    url: str


@dataclass(frozen=True)
class Row:
    """One image, fully resolved: nothing left to look up and nothing left to choose."""

    id: str  # cu121-pt29-devel
    stack: str  # cu121-pt29
    variant: str  # "", "-base", "-devel"
    summary: str
    where: Where
    base: Base
    python: str  # 3.13
    torch: TorchBuild
    cuda_level: str | None  # 12.1: what nvidia-smi must print at least; None for cpu
    driver_floor: str | None  # 525.60.13
    cudnn: str | None  # 9.10.2.21, exact
    nccl: str | None  # 2.27.5, exact
    cudnn_package: str | None  # nvidia-cudnn-cu12
    nccl_package: str | None  # nvidia-nccl-cu12
    overrides: tuple[str, ...]  # requirements that go to uv's overrides: newer cuDNN or NCCL
    toolkit: Toolkit | None  # None where nothing is compiled for CUDA
    deepspeed: str | None  # 0.18.9; None where the variant has no DeepSpeed
    ops: tuple[str, ...]  # DeepSpeed's own op names, sorted; what the wheel must hold
    skipped_ops: tuple[SkippedOp, ...]
    twin_ops: tuple[str, ...]  # ops of the CPU twin (tests on hosts without a GPU); () on cpu rows
    gpu_archs: tuple[str, ...]  # ("8.0", "8.6", "9.0"), the last one with +PTX where asked
    cpu_isa: str  # x86-64-v3, armv8.2-a
    features: frozenset[str]
    unlisted: str | None  # the reason, where the row uses versions that compat/ does not list
    notes: tuple[str, ...]  # sentences for ``explain``: what was decided and why
    requirements: tuple[str, ...] = ()  # packages DeepSpeed needs and nothing declares: setuptools
    fsdp2_on_cpu: bool = True  # FSDP2 of this torch trains without a GPU
    zero_1_2_on_gloo: bool = True  # ZeRO stages 1 and 2 of this DeepSpeed do, too
    env: tuple[tuple[str, str], ...] = ()  # variables DeepSpeed needs in the image

    # -- named conditions, for templates and messages ------------------------------------
    @property
    def is_cpu(self) -> bool:
        return self.torch.cuda is None

    @property
    def arch(self) -> Arch:
        """Docker's and Debian's name of the CPU architecture."""
        return self.base.arch

    @property
    def platform(self) -> str:
        """``linux/amd64``."""
        return f"linux/{self.arch}"

    @property
    def accelerator(self) -> Literal["cuda", "cpu"]:
        """DeepSpeed's accelerator name."""
        return "cpu" if self.is_cpu else "cuda"

    @property
    def has_deepspeed(self) -> bool:
        return self.deepspeed is not None

    @property
    def has_devel(self) -> bool:
        return "devel" in self.features

    @property
    def has_sshd(self) -> bool:
        return "sshd" in self.features

    @property
    def has_launch(self) -> bool:
        return "launch" in self.features

    @property
    def has_rdma(self) -> bool:
        return "rdma" in self.features

    @property
    def has_jupyter(self) -> bool:
        return "jupyter" in self.features

    @property
    def builds_cuda_kernels(self) -> bool:
        return self.has_deepspeed and not self.is_cpu

    @property
    def uses_debian_toolkit(self) -> bool:
        return self.toolkit is not None and self.toolkit.provider == "debian"

    @property
    def uses_pip_toolkit(self) -> bool:
        return self.toolkit is not None and self.toolkit.provider == "pip"

    @property
    def kernel_gcc(self) -> int:
        """Major of the compiler that builds C++ and hosts nvcc."""
        return self.toolkit.gcc if self.toolkit else self.base.gcc

    @property
    def site_packages(self) -> str:
        return f"/opt/venv/lib/python{self.python}/site-packages"

    @property
    def cuda_home(self) -> str:
        """Where the toolkit lies in a -devel image."""
        return "/usr" if self.uses_debian_toolkit else f"{self.site_packages}/nvidia/cu13"

    @property
    def build_cuda_home(self) -> str:
        """Where the toolkit lies while kernels are built."""
        return "/usr" if self.uses_debian_toolkit else "/opt/build/nvidia/cu13"

    @property
    def cuda_stubs(self) -> str:
        """The folder of a -devel image with a libcuda.so to link against where no driver is."""
        return DEBIAN_STUBS if self.uses_debian_toolkit else f"{self.cuda_home}/stubs"

    @property
    def build_cuda_stubs(self) -> str:
        """The same while kernels are built."""
        return DEBIAN_STUBS if self.uses_debian_toolkit else f"{self.build_cuda_home}/stubs"

    @cached_property
    def torch_arch_list(self) -> str:
        """The value of TORCH_CUDA_ARCH_LIST."""
        return ";".join(self.gpu_archs)

    @cached_property
    def sm_archs(self) -> tuple[str, ...]:
        """("sm_80", "sm_86"): how cuobjdump and torch spell ``gpu_archs``."""
        return tuple("sm_" + a.removesuffix("+PTX").replace(".", "") for a in self.gpu_archs)
