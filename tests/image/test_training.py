"""Each image trains: ZeRO-3 on several processes, judged by verify_training.

On a GPU host (``--gpus``) the processes use NCCL.  Elsewhere they use gloo, and CUDA images
borrow the CPU twin: the same DeepSpeed release with its ops built for the CPU.  The summary
says which it was.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from containers import TWIN, VENV, Container, Image, required_gpus
from verify_training import Expect, Facts, verify, verify_resume

TRAINER = "/opt/trainyard/examples/train_zero3.py"
STEPS = 8
SAVE_AT = 4
WORLD_SIZE = 2
TIMEOUT = 240

with_deepspeed = pytest.mark.only("has_deepspeed")


@dataclass(frozen=True)
class Plan:
    """How an image trains on this host."""

    backend: str
    label: str  # for the summary
    env: Mapping[str, str]
    ops_root: str
    optimizer: str = "FusedAdam"
    ops: tuple[str, ...] = ("fused_adam",)

    @classmethod
    def of(cls, image: Image) -> Plan:
        """NCCL with enough GPUs, else gloo."""
        site = image.row.site_packages
        comm = ("fused_adam", "deepspeed_shm_comm")
        if image.row.is_cpu:
            return cls("gloo", "gloo", {}, site, ops=comm)
        if image.gpus and image.visible_gpus >= WORLD_SIZE:
            return cls("nccl", f"NCCL on {WORLD_SIZE} GPUs", {}, site)
        assert image.twin, f"no CPU twin of {image.row.id} and fewer than {WORLD_SIZE} GPUs"
        env = {"PYTHONPATH": TWIN, "DS_ACCELERATOR": "cpu"}
        return cls("gloo", "gloo, CPU twin", env, TWIN, ops=comm)


@dataclass(frozen=True)
class Run:
    """A finished training run."""

    nonce: str
    results: list[Facts]
    folder: str  # in the container: results, checkpoints and the kernel cache

    def expect(self, plan: Plan, launcher: str, **changes: Any) -> Expect:
        """What a faultless run of this plan looks like."""
        settings: dict[str, Any] = {
            "nonce": self.nonce,
            "world_size": WORLD_SIZE,
            "backend": plan.backend,
            "launcher": launcher,
            "optimizer": plan.optimizer,
            "ops": plan.ops,
            "ops_root": plan.ops_root,
            "steps": STEPS,
        }
        return Expect(**settings | changes)


COLLECT = """
import json, pathlib, sys
files = sorted(pathlib.Path(sys.argv[1]).glob("rank_*.json"))
print(json.dumps([json.loads(file.read_text()) for file in files]))
"""


def launch(launcher: str, processes: int = WORLD_SIZE) -> list[str]:
    """The start of a launcher's command line."""
    return {
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node", str(processes)],
        "deepspeed": ["deepspeed", "--num_gpus", str(processes)],
        "none": ["python"],
    }[launcher]


def train(
    container: Container,
    plan: Plan,
    launcher: Sequence[str],
    *arguments: str,
    checkpoints: str | None = None,
    user: str = "",
) -> Run:
    """Run the example trainer; fail the test if it fails, and collect every rank's facts.

    No compiler is in reach, and the kernel cache is an empty folder of this run alone.
    """
    nonce = uuid.uuid4().hex[:12]
    folder = f"/tmp/run-{nonce}"
    env = {
        "PATH": f"{VENV}/bin",
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": f"{folder}/extensions",
        **plan.env,
    }
    command = [*launcher, TRAINER, "--nonce", nonce, "--result-dir", f"{folder}/results"]
    if not {"--steps"} & set(arguments):
        command += ["--steps", str(STEPS)]
    if checkpoints is not None:
        command += ["--checkpoint-dir", checkpoints]
    container.exec([*command, *arguments], env=env, timeout=TIMEOUT, user=user, workdir="/tmp").ok()
    collected = container.python(COLLECT, f"{folder}/results", user=user).ok()
    return Run(nonce, json.loads(collected), folder)


@pytest.fixture(scope="session")
def plan(image: Image) -> Plan:
    """How this image trains here."""
    return Plan.of(image)


