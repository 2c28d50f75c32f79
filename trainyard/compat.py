"""Does a stack fit together?  Pure functions from a stack and the facts to what is wrong.

Each check yields ``(field, text)``: the key that is wrong, and a sentence with the value, what
is accepted, and what works instead.  A check that needs a fact nobody listed stays silent; the
check named after that fact has spoken already, or the stack says ``allow_unlisted``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainyard.facts import (
    Accelerator,
    Facts,
    TorchRelease,
    major_of,
    minor_of,
    older,
    parts,
    within,
)
from trainyard.matrix import Stack
from trainyard.yamlfile import Key, did_you_mean, listed

Finding = tuple[tuple[Key, ...], str]
Check = Callable[[Stack, Facts], Iterator[Finding]]


def accelerator(stack: Stack) -> Accelerator:
    """DeepSpeed's accelerator for a stack."""
    return "cpu" if stack.is_cpu else "cuda"


def release(stack: Stack, facts: Facts) -> TorchRelease | None:
    """What is known about the stack's torch."""
    return facts.torch.torch.get(stack.torch)


def cuda_of(stack: Stack, facts: Facts) -> str | None:
    """The CUDA version that the stack's torch was compiled with."""
    return None if stack.is_cpu else facts.cuda.cuda_of(stack.build)


def default_ops(stack: Stack, facts: Facts, version: str) -> tuple[str, ...]:
    """The ops a stack builds when it does not say."""
    ops = facts.deepspeed.ops_of(accelerator(stack), version)
    return tuple(sorted(name for name, op in ops.items() if op.default))


def wanted_ops(stack: Stack, facts: Facts) -> tuple[str, ...]:
    """The ops a stack builds: its own list or the default, less the skipped ones."""
    if stack.deepspeed is None:
        return ()
    ops = default_ops(stack, facts, stack.deepspeed) if stack.ops is None else stack.ops
    return tuple(sorted(op for op in ops if op not in stack.skip_ops))


def unlisted(stack: Stack, facts: Facts) -> tuple[tuple[str, ...], ...]:
    """The keys whose versions ``compat/`` does not know."""
    found: list[tuple[str, ...]] = []
    if release(stack, facts) is None:
        found.append(("torch",))
    if stack.deepspeed is not None and stack.deepspeed not in facts.deepspeed.versions:
        found.append(("deepspeed",))
    if stack.toolkit and stack.toolkit.version not in _toolkit_versions(stack, facts):
        found.append(("toolkit", "version"))
    return tuple(found)


def _toolkit_versions(stack: Stack, facts: Facts) -> list[str]:
    """Versions that the stack's provider has for its base."""
    toolkits = facts.cuda.toolkits
    if stack.toolkit is None:
        return []
    if stack.toolkit.provider == "debian":
        return toolkits.debian.by_base.get(stack.base, [])
    if stack.toolkit.provider == "pip":
        return toolkits.pip.versions
    return [v for v, entry in toolkits.nvidia.images.items() if entry.base == stack.base]


# -- base and Python -----------------------------------------------------------------------


def base_is_known(stack: Stack, facts: Facts) -> Iterator[Finding]:
    """The base is one we have facts on."""
    if stack.base not in facts.bases:
        hint = did_you_mean(stack.base, facts.bases)
        yield ("base",), f'unknown base "{stack.base}"{hint}; accepted: {listed(facts.bases)}'


def python_is_the_bases(stack: Stack, facts: Facts) -> Iterator[Finding]:
    """Images use the distribution's own Python."""
    here = facts.bases[stack.base].python
    if stack.python == here:
        return
    others = [name for name, base in facts.bases.items() if base.python == stack.python]
    instead = f"; {stack.python} is in {listed(others)}" if others else ""
    known = listed(f"{base.python} on {name}" for name, base in facts.bases.items())
    text = f'python "{stack.python}" is not what {stack.base} has: write "{here}"'
    yield ("python",), f"{text}{instead}; accepted: {known}"


# -- torch ---------------------------------------------------------------------------------


