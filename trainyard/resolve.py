"""From a matrix to rows: one image each, with nothing left to look up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from trainyard import compat
from trainyard.facts import BaseFacts, Facts, load_facts, major_of, minor_of, older, within
from trainyard.matrix import Cell, Matrix, Stack, load
from trainyard.model import Arch, Base, InputError, Row, SkippedOp, Toolkit, TorchBuild
from trainyard.yamlfile import Problem, did_you_mean, listed, refuse

__all__ = ["load", "rows", "select"]

COMPATIBILITY = "https://docs.nvidia.com/deploy/cuda-compatibility/"


def rows(matrix: Matrix, facts: Facts | None = None) -> tuple[Row, ...]:
    """Every row of the matrix in file order, or one message on what does not fit."""
    known = facts or load_facts()
    refuse(_misfits(matrix, known))
    return tuple(_row(matrix, cell, known) for cell in matrix.cells)


def _misfits(matrix: Matrix, facts: Facts) -> Iterator[Problem]:
    for name, stack in matrix.file.stacks.items():
        for field, text in compat.check(stack, facts):
            yield Problem(matrix.where("stacks", name, *field), f"stack {name}: {text}")


def select(rows: Sequence[Row], text: str, default: str) -> tuple[Row, ...]:
    """The rows named by ids, globs and commas; ``all`` for all, nothing for the default."""
    words = [word.strip() for word in text.split(",") if word.strip()] or [default]
    wanted: set[str] = set()
    for word in words:
        found = _matching(rows, word)
        if not found:
            raise InputError(_unknown(rows, word))
        wanted.update(found)
    return tuple(row for row in rows if row.id in wanted)


def _matching(rows: Iterable[Row], word: str) -> list[str]:
    return [row.id for row in rows if word == "all" or fnmatchcase(row.id, word)]


def _unknown(rows: Sequence[Row], word: str) -> str:
    ids = [row.id for row in rows]
    hint = did_you_mean(word, ids)
    return f'no image "{word}"{hint}; write one of these, a glob, or all: {listed(ids)}'


def _row(matrix: Matrix, cell: Cell, facts: Facts) -> Row:
    stack = matrix.file.stacks[cell.stack]
    features = frozenset[str](matrix.file.variants[cell.variant].features)
    deepspeed = stack.deepspeed if "deepspeed" in features else None
    compiles = deepspeed is not None or "devel" in features
    cuda = compat.cuda_of(stack, facts)
    suffix = facts.cuda.packages.suffix.get(major_of(cuda)) if cuda else None
    return Row(
        id=cell.id,
        stack=cell.stack,
        variant=cell.variant,
        summary=stack.summary,
        where=matrix.where("stacks", cell.stack),
        base=_base(stack.base, facts.bases[stack.base], cell.arch),
        python=stack.python,
        torch=_torch(stack, facts),
        cuda_level=stack.cuda_level,
        driver_floor=facts.cuda.drivers.floors[major_of(cuda)] if cuda else None,
        cudnn=stack.cudnn,
        nccl=stack.nccl,
        cudnn_package=f"nvidia-cudnn-{suffix}" if suffix else None,
        nccl_package=f"nvidia-nccl-{suffix}" if suffix else None,
        overrides=_overrides(stack, suffix, facts),
        toolkit=_toolkit(stack, facts) if compiles else None,
        deepspeed=deepspeed,
        ops=compat.wanted_ops(stack, facts) if deepspeed else (),
        skipped_ops=_skipped(stack) if deepspeed else (),
        twin_ops=_twin_ops(stack, deepspeed, facts),
        gpu_archs=tuple(stack.gpu_archs or ()),
        cpu_isa=stack.isa(cell.arch),
        features=features,
        unlisted=stack.allow_unlisted,
        fsdp2_on_cpu=not older(stack.torch, facts.torch.fsdp2.on_cpu_since),
        zero_1_2_on_gloo=not (deepspeed and older(deepspeed, facts.deepspeed.zero_1_2_on_gloo.since)),
        notes=tuple(_notes(stack, deepspeed, features, facts)),
        requirements=_requirements(stack, deepspeed, facts),
        env=_env(stack, deepspeed, features, facts),
    )


def _base(name: str, entry: BaseFacts, arch: Arch) -> Base:
    return Base(
        name=name,
        suite=entry.suite,
        image=entry.image,
        python=entry.python,
        gcc=entry.gcc,
        glibc=entry.glibc,
        libaio=entry.libaio,
        arch=arch,
    )


def _torch(stack: Stack, facts: Facts) -> TorchBuild:
    known = compat.release(stack, facts)
    return TorchBuild(
        version=stack.torch,
        build=stack.build,
        cuda=compat.cuda_of(stack, facts),
        on_pypi=known is not None and stack.build == known.pypi,
        # All builds since 2.7 have the new ABI, so that is what an unlisted one gets.
        cxx11_abi=known.cxx11_abi_of.get(stack.build, known.cxx11_abi) if known else True,
    )


def _toolkit(stack: Stack, facts: Facts) -> Toolkit | None:
    entry = stack.toolkit
    if entry is None:
        return None
    image = facts.cuda.toolkits.nvidia.images.get(entry.version)
    pip = facts.cuda.toolkits.pip
    return Toolkit(
        provider=entry.provider,
        version=entry.version,
        gcc=int(entry.gcc),
        image=image.image if image and entry.provider == "nvidia" else None,
        requirement=pip.requirement(entry.version) if entry.provider == "pip" else None,
    )


def _overrides(stack: Stack, suffix: str | None, facts: Facts) -> tuple[str, ...]:
    """Exact requirements that replace torch's own pins.

    The pins of the PyPI build are known.  Those of another build are not, so both libraries
    are overridden there: that is right whether or not its pins are the same.
    """
    if suffix is None:
        return ()
    known = compat.release(stack, facts)
    is_pypi = known is not None and stack.build == known.pypi
    result = []
    for field in ("cudnn", "nccl"):
        version = getattr(stack, field)
        if not is_pypi or version != getattr(known, field):
            result.append(f"nvidia-{field}-{suffix}=={version}")
    return tuple(result)


def _skipped(stack: Stack) -> tuple[SkippedOp, ...]:
    return tuple(SkippedOp(op, e.reason, e.url) for op, e in sorted(stack.skip_ops.items()))


def _twin_ops(stack: Stack, deepspeed: str | None, facts: Facts) -> tuple[str, ...]:
    """The CPU ops that let a CUDA image train on a host without a GPU, for tests."""
    if deepspeed is None or stack.is_cpu:
        return ()
    ops = facts.deepspeed.ops_of("cpu", deepspeed)
    return tuple(sorted(name for name, op in ops.items() if op.twin))


def _requirements(stack: Stack, deepspeed: str | None, facts: Facts) -> tuple[str, ...]:
    """Python packages that DeepSpeed and its ops need at run time and nothing declares."""
    if deepspeed is None:
        return ()
    found = []
    if _needs_setuptools(stack, deepspeed, facts):
        found.append("setuptools")
    curand, known = facts.deepspeed.needs_curand, compat.release(stack, facts)
    if not stack.is_cpu and known and known.toolkit and within(stack.torch, curand.torch):
        found.append(f"{curand.requirement}=={known.toolkit}")
    return tuple(found)


def _needs_setuptools(stack: Stack, deepspeed: str, facts: Facts) -> bool:
    rule = facts.deepspeed.needs_setuptools
    return within(deepspeed, rule.deepspeed) and within(stack.python, rule.python)


def _env(
    stack: Stack, deepspeed: str | None, features: frozenset[str], facts: Facts
) -> tuple[tuple[str, str], ...]:
    """Variables that DeepSpeed needs to be imported where there is no nvcc."""
    rule = facts.deepspeed.import_without_nvcc
    if deepspeed is None or stack.is_cpu or "devel" in features:
        return ()
    if not older(deepspeed, rule.fixed):
        return ()
    return () if older(deepspeed, rule.env_since) else ((rule.env, rule.value),)


def _notes(stack: Stack, deepspeed: str | None, features: frozenset[str], facts: Facts) -> Iterator[str]:
    yield from _torch_notes(stack, facts)
    if deepspeed:
        yield from _kernel_notes(stack, facts)
        yield from _deepspeed_notes(stack, deepspeed, features, facts)
    unlisted = compat.unlisted(stack, facts)
    if unlisted:
        keys = listed(".".join(key) for key in unlisted)
        yield f"Not in compat/, so nobody checked it: {keys}. Reason: {stack.allow_unlisted}"


def _torch_notes(stack: Stack, facts: Facts) -> Iterator[str]:
    known, cuda = compat.release(stack, facts), compat.cuda_of(stack, facts)
    if known is None or cuda is None or stack.cuda_level is None:
        return
    level, major = stack.cuda_level, major_of(cuda)
    same = [b for b, version in facts.cuda.builds.items() if version == level]
    missing = [build for build in same if build not in known.builds]
    for build in missing:
        last = facts.torch.last_with(build)
        yield (
            f"PyTorch publishes no CUDA {level} build of {minor_of(stack.torch)}: it has "
            f"{listed(known.builds)}. The last torch with {build} is {last}."
        )
    if level != cuda:
        yield (
            f"The torch wheel for CUDA {cuda} is used: any {major}.x driver >= "
            f"{facts.cuda.drivers.floors[major]} runs it, so also those of CUDA {level}, by "
            f"minor-version compatibility ({COMPATIBILITY})."
        )
    for field in ("cudnn", "nccl"):
        if getattr(stack, field) != getattr(known, field):
            yield (
                f"{field} {getattr(stack, field)} replaces {getattr(known, field)}, which torch "
                "requires; newer is safe, because the library keeps its soname."
            )


def _kernel_notes(stack: Stack, facts: Facts) -> Iterator[str]:
    cuda, toolkit = compat.cuda_of(stack, facts), stack.toolkit
    if cuda is None or toolkit is None:
        return
    minor = minor_of(toolkit.version)
    if minor != cuda:
        yield (
            f"nvcc {minor} beside a CUDA {cuda} torch is allowed: torch only warns when the minors "
            "differ, and DeepSpeed has both in its table of minors that may be mixed "
            f"({facts.deepspeed.minor_mismatch.source})."
        )
    base = facts.bases[stack.base]
    if int(toolkit.gcc) != base.gcc:
        limit = facts.cuda.nvcc_gcc.max.get(minor)
        yield (
            f"g++-{toolkit.gcc}, because GCC {base.gcc} of {stack.base} is too new for nvcc "
            f"{minor}, which takes GCC up to {limit}."
        )
    archs = stack.gpu_archs or []
    rule = facts.deepspeed.bf16_off_at_major
    if any(int(major_of(arch)) <= rule.major for arch in archs):
        yield (
            f"An architecture at or below {rule.major}.x makes DeepSpeed leave the BF16 code out "
            f"of its ops for all of them ({rule.source})."
        )


def _deepspeed_notes(stack: Stack, deepspeed: str, features: frozenset[str], facts: Facts) -> Iterator[str]:
    rule = facts.deepspeed.import_without_nvcc
    if not stack.is_cpu and older(deepspeed, rule.fixed) and "devel" not in features:
        if older(deepspeed, rule.env_since):
            yield (
                f"With a GPU and without nvcc `import deepspeed` {deepspeed} fails ({rule.url}); "
                f"from {rule.env_since} on {rule.env} avoids it."
            )
        else:
            yield (
                f"{rule.env}={rule.value} is set: without nvcc `import deepspeed` {deepspeed} "
                f"fails on a host with a GPU ({rule.url})."
            )
    if _needs_setuptools(stack, deepspeed, facts):
        setuptools = facts.deepspeed.needs_setuptools
        yield (
            f"setuptools is installed: DeepSpeed {deepspeed} imports distutils, which Python "
            f"{stack.python} no longer has ({setuptools.url})."
        )
    for requirement in _requirements(stack, deepspeed, facts):
        if requirement.startswith(facts.deepspeed.needs_curand.requirement):
            yield (
                f"{requirement} is installed: DeepSpeed's transformer ops need cuRAND, which torch "
                f"{stack.torch} no longer brings ({facts.deepspeed.needs_curand.source})."
            )
    for op, entry in sorted(stack.skip_ops.items()):
        yield f"The op {op} is not built: {entry.reason} ({entry.url})."
