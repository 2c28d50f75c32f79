"""Every configuration in /opt/trainyard/configs is loaded and trained with, as it lies there.

The plain ones with the example trainer, compared step by step with one process of plain torch; the
``-auto`` ones with the real Hugging Face Trainer, installed from the package index on top of the image.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from containers import VENV, Container, Image, Ran
from docker.types import Mount
from test_contract import last_json, pip_options
from test_training import COLLECT, TIMEOUT, WORLD_SIZE, Plan, Run, launch, with_deepspeed
from verify_training import Expect, Facts, verify

HERE = Path(__file__).parent
FOLDER = "/opt/trainyard/configs"
SOURCE = HERE.parents[1] / "rootfs/deepspeed" / FOLDER.lstrip("/")
CONFIGS: dict[str, dict[str, Any]] = {
    p.stem: json.loads(p.read_text()) for p in sorted(SOURCE.glob("*.json"))
}

STEPS = 6
BF16 = 2  # bytes
FP32_STATES = 3  # master weights and two moments


def offload(name: str, what: str) -> str:
    """The device that a configuration gives for ``optimizer`` or ``param``."""
    device: str = CONFIGS[name]["zero_optimization"].get(f"offload_{what}", {}).get("device", "none")
    return device


AUTO = [name for name in CONFIGS if name.endswith("-auto")]
PLAIN = [name for name in CONFIGS if name not in AUTO]
NVME = [name for name in CONFIGS if "nvme" in (offload(name, "optimizer"), offload(name, "param"))]
IN_MEMORY = [name for name in PLAIN if name not in NVME]
PLAIN_NVME = [name for name in PLAIN if name in NVME]


# -- the files -----------------------------------------------------------------------------


@with_deepspeed
def test_the_image_has_these_files_and_no_others(image: Image) -> None:
    """So the tests below, which are made from the checkout's files, are about the image's."""
    assert IN_MEMORY
    assert PLAIN_NVME
    there = image.exec(f"cd {FOLDER} && ls *.json").ok().split()
    read = {name: json.loads(image.exec(f"cat {FOLDER}/{name}").ok()) for name in there}
    assert read == {f"{name}.json": config for name, config in CONFIGS.items()}
    assert image.exec(f"test -s {FOLDER}/README.md").rc == 0


def keys(value: Any, path: str = "") -> set[str]:
    """Every key, with the path to it."""
    if not isinstance(value, dict):
        return {path}
    return {found for key, part in value.items() for found in keys(part, f"{path}.{key}")}


@with_deepspeed
@pytest.mark.parametrize("name", AUTO)
def test_the_auto_form_sets_what_the_plain_form_sets(image: Image, name: str) -> None:
    plain, auto = keys(CONFIGS[name.removesuffix("-auto")]), keys(CONFIGS[name])
    split = {".optimizer.params.betas"}
    assert auto - {".train_batch_size"} - split == plain - split


@with_deepspeed
def test_deepspeed_reads_every_key_and_warns_of_none(image: Image, plan: Plan) -> None:
    probe(image.container)
    files = [f"{FOLDER}/{name}.json" for name in PLAIN]
    found = last_json(image.exec(["python", PROBE, "load", *files], env=plan.env).ok())
    for name, path in zip(PLAIN, files, strict=True):
        stage = CONFIGS[name]["zero_optimization"]["stage"]
        assert found[path] == {"unread": [], "warnings": [], "stage": stage}, name


# -- plain: the example trainer ------------------------------------------------------------

PROBE = "/tmp/config_probe.py"


def probe(container: Container) -> None:
    """Put the script into the container."""
    container.put((HERE / "config_probe.py").read_text(), PROBE)


def start(
    container: Container, plan: Plan, launcher: list[str], config: str, *arguments: str
) -> tuple[Ran, str]:
    """Train with a configuration; how it ended, and the run's mark."""
    probe(container)
    nonce = uuid.uuid4().hex[:12]
    folder = f"/tmp/run-{nonce}"
    env = {"PATH": f"{VENV}/bin", "OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": f"{folder}/extensions"}
    command = [*launcher, PROBE, "train", "--engine-config", config, "--steps", str(STEPS), "--nonce", nonce]
    ran = container.exec(
        [*command, "--result-dir", f"{folder}/results", *arguments], env=env | dict(plan.env), timeout=TIMEOUT
    )
    return ran, nonce