@pytest.fixture(scope="session")
def reference(image: Image, plan: Plan) -> Facts:
    """One process of plain torch on the same data; it needs no DeepSpeed."""
    (facts,) = train(image.container, plan, launch("none"), "--reference").results
    assert facts["versions"]["torch"].partition("+")[0] == image.row.torch.version
    assert facts["versions"]["deepspeed"] is None
    return facts


@pytest.fixture(scope="session")
def full_run(image: Image, plan: Plan) -> Run:
    """An uninterrupted ZeRO-3 run that saves a checkpoint on its way."""
    folder = f"/tmp/checkpoints-{uuid.uuid4().hex[:12]}"
    run = train(image.container, plan, launch("torchrun"), "--save-at", str(SAVE_AT), checkpoints=folder)
    return Run(run.nonce, run.results, folder)


def versions(image: Image) -> dict[str, str]:
    """The versions that every rank must have run."""
    torch = image.python("import torch; print(torch.__version__)").ok().strip()
    return {"torch": torch, "deepspeed": image.row.deepspeed or ""}


def say(image: Image, plan: Plan, run: Run, what: str) -> None:
    """Put a run into the summary."""
    first = run.results[0]
    seconds = max(facts["seconds"] for facts in run.results)
    image.note(
        f"{what}: {plan.label}, {first['world_size']} ranks, stage {first['stage']},"
        f" {first['optimizer']}, loss {first['losses'][0]:.3f} -> {first['losses'][-1]:.3f},"
        f" {seconds:.1f} s"
    )


# -- it trains -----------------------------------------------------------------------------


@with_deepspeed
def test_trains_with_torchrun(image: Image, plan: Plan, full_run: Run, reference: Facts) -> None:
    expect = full_run.expect(plan, "torchrun", versions=versions(image))
    assert verify(full_run.results, reference, expect) == []
    say(image, plan, full_run, "torchrun")


@with_deepspeed
def test_trains_with_the_deepspeed_launcher(image: Image, plan: Plan, reference: Facts) -> None:
    run = train(image.container, plan, launch("deepspeed"))
    expect = run.expect(plan, "deepspeed", versions=versions(image))
    assert verify(run.results, reference, expect) == []
    say(image, plan, run, "deepspeed")


@with_deepspeed
def test_trains_with_the_optimizer_on_the_cpu(image: Image, plan: Plan, reference: Facts) -> None:
    run = train(image.container, plan, launch("torchrun"), "--offload-optimizer")
    ops = ("cpu_adam", *plan.ops[1:])
    expect = run.expect(plan, "torchrun", optimizer="DeepSpeedCPUAdam", ops=ops)
    assert verify(run.results, reference, expect) == []
    say(image, plan, run, "torchrun, optimizer offload")


@with_deepspeed
def test_trains_in_bf16(image: Image, plan: Plan, reference: Facts) -> None:
    run = train(image.container, plan, launch("torchrun"), "--dtype", "bf16")
    assert verify(run.results, reference, run.expect(plan, "torchrun", dtype="bf16")) == []
    say(image, plan, run, "torchrun, bf16")


@with_deepspeed
@pytest.mark.parametrize("user", ["0:0", "12345:12345"])
def test_trains_without_network(image: Image, plan: Plan, reference: Facts, user: str) -> None:
    """As root, and as a user that the image does not know."""
    with image.fresh(network_mode="none", user=user) as container:
        # Nothing resolves the container's own name there, so torchrun is told its address
        # (https://github.com/pytorch/pytorch/issues/150532).
        run = train(container, plan, [*launch("torchrun"), "--local-addr", "127.0.0.1"])
    expect = run.expect(plan, "torchrun", uid=int(user.split(":")[0]))
    assert verify(run.results, reference, expect) == []
    say(image, plan, run, f"torchrun, no network, user {user}")


@with_deepspeed
def test_resumes_bit_for_bit(image: Image, plan: Plan, full_run: Run, reference: Facts) -> None:
    """New processes, other initial weights: what counts comes from the checkpoint."""
    run = train(image.container, plan, launch("torchrun"), "--resume", checkpoints=full_run.folder)
    assert [facts["first_step"] for facts in run.results] == [SAVE_AT] * WORLD_SIZE
    assert verify_resume(full_run.results, run.results) == []


# -- FSDP2, in every image ------------------------------------------------------------------