def torch_is_known(stack: Stack, facts: Facts) -> Iterator[Finding]:
    """Unknown torch versions are refused unless the stack asks for one openly."""
    if release(stack, facts) or stack.allow_unlisted:
        return
    same = [v for v in facts.torch.torch if minor_of(v) == minor_of(stack.torch)]
    nearest = same[0] if same else _nearest(stack.torch, list(facts.torch.torch))
    text = (
        f'torch "{stack.torch}" is not in compat/torch.yaml; nearest: "{nearest}"; known: '
        f'{listed(facts.torch.torch)}; to build it anyway add allow_unlisted: "the reason"'
    )
    yield ("torch",), text


def _nearest(version: str, known: list[str]) -> str:
    """The newest known version that is not newer, else the oldest."""
    not_newer = [v for v in known if not older(version, v)]
    return max(not_newer, key=parts) if not_newer else min(known, key=parts)


def torch_has_the_build(stack: Stack, facts: Facts) -> Iterator[Finding]:
    """PyTorch published this CUDA build of this version."""
    known = release(stack, facts)
    if stack.is_cpu or known is None or stack.build in known.builds:
        return
    text = (
        f'torch "{stack.torch}" has no build "{stack.build}": PyTorch published '
        f"{listed(known.builds)} and cpu for it"
    )
    last = facts.torch.last_with(stack.build)
    if last is None:
        yield ("build",), f"{text}; no torch we know has {stack.build}"
        return
    keep = _build_for_level(stack, known, facts)
    yield ("build",), f'{text}; the last torch with {stack.build} is "{last}"{keep}'


def _build_for_level(stack: Stack, known: TorchRelease, facts: Facts) -> str:
    """Which build of the same torch runs on the drivers that the stack is for."""
    level = major_of(stack.cuda_level or facts.cuda.cuda_of(stack.build))
    fits = [b for b in known.builds if major_of(facts.cuda.cuda_of(b)) == level]
    if not fits:
        return ""
    best = known.pypi if known.pypi in fits else fits[-1]
    floor = facts.cuda.drivers.floors[level]
    return f"; or keep torch and write build: {best}, which runs on any {level}.x driver >= {floor}"


def arm64_has_the_build(stack: Stack, facts: Facts) -> Iterator[Finding]:
    """PyPI carries this build for arm64, with code for every GPU of the row."""
    known = release(stack, facts)
    if "arm64" not in stack.archs or known is None:
        return
    there = known.aarch64
    having = [f"{v} ({r.aarch64.build})" for v, r in facts.torch.torch.items() if r.aarch64]
    if there is None or there.build != stack.build:
        has = f"build {there.build}" if there else "no build with CUDA"
        text = (
            f'arm_isa "{stack.arm_isa}" asks for arm64, for which PyPI has {has} of torch '
            f"{stack.torch}; remove it; torch with CUDA for arm64: {listed(having)}"
        )
        yield ("arm_isa",), text
        return
    if stack.toolkit and stack.toolkit.provider != "pip":
        text = f'toolkit.provider "{stack.toolkit.provider}" is for amd64 only; accepted with arm_isa: pip'
        yield ("toolkit", "provider"), text
    for number, arch in enumerate(stack.gpu_archs or ()):
        plain = arch.removesuffix("+PTX")
        if not any(covers(one, plain) for one in there.archs):
            text = f'gpu_archs "{arch}": the arm64 build of torch has {listed(there.archs)} only'
            yield ("gpu_archs", number), text


def torch_supports_python(stack: Stack, facts: Facts) -> Iterator[Finding]:
    """PyTorch published wheels for this Python."""
    known = release(stack, facts)
    if known is None or stack.python in known.python:
        return
    having = [v for v, entry in facts.torch.torch.items() if stack.python in entry.python]
    works = f"; torch with Python {stack.python}: {listed(having)}" if having else ""
    accepted = listed(known.python)
    text = f'python "{stack.python}" has no torch "{stack.torch}" wheel: it has {accepted}{works}'
    yield ("python",), text


