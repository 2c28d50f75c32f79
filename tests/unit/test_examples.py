"""examples/: manifests fit the real schemas, and everything that they name exists in this checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
from shipped import BY_ID, ROOT

EXAMPLES = ROOT / "examples"
KUBERNETES = EXAMPLES / "kubernetes"
SERVICE, JOB = yaml.safe_load_all((KUBERNETES / "job.yaml").read_text())
TRAINJOB: dict[str, Any] = yaml.safe_load((KUBERNETES / "trainjob.yaml").read_text())
COMPOSE: dict[str, Any] = yaml.safe_load((EXAMPLES / "compose/compose.yaml").read_text())
FILES = sorted(p for p in EXAMPLES.rglob("*") if p.is_file() and "cluster_key" not in p.name)
NAMES = [str(p.relative_to(EXAMPLES)) for p in FILES]

KUBEFLOW = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}


def in_rootfs(path: str) -> list[Path]:
    """Where a file of an image lies in this checkout."""
    return list((ROOT / "rootfs").glob(f"*/{path.lstrip('/')}"))


# -- schemas -------------------------------------------------------------------------------


@pytest.mark.parametrize("document", [SERVICE, JOB], ids=["Service", "Job"])
def test_the_manifests_fit_kubernetes(document: dict[str, Any]) -> None:
    """Strict: an unknown field, which the API server would drop in silence, is an error."""
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_the_validator_finds_a_typing_error() -> None:
    wrong = yaml.safe_load(yaml.safe_dump(JOB))
    wrong["spec"]["completionsMode"] = wrong["spec"].pop("completionMode")
    with pytest.raises(kubernetes_validate.ValidationError, match="completionsMode"):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


def test_the_trainjob_fits_kubeflow() -> None:
    """Its models drop unknown fields, so nothing may be missing after a round trip."""
    read = TrainerV1alpha1TrainJob.from_dict(TRAINJOB)
    assert read is not None
    assert read.to_dict() == TRAINJOB


# -- the Job's parts belong together -------------------------------------------------------

POD = JOB["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def test_the_pods_find_each_other() -> None:
    name = JOB["metadata"]["name"]
    env = {entry["name"]: entry.get("value") for entry in CONTAINER["env"]}
    assert set(env) == KUBEFLOW
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert SERVICE["spec"]["publishNotReadyAddresses"]
    assert SERVICE["spec"]["selector"] == {"job-name": name}  # a label that the Job controller sets
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    assert env["PET_MASTER_ADDR"] == f"{name}-0.{POD['subdomain']}"
    assert [port["port"] for port in SERVICE["spec"]["ports"]] == [int(env["PET_MASTER_PORT"])]
    assert JOB["spec"]["completions"] == JOB["spec"]["parallelism"] == int(env["PET_NNODES"])


def test_the_pods_have_shared_memory_and_no_root() -> None:
    volumes = {volume["name"]: volume["emptyDir"] for volume in POD["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in CONTAINER["volumeMounts"]}
    assert mounted["/dev/shm"]["medium"] == "Memory"
    assert POD["securityContext"]["runAsNonRoot"]
    assert "command" not in CONTAINER  # it would replace tini


# -- what they call ------------------------------------------------------------------------

LAUNCH = "import sys; sys.path[:0] = sys.argv.pop(1).split(':'); from trainyard_launch.cli import main"


def dry_run(arguments: list[str], env: dict[str, str]) -> str:
    """What ``launch`` would do with these arguments, in this environment."""
    libraries = ":".join(str(ROOT / "rootfs" / part / "opt/trainyard/lib") for part in ("common", "launch"))
    local = [str(in_rootfs(word)[0]) if word.startswith("/opt/trainyard/") else word for word in arguments]
    done = subprocess.run(
        [sys.executable, "-c", f"{LAUNCH}; sys.exit(main(sys.argv[1:]))", libraries, "--dry-run", *local],
        env={"PATH": os.environ["PATH"], "DS_ACCELERATOR": "cpu"} | env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr  # 1: this machine is not fit; the plan is printed first
    return done.stdout


@pytest.mark.parametrize("index", [0, 1])
def test_launch_understands_the_jobs_environment(index: int) -> None:
    env = {entry["name"]: entry.get("value", str(index)) for entry in CONTAINER["env"]}
    assert CONTAINER["args"][0] == "launch"
    told = dry_run(CONTAINER["args"][1:], env)
    assert re.search(rf"nodes: +2, this is number {index}; master zero3-0\.zero3:29500", told), told
    assert re.search(r"ranks: +2 on this node", told), told


def test_launch_understands_what_kubeflow_trainer_sets() -> None:
    trainer = TRAINJOB["spec"]["trainer"]
    assert trainer["command"][0] == "launch"
    env = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "zero3-node-0-0.zero3",
        "PET_MASTER_PORT": "29400",
    }
    assert set(env) == KUBEFLOW
    told = dry_run(trainer["command"][1:], env)
    assert re.search(r"nodes: +2, this is number 1; master zero3-node-0-0\.zero3:29400", told), told


def test_the_hostfile_names_the_services_of_compose() -> None:
    lines = (EXAMPLES / "compose/hostfile").read_text().splitlines()
    hosts = [re.fullmatch(r"(\S+) slots=\d+", line) for line in lines]
    assert [host and host[1] for host in hosts] == list(COMPOSE["services"])
    for name, service in COMPOSE["services"].items():
        assert service["hostname"] == name
        assert service["secrets"] == list(COMPOSE["secrets"])
    assert "SSH_CLUSTER_KEY_FILE" in in_rootfs("usr/local/bin/start-sshd")[0].read_text()
    for name in COMPOSE["secrets"]:
        assert f"/run/secrets/{name}" in in_rootfs("usr/local/bin/start-sshd")[0].read_text()


@pytest.mark.parametrize("name", NAMES)
def test_images_and_files_that_are_named_exist(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    for image_id in re.findall(r"\btrainyard:([a-z0-9-]+)", text):
        row = BY_ID[image_id]
        assert row.has_launch, image_id
        assert row.has_deepspeed, image_id
    for path in re.findall(r"/opt/trainyard/[\w./-]*\w", text):
        assert in_rootfs(path), path


@pytest.mark.parametrize("name", NAMES)
def test_options_of_the_trainer_exist(name: str) -> None:
    trainer = in_rootfs("opt/trainyard/examples/train_zero3.py")[0].read_text()
    text = (EXAMPLES / name).read_text().replace("\\\n", " ")
    for line in re.findall(r"train_zero3\.py(.*)", text):
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]+", line):
            assert f'"{option}"' in trainer, option


@pytest.mark.parametrize("name", ["compose/run.sh", "slurm/train.sbatch"])
def test_scripts_are_valid_bash(name: str) -> None:
    subprocess.run(["bash", "-n", str(EXAMPLES / name)], check=True)
    assert (EXAMPLES / name).read_text().startswith("#!/usr/bin/env bash\n")
