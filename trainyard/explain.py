"""What a row means, in words: what will be inside, and why that and not something else."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainyard import compat
from trainyard.facts import Facts, load_facts, major_of, minor_of, older
from trainyard.model import Row, Toolkit
from trainyard.resolve import COMPATIBILITY
from trainyard.yamlfile import listed

WIDTH = 100

#: What a CPU must have, as glibc's hwcaps name the levels.
ISA = {
    "x86-64-v2": "SSE4.2: any x86-64 server since about 2010",
    "x86-64-v3": "AVX2 and FMA: Intel from Haswell, AMD from Excavator and Zen on; no AVX-512",
    "x86-64-v4": "AVX-512: Intel from Skylake-SP, AMD from Zen 4 on",
    "armv8-a": "any 64-bit Arm",
    "armv8.2-a": "Neoverse N1 and later: Grace, Graviton 2 and later, Ampere Altra",
    "armv9-a": "Neoverse V2 and N2: Grace, Graviton 4, Cobalt 100",
}


def explain(row: Row, facts: Facts | None = None) -> str:
    """A page on one row, for a reader who wants to know before building."""
    known = facts or load_facts()
    sections = (
        ("System", _system(row)),
        ("torch", _torch(row, known)),
        ("Drivers", _drivers(row)),
        ("Kernels", _kernels(row)),
        ("GPUs", _gpus(row, known)),
        ("CPU", _cpu(row)),
        ("Why", iter(row.notes)),
    )
    lines = [f"{row.id}: {row.summary}", f"({row.where})"]
    for title, sentences in sections:
        body = [line for sentence in sentences for line in _item(sentence)]
        if body:
            lines += ["", title, *body]
    return "\n".join(lines) + "\n"


def _item(sentence: str) -> list[str]:
    return textwrap.wrap(
        sentence,
        WIDTH,
        initial_indent="  - ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _system(row: Row) -> Iterator[str]:
    yield f"{row.platform}, {row.base.name} ({row.base.image}, glibc {row.base.glibc}), Python {row.python}."
    features = listed(sorted(row.features))
    yield f"Features: {features}." if row.features else "Features: none, torch only."


def _torch(row: Row, facts: Facts) -> Iterator[str]:
    torch = row.torch
    where = "the build that PyPI carries" if torch.on_pypi else "from PyTorch's package index"
    built = f"built with CUDA {torch.cuda}" if torch.cuda else "the CPU build"
    yield f"torch {torch.version}, {built} ({torch.build}, {where})."
    if row.cudnn and row.nccl:
        yield f"cuDNN {row.cudnn} and NCCL {row.nccl}, exactly."
    if row.overrides:
        yield f"Set by override, because torch's own pins may differ: {listed(row.overrides)}."
    yield _fsdp(row, facts)
    if not row.has_deepspeed:
        yield "No DeepSpeed in this variant."


def _fsdp(row: Row, facts: Facts) -> str:
    rule = facts.torch.fsdp2
    if older(row.torch.version, rule.since):
        return f"FSDP1 is in torch.distributed.fsdp; FSDP2 is public there from {rule.since} on."
    return (
        "FSDP1 (FullyShardedDataParallel) and FSDP2 (fully_shard) are both in "
        f"torch.distributed.fsdp; fully_shard is public since {rule.since} ({rule.source})."
    )


def _drivers(row: Row) -> Iterator[str]:
    if row.torch.cuda is None:
        yield "No GPU driver is needed."
        return
    yield (
        f"For hosts whose `nvidia-smi` prints CUDA {row.cuda_level} or newer. What is inside is "
        f"built with CUDA {row.torch.cuda} and runs on any driver >= {row.driver_floor}, any "
        f"{major_of(row.torch.cuda)}.x: minor-version compatibility ({COMPATIBILITY})."
    )


def _kernels(row: Row) -> Iterator[str]:
    if row.deepspeed:
        yield f"DeepSpeed {row.deepspeed}, {len(row.ops)} ops compiled ahead: {listed(row.ops)}."
    if row.skipped_ops:
        yield f"Left out: {listed(op.op for op in row.skipped_ops)}; see below."
    if row.toolkit:
        yield _compiler(row, row.toolkit)
    elif row.deepspeed:
        yield f"GCC {row.base.gcc} of {row.base.name} compiles them."
    if row.deepspeed:
        stays = "stay in this variant" if row.has_devel else "do not reach the image"
        yield f"The compilers {stays}."
    if row.twin_ops:
        yield f"For tests on hosts without a GPU there is a CPU build of {listed(row.twin_ops)}."


def _compiler(row: Row, toolkit: Toolkit) -> str:
    comes_from = {
        "debian": "from Debian's nvidia-cuda-toolkit",
        "pip": f"from the cuda-toolkit {toolkit.version} packages on PyPI",
        "nvidia": f"from {toolkit.image}",
    }[toolkit.provider]
    what = "compiles the kernels" if row.has_deepspeed else "is there to compile extensions"
    return f"nvcc {toolkit.minor} {comes_from} {what}, with g++-{toolkit.gcc} for the host code."


def _gpus(row: Row, facts: Facts) -> Iterator[str]:
    if not row.toolkit:
        yield from _torch_archs(row, facts)
        return
    archs = [arch.removesuffix("+PTX") for arch in row.gpu_archs]
    verb = "Kernels are compiled for" if row.has_deepspeed else "Extensions are compiled for"
    yield f"{verb} {listed(_named(arch, facts) for arch in archs)}."
    for arch, entry in facts.cuda.archs.by_arch.items():
        by = [one for one in archs if compat.covers(one, arch)]
        if arch not in archs and by and entry.dropped is None:
            yield f"{_named(arch, facts)} runs the code for {by[-1]}: binary compatibility."
    if row.gpu_archs[-1].endswith("+PTX"):
        yield (
            f"Newer GPUs compile the PTX of {archs[-1]} at first use, with a driver of CUDA "
            f"{row.toolkit.minor} or newer."
        )
    yield from _torch_archs(row, facts)


def _torch_archs(row: Row, facts: Facts) -> Iterator[str]:
    known = facts.torch.torch.get(row.torch.version)
    compiled = known.archs.get(row.torch.build) if known else None
    if known and row.arch == "arm64":
        compiled = known.aarch64.archs if known.aarch64 else None
    if compiled:
        yield f"torch itself holds code for {listed(compiled)}."


def _named(arch: str, facts: Facts) -> str:
    return f"{arch} ({listed(facts.cuda.archs.by_arch[arch].gpus)})"


def _cpu(row: Row) -> Iterator[str]:
    if row.has_deepspeed:
        yield (
            f"CPU ops are compiled for {row.cpu_isa} ({ISA[row.cpu_isa]}), not for the machine that builds."
        )


def as_json(row: Row) -> dict[str, Any]:
    """The row as plain data, with the named conditions that templates use."""
    data: dict[str, Any] = {field.name: _plain(getattr(row, field.name)) for field in dataclasses.fields(row)}
    data["accelerator"] = row.accelerator
    data["torch_requirement"] = row.torch.requirement
    data["torch_minor"] = minor_of(row.torch.version)
    return data


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