def train(container: Container, plan: Plan, launcher: list[str], config: str, *arguments: str) -> Run:
    """Train with a configuration; every rank's facts."""
    ran, nonce = start(container, plan, launcher, config, *arguments)
    ran.ok()
    folder = f"/tmp/run-{nonce}"
    return Run(nonce, json.loads(container.python(COLLECT, f"{folder}/results").ok()), folder)


def fails_on_gloo(image: Image, plan: Plan, name: str) -> bool:
    """Stages 1 and 2 where this DeepSpeed cannot train them on gloo (compat/deepspeed.yaml)."""
    unable = not image.row.zero_1_2_on_gloo and plan.backend == "gloo"
    return unable and CONFIGS[name]["zero_optimization"]["stage"] in (1, 2)


@pytest.fixture(scope="session")
def plan(image: Image) -> Plan:
    """How this image trains here."""
    return Plan.of(image)


@pytest.fixture(scope="session")
def reference(image: Image, plan: Plan) -> Facts:
    """One process of plain torch, with the optimizer settings that all plain configurations share."""
    assert len({json.dumps(CONFIGS[name]["optimizer"]) for name in PLAIN}) == 1
    assert len({CONFIGS[name]["gradient_clipping"] for name in PLAIN}) == 1
    config = f"{FOLDER}/{PLAIN[0]}.json"
    (facts,) = train(image.container, plan, launch("none"), config, "--reference").results
    assert facts["versions"]["deepspeed"] is None
    return facts


def expected(name: str, plan: Plan, run: Run) -> Expect:
    """Who must have run, on what, with which kernels."""
    ops: tuple[str, ...] = plan.ops
    optimizer = plan.optimizer
    if offload(name, "optimizer") != "none":
        optimizer, ops = "DeepSpeedCPUAdam", ("cpu_adam", *plan.ops[1:])
    if name in NVME:
        ops = (*ops, "async_io")
    return run.expect(plan, "torchrun", optimizer=optimizer, ops=ops, steps=STEPS, dtype="bf16")


def check(name: str, run: Run, reference: Facts, expect: Expect) -> None:
    """The run is what the configuration says: stage, optimizer, placement, and the right losses."""
    # verify() judges ZeRO-3 with nothing left whole; how these shard is judged below.
    assert [p for p in verify(run.results, reference, expect) if not p.startswith("sharding")] == []
    config, world = CONFIGS[name], WORLD_SIZE
    stage, params = config["zero_optimization"]["stage"], config["optimizer"]["params"]
    for facts in run.results:
        share = sum(math.ceil(n / world) for n in facts["param_numels"])
        whole = sum(facts["param_numels"])
        assert facts["stage"] == stage
        assert facts["zero_optimizer"] == "DeepSpeedZeroOptimizer" + ("_Stage3" if stage == 3 else "")
        settings = [*params["betas"], params["eps"], params["weight_decay"]]
        assert facts["betas_eps_decay"] == [settings] * len(facts["betas_eps_decay"])
        assert facts["clip"] == config["gradient_clipping"]
        for what in ("optimizer", "param"):
            assert facts[f"offload_{what}"] == offload(name, what)
        if offload(name, "param") != "none" or expect.backend == "gloo":
            assert facts["partitions_on"] == ["cpu"]
        else:
            assert facts["partitions_on"] == ["cuda"]
        if name in NVME:
            check_swapped(facts, share)
            continue
        assert facts["local_param_numel"] == (share if stage == 3 else whole)
        assert facts["fp32_partition_numel"] == share
        assert facts["moments_numel"] == 2 * share
        if stage == 3:
            limit = float(config["zero_optimization"]["stage3_param_persistence_threshold"])
            small = sum(n for n in facts["param_numels"] if n <= limit)
            assert facts["live_param_numel"] == small < whole