def glibc_is_new_enough(stack: Stack, facts: Facts) -> Iterator[Finding]:
    """The wheel's manylinux tag fits the base."""
    known = release(stack, facts)
    if known is None:
        return
    floor = known.glibc_of.get(stack.build, known.glibc)
    has = facts.bases[stack.base].glibc
    if older(has, floor):
        fits = [name for name, base in facts.bases.items() if not older(base.glibc, floor)]
        text = f'base "{stack.base}" has glibc {has}; torch "{stack.torch}" needs {floor}'
        yield ("base",), f"{text}; accepted: {listed(fits)}"


# -- CUDA libraries and driver -------------------------------------------------------------


def cuda_major_is_known(stack: Stack, facts: Facts) -> Iterator[Finding]:
    """Driver floor and package names are known for the CUDA major of the build."""
    cuda = cuda_of(stack, facts)
    floors = facts.cuda.drivers.floors
    if cuda is not None and major_of(cuda) not in floors:
        text = f'build "{stack.build}" would be CUDA {cuda}; known majors: {listed(floors)}'
        yield ("build",), text


def level_fits_the_build(stack: Stack, facts: Facts) -> Iterator[Finding]:
    """A binary runs on every driver of its CUDA major, and on none of an older one."""
    cuda = cuda_of(stack, facts)
    if cuda is None or stack.cuda_level is None:
        return
    if major_of(stack.cuda_level) == major_of(cuda):
        return
    known = release(stack, facts)
    level = major_of(stack.cuda_level)
    fits = [b for b in known.builds if major_of(facts.cuda.cuda_of(b)) == level] if known else []
    text = (
        f'cuda_level "{stack.cuda_level}" and build {stack.build} (CUDA {cuda}) differ in the '
        f"major; builds of torch {stack.torch} for CUDA {level}: {listed(fits)}; "
        f'or write cuda_level: "{cuda}"'
    )
    yield ("cuda_level",), text


def libraries_are_not_older(stack: Stack, facts: Facts) -> Iterator[Finding]:
    """Cudnn and NCCL may be newer than what torch was built with, never older."""
    known = release(stack, facts)
    if known is None:
        return
    for field, pin in (("cudnn", known.cudnn), ("nccl", known.nccl)):
        version = getattr(stack, field)
        if version is not None and older(version, pin):
            text = (
                f'{field} "{version}" is older than "{pin}", which torch {stack.torch} is built '
                f'with; accepted: "{pin}" or newer'
            )
            yield (field,), text


# -- toolkit -------------------------------------------------------------------------------


def toolkit_is_available(stack: Stack, facts: Facts) -> Iterator[Finding]:
    """The provider has this version for this base."""
    toolkit = stack.toolkit
    if toolkit is None or toolkit.version in _toolkit_versions(stack, facts):
        return
    if toolkit.provider == "nvidia":
        yield ("toolkit", "provider"), _no_nvidia_image(stack, facts)
    elif toolkit.provider == "debian" and stack.base not in facts.cuda.toolkits.debian.by_base:
        having = facts.cuda.toolkits.debian.by_base
        bases = listed(f"{base} has {listed(v)}" for base, v in having.items())
        text = f'toolkit.provider "debian": {stack.base} has no toolkit we can use; {bases}'
        yield ("toolkit", "provider"), text
    elif toolkit.provider == "pip" and major_of(toolkit.version) == "12":
        text = (
            f'toolkit.version "{toolkit.version}": the pip packages of CUDA 12 hold no nvcc; use '
            f"provider debian on {listed(facts.cuda.toolkits.debian.by_base)}, or CUDA 13"
        )
        yield ("toolkit", "version"), text
    elif not stack.allow_unlisted:
        accepted = listed(_toolkit_versions(stack, facts))
        text = (
            f'toolkit.version "{toolkit.version}" is not in compat/cuda.yaml for provider '
            f"{toolkit.provider} on {stack.base}; accepted: {accepted}"
        )
        yield ("toolkit", "version"), text


