"""The judge of training runs finds every way in which a run can only look right."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "image"))

from verify_training import Expect, verify, verify_resume

EXPECT = Expect(
    nonce="n1",
    world_size=2,
    backend="gloo",
    launcher="torchrun",
    optimizer="FusedAdam",
    ops=("fused_adam", "deepspeed_shm_comm"),
    ops_root="/opt/venv/lib",
    steps=6,
    versions={"torch": "2.13.0+cpu"},
)
LOSSES = [4.8, 4.7, 4.5, 4.3, 4.2, 4.0]
NORMS = [0.65, 0.69, 0.65, 0.62, 0.63, 0.67]
REFERENCE: dict[str, Any] = {
    "mode": "reference",
    "clip": 0.5,
    "losses": [*LOSSES, 3.9],
    "grad_norms": [*NORMS, 0.6],
    "param_numels": [4365, 45, 181],
}


def rank(number: int) -> dict[str, Any]:
    """The facts of a faultless rank."""
    share = 2183 + 23 + 91
    ops = "/opt/venv/lib/python3.11/site-packages/deepspeed/ops"
    return {
        "mode": "zero", "nonce": "n1", "hostname": "c", "pid": 10 + number, "rank": number,
        "uid": 0, "world_size": 2, "backend": "gloo", "launcher": "torchrun", "dtype": "fp32",
        "versions": {"torch": "2.13.0+cpu"}, "stage": 3,
        "zero_optimizer": "DeepSpeedZeroOptimizer_Stage3", "optimizer": "FusedAdam",
        "param_numels": [4365, 45, 181], "local_param_numel": share, "live_param_numel": 0,
        "fp32_partition_numel": share, "moments_numel": 2 * share, "clip": 0.5,
        "losses": list(LOSSES), "grad_norms": list(NORMS), "batches": f"data{number}",
        "checksums": {"3": "three", "6": "six"}, "jit_files": [], "first_step": 0,
        "ops": {
            "fused_adam": f"{ops}/adam/fused_adam_op.so",
            "deepspeed_shm_comm": f"{ops}/comm/deepspeed_shm_comm_op.so",
        },
    }  # fmt: skip


def problems_with(**changes: Any) -> list[str]:
    """The verdict when both ranks report ``changes``."""
    return verify([rank(0) | changes, rank(1) | changes], REFERENCE, EXPECT)


def test_a_faultless_run_has_no_problems() -> None:
    assert verify([rank(0), rank(1)], REFERENCE, EXPECT) == []


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"nonce": "old"}, "world: nonce"),
        ({"backend": "mpi"}, "world: backend"),
        ({"launcher": "none"}, "world: launcher"),
        ({"world_size": 1}, "world: world_size"),
        ({"pid": 7}, "world: two ranks"),
        ({"versions": {"torch": "2.12.0"}}, "world: torch"),
        ({"stage": 0, "zero_optimizer": "FusedAdam"}, "sharding: stage 0"),
        ({"stage": 2}, "sharding: stage 2"),
        ({"live_param_numel": 45}, "sharding: 45"),
        ({"local_param_numel": 4591}, "sharding: local_param_numel"),
        ({"fp32_partition_numel": 4591}, "sharding: fp32_partition_numel"),
        ({"moments_numel": 2 * 4591}, "sharding: moments_numel"),
        ({"param_numels": [4365, 45]}, "sharding: the model"),
        ({"optimizer": "AdamW"}, "optimizer: AdamW"),
        ({"ops": {}}, "kernels: fused_adam was not loaded"),
        ({"ops": {"fused_adam": "/tmp/ext/fused_adam.so"}}, "kernels: fused_adam is not a pre"),
        ({"jit_files": ["fused_adam/build.ninja"]}, "kernels: compiled"),
        ({"losses": LOSSES[:5]}, "parity: 5 of 6 steps"),
        ({"losses": [*LOSSES[:5], float("nan")]}, "parity: a loss is not finite"),
        ({"losses": [*LOSSES[:5], 4.0002]}, "parity: loss 4.0002 at step 6"),
        ({"clip": 1.0}, "parity: the reference"),
        ({"grad_norms": [*NORMS[:5], 0.7]}, "parity: gradient norm"),
        ({"grad_norms": [None] * 6}, "parity: gradient norms are missing"),
        ({"batches": "same"}, "agreement: ranks trained on the same data"),
    ],
)
def test_finds(changes: dict[str, Any], check: str) -> None:
    assert any(p.startswith(check) for p in problems_with(**changes)), problems_with(**changes)


def test_a_rank_without_result_is_found() -> None:
    assert any("ranks [0]" in p for p in verify([rank(0)], REFERENCE, EXPECT))
    assert any("ranks []" in p for p in verify([], REFERENCE, EXPECT))


def test_ranks_with_different_models_are_found() -> None:
    other = rank(1) | {"checksums": {"3": "three", "6": "other"}}
    assert verify([rank(0), other], REFERENCE, EXPECT) == ["agreement: ranks differ in checksums"]


def test_a_missing_fact_is_a_problem_and_not_an_exception() -> None:
    first, second = rank(0), rank(1)
    del first["moments_numel"], second["moments_numel"]
    assert any("moments_numel" in p for p in verify([first, second], REFERENCE, EXPECT))


def test_one_rank_never_counts_as_sharded() -> None:
    alone = Expect(**{**EXPECT.__dict__, "world_size": 1})
    assert "sharding: one rank shards nothing (rank 0)" in verify([rank(0)], REFERENCE, alone)


def test_bf16_is_compared_loosely_but_compared() -> None:
    expect = Expect(**{**EXPECT.__dict__, "dtype": "bf16"})
    near = [x * 1.01 for x in LOSSES]
    far = [x * 1.05 for x in LOSSES]
    for losses, count in ((near, 0), (far, 2)):
        run = [rank(r) | {"dtype": "bf16", "losses": losses} for r in (0, 1)]
        assert len(verify(run, REFERENCE, expect)) == count


def resumed(number: int) -> dict[str, Any]:
    return rank(number) | {"first_step": 3, "losses": LOSSES[3:], "pid": 90 + number}


def test_a_faithful_resume_has_no_problems() -> None:
    assert verify_resume([rank(0), rank(1)], [resumed(0), resumed(1)]) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_step": 0}, "continued at step 0"),
        ({"pid": 10}, "the same process"),
        ({"losses": [4.3, 4.2, 4.000000001]}, "losses differ"),
        ({"losses": [4.3, 4.2]}, "losses differ"),
        ({"checksums": {"3": "fresh", "6": "six"}}, "parameters differ at step 3"),
        ({"checksums": {"3": "three", "6": "other"}}, "parameters differ at step 6"),
    ],
)
def test_an_unfaithful_resume_is_found(changes: dict[str, Any], message: str) -> None:
    after = [copy.deepcopy(resumed(r)) | changes for r in (0, 1)]
    assert any(message in p for p in verify_resume([rank(0), rank(1)], after))


def test_a_resume_with_other_ranks_is_found() -> None:
    found = verify_resume([rank(0), rank(1)], [resumed(0)])
    assert found == ["resume: 1 ranks continue a run of 2"]