def check_swapped(facts: Facts, share: int) -> None:
    """Nothing of the optimizer is in memory, and all of it lies in files of the right size."""
    assert facts["swaps_optimizer"]
    assert facts["fp32_partition_numel"] == facts["moments_numel"] == 0
    assert facts["swapped_out"] > 0  # parameters that are nowhere but in a file between two steps
    assert all(facts["swapped_bytes"].values())
    sizes: dict[str, int] = {}
    for path, size in facts["swapped_bytes"].items():
        if f"/rank{facts['rank']}/" in path and "_gradient_" not in path:
            kind = "param" if path.endswith("_param.tensor.swp") else "optimizer"
            sizes[kind] = sizes.get(kind, 0) + size
    assert sizes["param"] >= facts["swapped_out"] * 1024**2
    assert sizes["optimizer"] >= FP32_STATES * 4 * share


def say(image: Image, plan: Plan, run: Run, name: str) -> None:
    """Put a run into the summary."""
    first, seconds = run.results[0], max(facts["seconds"] for facts in run.results)
    image.note(
        f"{name}.json: {plan.label}, {first['world_size']} ranks, stage {first['stage']},"
        f" {first['optimizer']}, optimizer offload {first['offload_optimizer']},"
        f" loss {first['losses'][0]:.3f} -> {first['losses'][-1]:.3f}, {seconds:.1f} s"
    )


@with_deepspeed
@pytest.mark.parametrize("name", IN_MEMORY)
def test_trains_with(image: Image, plan: Plan, reference: Facts, name: str) -> None:
    if fails_on_gloo(image, plan, name):  # shown, so that a change shows too
        ran, _ = start(image.container, plan, launch("torchrun"), f"{FOLDER}/{name}.json")
        assert ran.rc != 0
        assert "SplitBackward0 is a view and is being modified inplace" in ran.text
        image.note(
            f"{name}.json: {plan.label}: fails, as known of DeepSpeed {image.row.deepspeed}; needs NCCL"
        )
        return
    run = train(image.container, plan, launch("torchrun"), f"{FOLDER}/{name}.json")
    check(name, run, reference, expected(name, plan, run))
    say(image, plan, run, name)


@contextmanager
def with_nvme(image: Image, **options: Any) -> Iterator[Container]:
    """A container with a volume at /nvme: a real file system, since overlayfs has no O_DIRECT everywhere.

    And with the right to lock memory: /dev/shm aside, DeepSpeed locks every buffer that it reads into.
    """
    mounts = [*options.pop("mounts", ()), Mount("/nvme", None, type="volume")]
    with image.fresh(mounts=mounts, cap_add=["IPC_LOCK"], **options) as container:
        yield container


def train_nvme(image: Image, plan: Plan, reference: Facts, name: str) -> None:
    with with_nvme(image) as container:
        run = train(container, plan, launch("torchrun"), f"{FOLDER}/{name}.json")
        left = container.exec("find /nvme -name '*.swp' -size +0").ok().split()
    check(name, run, reference, expected(name, plan, run))
    assert left
    say(image, plan, run, name)


@with_deepspeed
@pytest.mark.only("is_cpu")
@pytest.mark.parametrize("name", PLAIN_NVME)
def test_trains_from_nvme_with(image: Image, plan: Plan, reference: Facts, name: str) -> None:
    train_nvme(image, plan, reference, name)


@with_deepspeed
@pytest.mark.only("gpus_given")
@pytest.mark.parametrize("name", PLAIN_NVME)
def test_trains_from_nvme_on_gpus_with(image: Image, plan: Plan, reference: Facts, name: str) -> None:
    train_nvme(image, plan, reference, name)


