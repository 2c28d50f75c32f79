"""examples/slurm under a real Slurm: two containers are its two nodes.

Slurm comes from the distribution, installed on top of the image.  It does not confine jobs by cgroups
here, since containers may not make any; everything else is as on a cluster.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainyard import engine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "image"))

from verify_training import Expect, Facts, verify

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/slurm"
IMAGE = os.environ.get("IMAGE", "trainyard:cpu-pt213")
HOME = "/home/trainyard"
TRAINER = "/opt/trainyard/examples/train_zero3.py"
STEPS = 8

DOCKERFILE = f"""
FROM {IMAGE}
RUN apt-get update && apt-get install -y --no-install-recommends slurm-wlm munge
COPY slurm.conf cgroup.conf /etc/slurm/
COPY start /usr/local/sbin/start
"""  # munge's package makes the key that both nodes then share

SLURM_CONF = """
ClusterName=test
SlurmctldHost=node1
SlurmUser=root
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
# As many CPUs as the example asks for, whatever this machine has.
SlurmdParameters=config_overrides
NodeName=node[1-2] CPUs=2
PartitionName=main Nodes=ALL Default=YES State=UP
"""
# Whether the host has cgroup v1 or v2: slurmd only has to load a plugin that it does not use.
CGROUP_CONF = "CgroupPlugin=cgroup/v1\n"

START = """
set -e
install -d -o munge -g munge -m 755 /run/munge
runuser -u munge -- munged
mkdir -p /var/spool/slurmctld /var/spool/slurmd
if [ "$HOSTNAME" = node1 ]; then slurmctld; fi
slurmd -N "$HOSTNAME"
"""


@dataclass(frozen=True)
class Cluster:
    """Two nodes, by container name."""

    docker: engine.Engine
    names: tuple[str, str]

    def on_node1(self, *command: str, user: str = "trainyard") -> str:
        """Run a command where jobs are submitted."""
        done = self.docker.cli(
            "exec", "--user", user, "--workdir", HOME, self.names[0], "timeout", "240", *command
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        """What the daemons said last."""
        told = [
            self.docker.cli("exec", name, "sh", "-c", "tail -n 20 /var/log/slurm*.log") for name in self.names
        ]
        return "\n".join(done.stdout for done in told)


def must(done: subprocess.CompletedProcess[str]) -> None:
    """A step of the preparation."""
    assert done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"


@pytest.fixture
def cluster(docker: engine.Engine, tmp_path: Path) -> Iterator[Cluster]:
    """Slurm on two nodes with one home; nothing of it is left at the end."""
    mark = uuid.uuid4().hex[:8]
    tag, network, home = f"slurm-test:{mark}", f"slurm-{mark}", f"slurm-home-{mark}"
    names = (f"slurm-{mark}-1", f"slurm-{mark}-2")
    for name, text in {
        "Dockerfile": DOCKERFILE, "slurm.conf": SLURM_CONF, "cgroup.conf": CGROUP_CONF, "start": START,
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    try:
        must(docker.cli("buildx", "build", "--load", "--quiet", "--tag", tag, str(tmp_path)))
        must(docker.cli("network", "create", network))
        for number, name in enumerate(names, start=1):
            host = f"node{number}"
            must(
                docker.cli(
                    "run", "--detach", "--name", name, "--hostname", host, "--network", network,
                    "--network-alias", host, "--shm-size", "1g", "--volume", f"{home}:{HOME}",
                    tag, "sleep", "infinity",
                )
            )  # fmt: skip
        for name in names:
            must(docker.cli("exec", name, "bash", "/usr/local/sbin/start"))
        found = Cluster(docker, names)
        until = time.monotonic() + 60
        while found.on_node1("sinfo", "--noheader", "--format=%t").split() != ["idle"]:
            assert time.monotonic() < until, found.logs()
            time.sleep(1)
        yield found
    finally:
        docker.cli("rm", "--force", "--volumes", *names)
        docker.cli("network", "rm", network)
        docker.cli("volume", "rm", home)
        docker.cli("image", "rm", tag)


def test_a_batch_job_trains_on_two_nodes(cluster: Cluster) -> None:
    """Four tasks on two nodes are four ranks, with the losses of a single process."""
    must(cluster.docker.cli("cp", str(EXAMPLE / "train.sbatch"), f"{cluster.names[0]}:{HOME}/train.sbatch"))
    job = cluster.on_node1(
        "sbatch", "--parsable", "--wait", "train.sbatch", "--steps", str(STEPS), "--nonce", "slurm"
    ).strip()
    script = f"cd results-{job} && for file in rank_*.json; do tr -d '\\n' < $file; echo; done"
    results: list[Facts] = [json.loads(line) for line in cluster.on_node1("sh", "-c", script).splitlines()]
    assert {facts["rank"]: facts["hostname"] for facts in results} == {
        0: "node1", 1: "node1", 2: "node2", 3: "node2",
    }  # fmt: skip
    cluster.on_node1("python", TRAINER, "--reference", "--steps", str(STEPS), "--result-dir", "reference")
    reference: Facts = json.loads(cluster.on_node1("cat", "reference/rank_0.json"))
    expect = Expect(
        nonce="slurm",
        world_size=4,
        backend="gloo",
        launcher="none",  # each task becomes its rank: no torchrun in between
        optimizer="FusedAdam",
        ops=("fused_adam", "deepspeed_shm_comm"),
        ops_root="/opt/venv",
        steps=STEPS,
        uid=1000,
    )
    assert verify(results, reference, expect) == []
    assert "step 8: loss" in cluster.on_node1("cat", f"zero3-{job}.log")
