"""Is this node fit to train on?  Each check is a function of facts alone and says the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from trainyard_node.facts import READ_ONLY, UNLIMITED, Facts

MIB = 2**20
# NCCL puts its buffers for ranks of one node there: 33 MB a segment from 2.7 on
# (https://github.com/NVIDIA/nccl/issues/342), and NVIDIA asks for --shm-size=1g:
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html#shared-memory
# DeepSpeed's all-reduce on the CPU maps 66 MiB for each rank, and writes as much as a message has:
# https://github.com/deepspeedai/DeepSpeed/blob/master/csrc/cpu/comm/shm.cpp (allreduce_workspace).
# Measured with 2 ranks: SIGSEGV in 16 MB at a message of 16 MB, SIGBUS in 64 MB at one of 64 MB,
# none in 140 MB. gloo itself needs none.
SHM_NEEDED_PER_RANK = 32 * MIB
SHM_WANTED_PER_RANK = 66 * MIB
SHM_WANTED_WITH_GPUS = 512 * MIB  # where DeepSpeed's own report begins to warn


class Finding(NamedTuple):
    """What a check found: ``severity`` is ``ok``, ``warning`` or ``error``."""

    severity: str
    name: str
    text: str
    remedy: str = ""

    def line(self) -> str:
        """The finding in one line, with its remedy."""
        return f"{self.severity}: {self.text}" + (f". Remedy: {self.remedy}" if self.remedy else "")


def ok(name: str, text: str) -> Finding:
    """Nothing to complain about."""
    return Finding("ok", name, text)


def size(number: int) -> str:
    """Bytes for people: ``64 MB``, ``1.5 GB`` (binary multiples, as Docker's options mean them)."""
    if number < 0:
        return "unlimited"
    if number < MIB:
        return f"{number / 1024:g} KB" if number % 1024 == 0 else f"{number} bytes"
    return f"{number // MIB} MB" if number < 1024 * MIB else f"{number / 1024 / MIB:.1f} GB"


def count(number: int, what: str) -> str:
    """``1 GPU``, ``2 GPUs``."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def check(facts: Facts, *, ranks: int | None = None, bound: bool = False) -> list[Finding]:
    """Every check of a node.

    ``ranks`` is how many processes will run here, None if nobody knows.  ``bound``: each of them
    was started by somebody else (Slurm, MPI), who may have given it a GPU of its own.
    """
    findings = [shm(facts, ranks), memlock(facts), nofile(facts), driver(facts), hidden_gpus(facts)]
    if ranks is not None:
        findings.append(enough_gpus(facts, ranks, bound=bound))
    findings += caches(facts)
    findings.append(home(facts))
    return findings


def worst(findings: Sequence[Finding]) -> str:
    """The highest severity among them."""
    severities = {finding.severity for finding in findings}
    return next((level for level in ("error", "warning") if level in severities), "ok")


def shm(facts: Facts, ranks: int | None) -> Finding:
    """/dev/shm must hold what the ranks of one node exchange through it."""
    name, have = "shm", f"/dev/shm has {size(facts.shm_size)}"
    remedy = (
        "docker run --shm-size=1g (or --ipc=host); Kubernetes: an emptyDir with medium: Memory at /dev/shm"
    )
    if ranks is None:
        if facts.shm_size < 2 * SHM_NEEDED_PER_RANK:
            return Finding("warning", name, f"{have}, too little for 2 ranks on one node", remedy)
        if facts.gpus > 1 and facts.shm_size < SHM_WANTED_WITH_GPUS:
            return Finding("warning", name, f"{have}, little for {facts.gpus} GPUs", remedy)
        return ok(name, have)
    if ranks < 2:
        return ok(name, f"{have}; one rank needs none")
    if facts.shm_size < ranks * SHM_NEEDED_PER_RANK:
        need = size(ranks * SHM_NEEDED_PER_RANK)
        return Finding("error", name, f"{have}: {ranks} ranks on one node need {need} at least", remedy)
    wanted = ranks * SHM_WANTED_PER_RANK
    if facts.gpus:
        wanted = max(wanted, SHM_WANTED_WITH_GPUS)
    if facts.shm_size < wanted:
        text = f"{have}: little for {ranks} ranks, large messages and DataLoader workers may fail"
        return Finding("warning", name, text, remedy)
    return ok(name, have)


def memlock(facts: Facts) -> Finding:
    """RDMA registers memory, and DeepSpeed locks offload buffers: both count against the limit."""
    name, have = "memlock", f"RLIMIT_MEMLOCK is {size(facts.memlock)}"
    if facts.memlock == UNLIMITED or not (facts.rdma or facts.gpus):
        return ok(name, have)
    why = "RDMA cannot register its buffers" if facts.rdma else "pinned offload buffers may not fit"
    return Finding("warning", name, f"{have}: {why}", "docker run --ulimit memlock=-1")


def nofile(facts: Facts) -> Finding:
    """DataLoader workers and NCCL hold many files open."""
    name, have = "nofile", f"RLIMIT_NOFILE is {facts.nofile if facts.nofile >= 0 else 'unlimited'}"
    if facts.nofile == UNLIMITED or facts.nofile >= 1024:
        return ok(name, have)
    return Finding("warning", name, have, "docker run --ulimit nofile=65536:65536")


def requirement(text: str) -> tuple[str, str]:
    """``("12.1", "525.60.13")`` from ``cuda>=12.1 driver>=525.60.13``; ``""`` for what is missing."""
    found = {"cuda": "", "driver": ""}
    for word in text.replace(",", " ").split():
        key, sign, value = word.partition(">=")
        if sign and key in found and not found[key]:
            found[key] = value
    return found["cuda"], found["driver"]


def number(version: str) -> tuple[int, ...]:
    """A dotted version for comparing; an end that is no number is left out."""
    parts: list[int] = []
    for part in version.split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def driver(facts: Facts) -> Finding:
    """The host's driver must be as new as the image's CUDA level asks for."""
    name = "driver"
    level, floor = requirement(facts.require_cuda)
    if not facts.driver or not facts.gpus or not floor:
        return ok(name, f"driver {facts.driver or 'none'}")
    if number(facts.driver) >= number(floor):
        return ok(name, f"driver {facts.driver}, {floor} needed")
    return Finding(
        "error",
        name,
        f"the host's NVIDIA driver is {facts.driver}; this image's CUDA level {level} needs {floor} or newer",
        f"install driver {floor} or newer on the host, or take an image with a lower CUDA level",
    )


def hidden_gpus(facts: Facts) -> Finding:
    """GPUs in the machine that nobody put into the container."""
    name = "gpus"
    if facts.gpus or facts.no_gpus_wanted or not facts.host_gpus or not facts.require_cuda:
        return ok(name, f"{facts.gpus} GPUs ({facts.gpus_why})")
    return Finding(
        "warning",
        name,
        f"the host has {facts.host_gpus} GPUs, none of them is usable here ({facts.gpus_why})",
        "docker run --gpus all (the host needs the NVIDIA container toolkit)",
    )


def enough_gpus(facts: Facts, ranks: int, *, bound: bool = False) -> Finding:
    """A rank needs a GPU of its own, in a CUDA image unless somebody chose the CPU."""
    name = "ranks"
    if not facts.gpus and facts.require_cuda and not facts.no_gpus_wanted:
        remedy = "docker run --gpus all; to train on the CPU on purpose: DS_ACCELERATOR=cpu"
        return Finding("error", name, f"{count(ranks, 'rank')} but no GPU ({facts.gpus_why})", remedy)
    if not facts.gpus:
        return ok(name, f"{ranks} ranks on the CPU")
    if ranks <= facts.gpus:
        return ok(name, f"{ranks} ranks, {facts.gpus} GPUs")
    remedy = (
        f"ask for {count(facts.gpus, 'rank')}, or give the container more GPUs; CPU ranks: DS_ACCELERATOR=cpu"
    )
    if bound and facts.gpus == 1:
        remedy = "let every task see all GPUs of its node: srun --gpus-per-node=N --gpu-bind=none"
    return Finding("error", name, f"{ranks} ranks but {count(facts.gpus, 'GPU')} ({facts.gpus_why})", remedy)


def caches(facts: Facts) -> list[Finding]:
    """Kernels that are compiled at run time land in these folders."""
    by_problem: dict[str, list[str]] = {}
    for variable, path, problem in facts.caches:
        if problem:
            by_problem.setdefault(problem, []).append(f"{variable}={path}")
    found = []
    for problem, folders in by_problem.items():
        variable = folders[0].partition("=")[0]
        remedy = f"mount a writable folder there, or docker run -e {variable}=/tmp/{variable.lower()}"
        severity, text = "error", f"{', '.join(folders)} {problem}"
        if problem == READ_ONLY:
            # docker run --read-only: on purpose, and the image's own kernels need no folder
            severity, text = "warning", f"{text}: kernels that are compiled at run time fail"
        found.append(Finding(severity, "cache", text, remedy))
    return found or [ok("cache", "kernel caches are writable")]


def home(facts: Facts) -> Finding:
    """Only a warning: training needs no home, but libraries put caches and settings there."""
    _variable, path, problem = facts.home
    if not problem:
        return ok("home", f"HOME={path}")
    text = f"HOME={path} {problem}" if path else "HOME is not set"
    remedy = "docker run -e HOME=/tmp/home, or mount a folder that this user owns"
    return Finding("warning", "home", f"{text}: caches and settings go nowhere", remedy)


def as_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Findings as plain data."""
    return [finding._asdict() for finding in findings]