def _no_nvidia_image(stack: Stack, facts: Facts) -> str:
    bases = sorted({entry.base for entry in facts.cuda.toolkits.nvidia.images.values()})
    return (
        f'toolkit.provider "nvidia" does not fit base "{stack.base}": NVIDIA makes no Debian '
        f"image, and what an image of {listed(bases)} compiles may need a newer glibc; accepted "
        "here: debian (CUDA 12.4 on debian-13), pip (CUDA 13)"
    )


def toolkit_matches_torch(stack: Stack, facts: Facts) -> Iterator[Finding]:
    """The toolkit's CUDA major is torch's; the minor too, unless DeepSpeed lists both."""
    cuda, toolkit = cuda_of(stack, facts), stack.toolkit
    if cuda is None or toolkit is None or minor_of(toolkit.version) == cuda:
        return
    minor = minor_of(toolkit.version)
    field = ("toolkit", "version")
    start = f'toolkit.version "{toolkit.version}" with build {stack.build} (CUDA {cuda})'
    if major_of(minor) != major_of(cuda):
        yield field, f"{start}: the majors differ, and torch refuses that; accepted: {cuda}"
        return
    if stack.deepspeed is None:
        return
    accepted = facts.deepspeed.minor_mismatch.minors(stack.deepspeed)
    if minor in accepted and cuda in accepted:
        return
    same_major = sorted((v for v in accepted if major_of(v) == major_of(cuda)), key=parts)
    rule = (
        f"accepts these to be mixed: {listed(same_major)}"
        if same_major
        else f"accepts no other minor on CUDA {major_of(cuda)}"
    )
    versions = [v for v in _toolkit_versions(stack, facts) if minor_of(v) == cuda]
    works = listed(versions) if versions else f"a toolkit {cuda}"
    source = facts.deepspeed.minor_mismatch.source
    text = f"{start}: the minors differ, and DeepSpeed {stack.deepspeed} {rule} ({source})"
    yield field, f"{text}; accepted here: {works}"


def toolkit_is_torchs_own(stack: Stack, facts: Facts) -> Iterator[Finding]:
    """The pip toolkit shares packages with torch, so both need one exact version."""
    known, toolkit = release(stack, facts), stack.toolkit
    if known is None or known.toolkit is None or toolkit is None or toolkit.provider != "pip":
        return
    if stack.build == known.pypi and toolkit.version != known.toolkit:
        text = (
            f'toolkit.version "{toolkit.version}": torch {stack.torch} requires cuda-toolkit '
            f'"{known.toolkit}" exactly; accepted: "{known.toolkit}"'
        )
        yield ("toolkit", "version"), text


def gcc_is_accepted(stack: Stack, facts: Facts) -> Iterator[Finding]:
    """The host compiler suits nvcc and torch's own check, and the base can install it."""
    toolkit = stack.toolkit
    if toolkit is None:
        return
    gcc, minor = int(toolkit.gcc), minor_of(toolkit.version)
    limits = {f"nvcc {minor}": facts.cuda.nvcc_gcc.max.get(minor)}
    below = facts.torch.gcc_below(stack.torch, minor)
    limits[f"torch {stack.torch}"] = below - 1 if below else None
    known = {who: limit for who, limit in limits.items() if limit is not None}
    ceiling = min(known.values(), default=gcc)
    available = facts.bases[stack.base].gccs
    works = listed(f'"{major}"' for major in available if major <= ceiling)
    field = ("toolkit", "gcc")
    too_new = [f"{who} takes gcc up to {limit}" for who, limit in known.items() if gcc > limit]
    if too_new:
        text = f'toolkit.gcc "{gcc}" is too new: {listed(too_new)}; accepted on {stack.base}'
        yield field, f"{text}: {works}"
    elif gcc not in available:
        yield field, f'toolkit.gcc "{gcc}" is not in {stack.base}; accepted: {works}'


# -- GPU architectures ---------------------------------------------------------------------


