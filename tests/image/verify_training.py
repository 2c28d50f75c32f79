"""Judge a training run from the facts that its ranks wrote (``train_zero3.py --result-dir``).

"The loss went down and the exit code was 0" also holds when the launcher was ignored, nothing
was sharded, another optimizer ran, or a compiler built the kernel on the spot.  So every such
way out has a check here.  The functions are pure: dictionaries in, a list of problems out,
each of which starts with the name of the check that found it (``sharding: ...``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Facts = Mapping[str, Any]

MIN_STEPS = 6  # Adam does not see the scale of its first gradient: one step shows nothing


@dataclass(frozen=True)
class Expect:
    """What was asked of the run."""

    nonce: str
    world_size: int
    backend: str  # gloo or nccl
    launcher: str  # torchrun or deepspeed
    optimizer: str  # FusedAdam, DeepSpeedCPUAdam
    ops: tuple[str, ...]  # kernels that must have been loaded: fused_adam
    ops_root: str  # the prebuilt kernels lie under this directory
    steps: int
    dtype: str = "fp32"
    versions: Mapping[str, str] = field(default_factory=dict)  # torch: 2.13.0+cpu
    uid: int | None = None

    @property
    def tolerance(self) -> float:
        """Of the loss, against the reference: absolute in fp32, relative in bf16."""
        return 1e-4 if self.dtype == "fp32" else 3e-2


def verify(results: Sequence[Facts], reference: Facts, expect: Expect) -> list[str]:
    """What is wrong with a ZeRO-3 run, compared with one process of plain torch."""
    problems = _identity(results, expect)
    if not results:
        return problems
    for facts in results:
        rank = facts.get("rank")
        for check in (_sharding, _kernels, _parity):
            try:
                found = check(facts, reference, expect)
            except (KeyError, TypeError, IndexError) as missing:
                found = [f"facts: {check.__name__[1:]} cannot be judged, {missing!r} is missing"]
            problems += [f"{p} (rank {rank})" for p in found]
    return problems + _agreement(results)


def verify_resume(full: Sequence[Facts], resumed: Sequence[Facts]) -> list[str]:
    """What is wrong with a resumed run, compared with the uninterrupted one: bit for bit."""
    problems = []
    if len(full) != len(resumed):
        problems.append(f"resume: {len(resumed)} ranks continue a run of {len(full)}")
    for before, after in zip(full, resumed, strict=False):
        start, end = after["first_step"], after["first_step"] + len(after["losses"])
        where = f"(rank {after['rank']})"
        if not 0 < start < end:
            problems.append(f"resume: continued at step {start} and ended at step {end} {where}")
            continue
        if before["pid"] == after["pid"] and before["hostname"] == after["hostname"]:
            problems.append(f"resume: the same process continued {where}")
        for step in (start, end):
            want, got = before["checksums"].get(str(step)), after["checksums"].get(str(step))
            if want is None or want != got:
                problems.append(f"resume: parameters differ at step {step} {where}")
        if before["losses"][start:end] != after["losses"] or len(before["losses"]) != end:
            problems.append(f"resume: losses differ after step {start} {where}")
    return problems


def _identity(results: Sequence[Facts], expect: Expect) -> list[str]:
    """Who ran: as many processes as asked, of this very run, started as asked."""
    problems = []
    ranks = sorted(facts.get("rank", -1) for facts in results)
    if ranks != list(range(expect.world_size)):
        problems.append(f"world: results of ranks {ranks}, asked for {expect.world_size} ranks")
    if len({(facts.get("hostname"), facts.get("pid")) for facts in results}) != len(results):
        problems.append("world: two ranks are one process")
    asked = {
        "mode": "zero",
        "nonce": expect.nonce,
        "world_size": expect.world_size,
        "backend": expect.backend,
        "launcher": expect.launcher,
        "dtype": expect.dtype,
    } | ({} if expect.uid is None else {"uid": expect.uid})
    for facts in results:
        for key, want in asked.items():
            if facts.get(key) != want:
                problems.append(
                    f"world: {key} is {facts.get(key)!r}, asked for {want!r} (rank {facts.get('rank')})"
                )
        for name, version in expect.versions.items():
            got = facts.get("versions", {}).get(name)
            if got != version:
                problems.append(f"world: {name} is {got}, not {version}")
    return problems


def _sharding(facts: Facts, reference: Facts, expect: Expect) -> list[str]:
    """Parameters, fp32 copies and moments: every rank holds its share and no more."""
    problems = []
    numels = facts["param_numels"]
    if sorted(numels) != sorted(reference["param_numels"]):
        problems.append("sharding: the model is not the reference's")
    share = sum(math.ceil(n / expect.world_size) for n in numels)
    if expect.world_size < 2:
        problems.append("sharding: one rank shards nothing")
    if facts["stage"] != 3 or facts["zero_optimizer"] != "DeepSpeedZeroOptimizer_Stage3":
        problems.append(f"sharding: stage {facts['stage']}, {facts['zero_optimizer']}")
    if facts["live_param_numel"] != 0:
        problems.append(f"sharding: {facts['live_param_numel']} parameter elements are whole between steps")
    for key, want in {
        "local_param_numel": share,
        "fp32_partition_numel": share,
        "moments_numel": 2 * share,
    }.items():
        if facts[key] != want:
            problems.append(f"sharding: {key} is {facts[key]}, a rank's share is {want}")
    return problems


def _kernels(facts: Facts, reference: Facts, expect: Expect) -> list[str]:
    """The optimizer is the one asked for, and its kernel was there before the run."""
    problems = []
    if facts["optimizer"] != expect.optimizer:
        problems.append(f"optimizer: {facts['optimizer']} ran, not {expect.optimizer}")
    for op in expect.ops:
        if op not in facts["ops"]:
            problems.append(f"kernels: {op} was not loaded, only {sorted(facts['ops'])}")
    for op, path in facts["ops"].items():
        if not path.startswith(expect.ops_root.rstrip("/") + "/"):
            problems.append(f"kernels: {op} is not a prebuilt one: {path}")
    if facts["jit_files"]:
        problems.append(f"kernels: compiled during the run: {facts['jit_files'][:3]}")
    return problems


def _parity(facts: Facts, reference: Facts, expect: Expect) -> list[str]:
    """Every step gives the loss that one process computes on the whole batch."""
    problems = []
    losses, wanted = facts["losses"], reference["losses"]
    if reference.get("mode") != "reference" or reference["clip"] != facts["clip"]:
        problems.append("parity: the reference is no plain run with the same clipping")
    if len(losses) != expect.steps or len(wanted) < expect.steps or expect.steps < MIN_STEPS:
        return [*problems, f"parity: {len(losses)} of {expect.steps} steps, {len(wanted)} known"]
    if not all(map(math.isfinite, losses)):
        return [*problems, "parity: a loss is not finite"]
    exact = expect.dtype == "fp32"
    for step, (got, want) in enumerate(zip(losses, wanted, strict=False), start=1):
        if abs(got - want) > expect.tolerance * (1 if exact else abs(want)):
            problems.append(f"parity: loss {got!r} at step {step}, the reference has {want!r}")
            break
    if not losses[-1] < losses[0]:
        problems.append("parity: nothing was learned")
    if exact:
        problems += _clipping(facts, reference, expect)
    return problems


def _clipping(facts: Facts, reference: Facts, expect: Expect) -> list[str]:
    """Clipping took place (otherwise parity says nothing about it), on the same norms."""
    norms = facts["grad_norms"]
    if any(n is None for n in norms) or len(norms) != expect.steps:
        return ["parity: gradient norms are missing"]
    problems = []
    if not max(norms) > facts["clip"] > 0:
        problems.append(f"parity: no gradient was clipped at {facts['clip']}")
    for step, (got, want) in enumerate(zip(norms, reference["grad_norms"], strict=False), start=1):
        if not math.isclose(got, want, rel_tol=1e-3):
            problems.append(f"parity: gradient norm {got} at step {step}, not {want}")
            break
    return problems


def _agreement(results: Sequence[Facts]) -> list[str]:
    """Ranks saw different data and still hold the same model: gradients were exchanged."""
    problems = []
    if len({facts.get("batches") for facts in results}) != len(results):
        problems.append("agreement: ranks trained on the same data")
    for key in ("checksums", "losses"):
        if any(facts.get(key) != results[0].get(key) for facts in results):
            problems.append(f"agreement: ranks differ in {key}")
    return problems