@pytest.mark.only("trains_fsdp2_here")
def test_trains_with_fsdp2(image: Image) -> None:
    """Torch alone: also what an image without DeepSpeed is for."""
    gpu = bool(image.gpus) and image.visible_gpus >= WORLD_SIZE
    folder = f"/tmp/fsdp2-{uuid.uuid4().hex[:12]}"
    container = image.container
    container.put((Path(__file__).parent / "fsdp2_probe.py").read_text(), "/tmp/fsdp2_probe.py")
    env = {"PATH": f"{VENV}/bin", "OMP_NUM_THREADS": "1"}
    steps, device = str(STEPS), "cuda" if gpu else "cpu"
    command = [*launch("torchrun"), "/tmp/fsdp2_probe.py", folder, steps, device]
    container.exec(command, env=env, timeout=TIMEOUT).ok()
    reference = train(container, Plan("", "", {} if gpu else {"DS_ACCELERATOR": "cpu"}, ""),
                      launch("none"), "--reference").results[0]  # fmt: skip
    results = json.loads(container.python(COLLECT, folder).ok())

    assert [facts["rank"] for facts in results] == list(range(WORLD_SIZE))
    for facts in results:
        assert facts["world_size"] == WORLD_SIZE
        assert facts["backend"] == ("nccl" if gpu else "gloo")
        assert facts["sharded"]
        share = fsdp2_share(facts["shapes"], facts["rank"])
        assert facts["local_numel"] == facts["moments_numel"] == share
        assert facts["losses"] == pytest.approx(reference["losses"], abs=1e-4)
    image.note(f"FSDP2: {'NCCL' if gpu else 'gloo'}, {WORLD_SIZE} ranks, AdamW")


def fsdp2_share(shapes: Sequence[Sequence[int]], rank: int) -> int:
    """Elements of one rank: FSDP2 cuts every parameter along its first dimension."""
    total = 0
    for first, *rest in shapes:
        size = math.ceil(first / WORLD_SIZE)
        total += max(0, min(first - rank * size, size)) * math.prod(rest)
    return total


# -- controls: the judge sees what is wrong -------------------------------------------------


def checks(problems: Sequence[str]) -> set[str]:
    """The names of the checks that found something."""
    return {problem.split(":")[0] for problem in problems}


@with_deepspeed
def test_control_without_zero_is_found(image: Image, plan: Plan, reference: Facts) -> None:
    run = train(image.container, plan, launch("torchrun"), "--stage", "0")
    problems = verify(run.results, reference, run.expect(plan, "torchrun"))
    assert "sharding" in checks(problems)
    assert any(p.startswith("sharding: stage 0") for p in problems)
    assert any("are whole between steps" in p for p in problems)
    assert any("local_param_numel" in p for p in problems)


@with_deepspeed
def test_control_with_one_rank_is_found(image: Image, plan: Plan, reference: Facts) -> None:
    run = train(image.container, plan, launch("torchrun", 1))
    problems = verify(run.results, reference, run.expect(plan, "torchrun"))
    assert any(p.startswith("world: results of ranks [0]") for p in problems)
    assert any(p.startswith("sharding: local_param_numel") for p in problems)


@with_deepspeed
def test_control_with_other_weights_is_found(image: Image, plan: Plan, reference: Facts) -> None:
    run = train(image.container, plan, launch("torchrun"), "--seed", "2")
    assert checks(verify(run.results, reference, run.expect(plan, "torchrun"))) == {"parity"}


# -- GPUs ----------------------------------------------------------------------------------


@pytest.mark.only("gpu_required")
def test_as_many_gpus_as_required_are_visible(image: Image) -> None:
    """``REQUIRE_GPU=n`` makes a missing GPU a failure."""
    assert image.visible_gpus >= required_gpus()


@with_deepspeed
@pytest.mark.only("gpus_given")
def test_a_single_gpu_trains(image: Image, reference: Facts) -> None:
    """One rank on NCCL and the CUDA kernels; that it shards is shown by other tests."""
    plan = Plan("nccl", "NCCL, single GPU", {}, image.row.site_packages)
    run = train(image.container, plan, launch("torchrun", 1))
    problems = verify(run.results, reference, run.expect(plan, "torchrun", world_size=1))
    assert checks(problems) <= {"sharding"}, problems
    assert all("one rank shards nothing" in p for p in problems), problems
    say(image, plan, run, "torchrun")
