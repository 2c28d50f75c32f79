"""examples/compose as it stands: run.sh starts two nodes with the distribution's compose and trains.

Debian 12 has docker-compose 1.29, Debian 13 has 2.26; the file is for both.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainyard import apt, engine

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "image"))

from verify_training import Expect, Facts, verify

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/compose"
IMAGE = os.environ.get("IMAGE", "trainyard:cpu-pt213")
STEPS = 8
RESULTS = "/home/trainyard/results"
TRAINER = "/opt/trainyard/examples/train_zero3.py"
COLLECT = f"cd {RESULTS} && for file in rank_*.json; do tr -d '\\n' < $file; echo; done"


@dataclass(frozen=True)
class Nodes:
    """The example's folder and how to speak to its nodes."""

    folder: Path
    env: dict[str, str]

    def compose(self, *arguments: str, timeout: int = 120) -> subprocess.CompletedProcess[str]:
        """Run compose in the folder."""
        return run([*self.command(), *arguments], self.folder, self.env, timeout)

    def command(self) -> list[str]:
        """As run.sh chooses it."""
        plugin = subprocess.run(
            ["docker", "compose", "version"], env=self.env, capture_output=True, check=False
        )
        return ["docker-compose"] if plugin.returncode else ["docker", "compose"]

    def on_node1(self, *command: str) -> str:
        """Run a command there as the user that trains."""
        done = self.compose("exec", "-T", "--user", "trainyard", "node1", *command)
        assert done.returncode == 0, done.stderr
        return done.stdout


def run(
    command: list[str], folder: Path, env: dict[str, str], timeout: int
) -> subprocess.CompletedProcess[str]:
    """Run, and keep what it says."""
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.fixture
def nodes(tmp_path: Path, docker: engine.Engine) -> Iterator[Nodes]:
    """A copy of the example, since it keeps its key beside itself; everything is removed at the end."""
    folder = tmp_path / f"compose-{uuid.uuid4().hex[:8]}"  # compose names its project after the folder
    shutil.copytree(EXAMPLE, folder)
    found = Nodes(folder, docker.environment | {"IMAGE": IMAGE})
    if found.command() == ["docker-compose"] and shutil.which("docker-compose") is None:
        apt.install(["docker-compose"], print)
    try:
        yield found
    finally:
        found.compose("down", "--volumes", "--timeout", "2")


def test_two_nodes_train_together(nodes: Nodes) -> None:
    """Four ranks on two nodes, and the losses of a single process."""
    done = run(["./run.sh", "--steps", str(STEPS), "--nonce", "example"], nodes.folder, nodes.env, 300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"

    results: list[Facts] = [json.loads(line) for line in nodes.on_node1("sh", "-c", COLLECT).splitlines()]
    assert {facts["rank"]: facts["hostname"] for facts in results} == {
        0: "node1", 1: "node1", 2: "node2", 3: "node2",
    }  # fmt: skip
    reference_dir = "/home/trainyard/reference"
    nodes.on_node1("python", TRAINER, "--reference", "--steps", str(STEPS), "--result-dir", reference_dir)
    reference: Facts = json.loads(nodes.on_node1("cat", f"{reference_dir}/rank_0.json"))
    expect = Expect(
        nonce="example",
        world_size=4,
        backend="gloo",
        launcher="torchrun",
        optimizer="FusedAdam",
        ops=("fused_adam", "deepspeed_shm_comm"),
        ops_root="/opt/venv",
        steps=STEPS,
        uid=1000,
    )
    assert verify(results, reference, expect) == []