def archs_can_be_built(stack: Stack, facts: Facts) -> Iterator[Finding]:
    """The toolkit emits code for every architecture asked for."""
    toolkit = stack.toolkit
    if toolkit is None:
        return
    minor = minor_of(toolkit.version)
    table = facts.cuda.archs.by_arch
    accepted = listed(arch for arch, entry in table.items() if entry.emitted_by(minor))
    for number, arch in enumerate(stack.gpu_archs or ()):
        number_only = arch.removesuffix("+PTX")
        problem = _arch_problem(number_only, minor, facts)
        if problem:
            text = f'gpu_archs "{arch}" {problem}; accepted with CUDA {minor}: {accepted}'
            yield ("gpu_archs", number), text


def _arch_problem(arch: str, toolkit: str, facts: Facts) -> str | None:
    if arch[-1] in "af":
        url = facts.deepspeed.arch_letters.url
        return f'has a letter, which DeepSpeed cannot read ({url}); write "{arch[:-1]}"'
    entry = facts.cuda.archs.by_arch.get(arch)
    if entry is None:
        return "is not in compat/cuda.yaml"
    if entry.first and older(toolkit, entry.first):
        return f"is too new for this toolkit: it needs CUDA {entry.first}"
    if entry.dropped and not older(toolkit, entry.dropped):
        return f"({listed(entry.gpus)}) was dropped by CUDA {entry.dropped}"
    return None


def archs_are_in_order(stack: Stack, facts: Facts) -> Iterator[Finding]:
    """Ascending, each once, and PTX for the last alone."""
    archs = stack.gpu_archs or []
    plain = [arch.removesuffix("+PTX") for arch in archs]
    for number, arch in enumerate(archs[:-1]):
        if arch.endswith("+PTX"):
            text = f'gpu_archs "{arch}": PTX is for the last one only; write "{plain[number]}"'
            yield ("gpu_archs", number), text
    right = sorted(set(plain), key=parts)
    if plain != right:
        yield ("gpu_archs",), f"gpu_archs must ascend without repeats: {listed(right)}"


def archs_are_in_torch(stack: Stack, facts: Facts) -> Iterator[Finding]:
    """Kernels for a GPU that the torch wheel cannot run on are of no use."""
    known = release(stack, facts)
    compiled = known.archs.get(stack.build) if known else None
    if not compiled:
        return
    for number, arch in enumerate(stack.gpu_archs or ()):
        plain = arch.removesuffix("+PTX")
        if not any(covers(one, plain) for one in compiled):
            text = (
                f'gpu_archs "{arch}": torch {stack.torch} {stack.build} has no code for it; it '
                f"has {listed(compiled)}"
            )
            yield ("gpu_archs", number), text


def covers(compiled: str, gpu: str) -> bool:
    """Does code for ``compiled`` run on ``gpu``?  Same major, minor not newer."""
    return major_of(compiled) == major_of(gpu) and not older(gpu, compiled)


# -- DeepSpeed -----------------------------------------------------------------------------


def deepspeed_is_known(stack: Stack, facts: Facts) -> Iterator[Finding]:
    """Unknown DeepSpeed versions are refused unless the stack asks for one openly."""
    version = stack.deepspeed
    if version is None or version in facts.deepspeed.versions or stack.allow_unlisted:
        return
    advice = facts.deepspeed.recommended.get(minor_of(stack.torch))
    use = f'; for torch {stack.torch} take "{advice}"' if advice else ""
    text = (
        f'deepspeed "{version}" is not in compat/deepspeed.yaml{use}; known: '
        f'{listed(facts.deepspeed.versions)}; to build it anyway add allow_unlisted: "the reason"'
    )
    yield ("deepspeed",), text