@with_deepspeed
@pytest.mark.only("not is_cpu")
@pytest.mark.only("not gpus_given")
def test_the_cpu_twin_has_no_async_io(image: Image) -> None:
    """Why the NVMe configurations are read but not trained with here: it shows when that changes."""
    assert image.twin is not None
    assert not list(image.twin.glob("deepspeed/ops/aio/*.so"))
    image.note(f"{', '.join(NVME)}: read, not trained with: the CPU twin has no async_io, no GPU was given")


# -- auto: the Hugging Face Trainer --------------------------------------------------------

TRAINER_PROBE = "/tmp/trainer_probe.py"
TRAINER_CLIP, TRAINER_BETAS, TRAINER_DECAY = 0.7, [0.9, 0.95], 0.1  # what trainer_probe.py asks for


def train_auto(image: Image, plan: Plan, names: list[str]) -> None:
    """One container for all: installing takes a while."""
    names = [name for name in names if not fails_on_gloo(image, plan, name)]  # test_trains_with notes them
    assert names
    with with_nvme(image, **pip_options()) as container:
        container.exec("pip install -q transformers accelerate", timeout=400).ok()
        container.put((HERE / "trainer_probe.py").read_text(), TRAINER_PROBE)
        for name in names:
            result = f"/tmp/trained-{name}"
            command = [*launch("torchrun"), TRAINER_PROBE, f"{FOLDER}/{name}.json", result]
            env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | dict(plan.env)
            container.exec(command, env=env, timeout=TIMEOUT).ok()
            results = json.loads(container.python(COLLECT, result).ok())
            check_auto(name, results)
            losses = results[0]["losses"]
            image.note(
                f"{name}.json: Hugging Face Trainer, {plan.label}, {len(results)} ranks, stage"
                f" {results[0]['stage']}, {results[0]['optimizer']}, loss {losses[0]:.3f} -> {losses[-1]:.3f}"
            )


def check_auto(name: str, results: list[Facts]) -> None:
    """DeepSpeed ran, as the configuration and the Trainer's arguments say together."""
    assert [facts["rank"] for facts in results] == list(range(WORLD_SIZE))
    on_cpu = offload(name, "optimizer") != "none"
    for facts in results:
        assert facts["is_deepspeed"], facts["engine"]
        assert facts["world_size"] == WORLD_SIZE
        assert facts["stage"] == CONFIGS[name]["zero_optimization"]["stage"]
        assert facts["optimizer"] == ("DeepSpeedCPUAdam" if on_cpu else "FusedAdam")
        assert facts["bf16"]
        assert facts["autos"] == []
        assert facts["clip"] == TRAINER_CLIP
        assert facts["betas"] == TRAINER_BETAS
        assert facts["weight_decay"] == TRAINER_DECAY
        assert facts["steps"] == len(facts["losses"]) == 3
        assert all(map(math.isfinite, facts["losses"]))
        assert facts["micro_batch"] == 2
        assert bool(facts["swapped_bytes"]) == (name in NVME)
        assert all(facts["swapped_bytes"].values())


@with_deepspeed
@pytest.mark.only("is_cpu")
def test_the_trainer_takes_every_auto_form(image: Image, plan: Plan) -> None:
    train_auto(image, plan, AUTO)


@with_deepspeed
@pytest.mark.only("gpus_given")
def test_the_trainer_takes_every_auto_form_on_gpus(image: Image, plan: Plan) -> None:
    train_auto(image, plan, AUTO)


@with_deepspeed
@pytest.mark.only("not is_cpu")
@pytest.mark.only("not gpus_given")
def test_the_trainer_takes_every_auto_form_without_nvme(image: Image, plan: Plan) -> None:
    train_auto(image, plan, [name for name in AUTO if name not in NVME])