def ops_exist(stack: Stack, facts: Facts) -> Iterator[Finding]:
    """Ops named by the stack are ops of this DeepSpeed on this accelerator."""
    if stack.deepspeed is None:
        return
    kind = accelerator(stack)
    known = facts.deepspeed.ops_of(kind, stack.deepspeed)
    named: list[tuple[tuple[Key, ...], str]] = [
        (("ops", number), op) for number, op in enumerate(stack.ops or ())
    ]
    named += [(("skip_ops", op), op) for op in stack.skip_ops]
    for field, op in named:
        if op not in known:
            text = f'"{op}" is no op of DeepSpeed {stack.deepspeed} on {kind}'
            hint = did_you_mean(op, known)
            yield field, f"{field[0]}: {text}{hint}; accepted: {listed(known)}"
    for number, op in enumerate(stack.ops or ()):
        if op in (stack.ops or ())[:number]:
            yield ("ops", number), f'ops: "{op}" is there twice; once is enough'
        elif op in known and (why := known[op].unbuildable):
            yield ("ops", number), f'ops: "{op}" cannot be built here: {why}'
    wanted = wanted_ops(stack, facts)
    at: tuple[Key, ...] = ("ops",) if stack.ops is not None else ("skip_ops",)
    for op in wanted:
        for other in known[op].with_ if op in known else ():
            if other in known and other not in wanted:
                place = ("skip_ops", other) if other in stack.skip_ops else at
                yield (
                    place,
                    f'{place[0]}: DeepSpeed builds "{other}" along with "{op}"; take it too, or not "{op}"',
                )
    if not wanted:
        yield at, f"{at[0]}: no op is left to build; an image without DeepSpeed is the -base variant"
    built = stack.ops if stack.ops is not None else default_ops(stack, facts, stack.deepspeed)
    for op in stack.skip_ops:
        if op in known and op not in built:
            text = f'skip_ops: "{op}" would not be built anyway; remove it; built: {listed(built)}'
            yield ("skip_ops", op), text


def pair_is_not_known_bad(stack: Stack, facts: Facts) -> Iterator[Finding]:
    """No combination that an upstream report names."""
    if stack.deepspeed is None:
        return
    values = {
        "torch": stack.torch,
        "deepspeed": stack.deepspeed,
        "python": stack.python,
        "cuda": cuda_of(stack, facts),
        "toolkit": minor_of(stack.toolkit.version) if stack.toolkit else None,
    }
    ops = wanted_ops(stack, facts)
    for bad in facts.deepspeed.known_bad:
        if bad.op and bad.op not in ops:
            continue
        ranges = {key: getattr(bad, key) for key in values if getattr(bad, key) is not None}
        if all(_in_range(values[key], bounds) for key, bounds in ranges.items()):
            text = (
                f'deepspeed "{stack.deepspeed}" with torch "{stack.torch}": {bad.why} '
                f"({bad.url}); use {bad.use}"
            )
            yield ("deepspeed",), text


def _in_range(version: str | None, bounds: str) -> bool:
    return version is not None and within(version, bounds)


def unlisted_is_needed(stack: Stack, facts: Facts) -> Iterator[Finding]:
    """An escape hatch that nothing uses is closed again."""
    if stack.allow_unlisted and not unlisted(stack, facts):
        text = "allow_unlisted is not needed: all versions are listed; remove it"
        yield ("allow_unlisted",), text


#: In the order in which a reader would want to be told; the first that fails speaks.
CHECKS: tuple[Check, ...] = (
    base_is_known,
    torch_is_known,
    python_is_the_bases,
    torch_supports_python,
    torch_has_the_build,
    arm64_has_the_build,
    glibc_is_new_enough,
    cuda_major_is_known,
    level_fits_the_build,
    libraries_are_not_older,
    toolkit_is_available,
    toolkit_matches_torch,
    deepspeed_is_known,
    pair_is_not_known_bad,
    toolkit_is_torchs_own,
    gcc_is_accepted,
    archs_can_be_built,
    archs_are_in_order,
    archs_are_in_torch,
    ops_exist,
    unlisted_is_needed,
)


def check(stack: Stack, facts: Facts) -> tuple[Finding, ...]:
    """What is wrong with a stack: the findings of the first check that has any.

    Later checks build on earlier ones, so their findings would only be consequences.
    """
    for one in CHECKS:
        findings = tuple(one(stack, facts))
        if findings:
            return findings
    return ()
