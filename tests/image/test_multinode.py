"""Two containers of an image on one network train together, four ranks, as nodes of a cluster do.

Started through sshd and a hostfile, through rendezvous variables with no sshd at all, and through
what Slurm and MPI set.  The results are judged as those of one node are.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from containers import Container, Image, Ran, start
from docker.types import Mount
from test_training import COLLECT, SAVE_AT, STEPS, TRAINER, Plan, Run, launch, train, versions
from verify_training import Facts, verify, verify_resume

pytestmark = [pytest.mark.only("has_deepspeed"), pytest.mark.only("has_launch"), pytest.mark.only("has_sshd")]

NODES = ("node1", "node2")
PER_NODE = 2
WORLD_SIZE = len(NODES) * PER_NODE
TIMEOUT = 240
SECONDS_TO_END = 30  # after a node was lost: bounded, and far below any communication timeout
USER = "trainyard"  # as whom people log in; root does not unless it is asked for


@dataclass(frozen=True)
class Cluster:
    """Two running containers, a folder that both see, and their network."""

    image: Image
    plan: Plan
    nodes: Mapping[str, Container]
    shared: str = "/shared"

    def exec(self, node: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> Ran:
        """Run a command on one node as the user of the cluster."""
        settings = {"OMP_NUM_THREADS": "1", **self.plan.env, **(env or {})}
        return self.nodes[node].exec(command, env=settings, timeout=TIMEOUT, user=USER, workdir="/tmp")

    def everywhere(self, runs: Sequence[tuple[str, Sequence[str], Mapping[str, str]]]) -> list[Ran]:
        """Run commands on nodes, all at the same time."""
        with ThreadPoolExecutor(len(runs)) as pool:
            return list(pool.map(lambda run: self.exec(*run), runs))

    def results(self, nonce: str) -> list[Facts]:
        """What every rank of a run wrote."""
        collected = self.nodes[NODES[0]].python(COLLECT, f"{self.shared}/{nonce}/results").ok()
        found: list[Facts] = json.loads(collected)
        return found


@dataclass(frozen=True)
class Job:
    """The trainer's part of a command line, and where its results go."""

    cluster: Cluster
    extra: tuple[str, ...] = ()
    steps: int = STEPS
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    @property
    def command(self) -> list[str]:
        results = f"{self.cluster.shared}/{self.nonce}/results"
        head = [TRAINER, "--nonce", self.nonce, "--steps", str(self.steps), "--result-dir", results]
        return [*head, *self.extra]

    def run(self) -> Run:
        """The finished run, for :mod:`verify_training`."""
        return Run(self.nonce, self.cluster.results(self.nonce), "")


# -- the cluster -----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def plan(image: Image) -> Plan:
    return Plan.of(image)


@pytest.fixture(scope="session")
def reference(image: Image, plan: Plan) -> Facts:
    """One process of plain torch on the same data."""
    (facts,) = train(image.container, plan, launch("none"), "--reference").results
    return facts


@pytest.fixture(scope="session")
def cluster_key(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One key pair for all nodes, made as docs/06 says."""
    image.exec("rm -rf /tmp/key && mkdir /tmp/key && ssh-keygen -q -t ed25519 -N '' -f /tmp/key/cluster").ok()
    return image.container.fetch("/tmp/key/cluster", tmp_path_factory.mktemp("key"))


@contextmanager
def started(image: Image, plan: Plan, **options: Any) -> Iterator[Cluster]:
    """Two nodes on a network of their own, with a volume that both mount."""
    name = f"trainyard-test-{uuid.uuid4().hex[:8]}"
    network = image.client.networks.create(name, driver="bridge", labels={"trainyard.test": "1"})
    volume = image.client.volumes.create(name, labels={"trainyard.test": "1"})
    mounts = [Mount("/shared", name, type="volume"), *options.pop("mounts", ())]
    nodes: dict[str, Container] = {}
    try:
        for node in NODES:
            aliases = image.client.api.create_endpoint_config(aliases=[node])
            raw = start(
                image.client, image.ref, image.gpus, image.twin, mounts=mounts, hostname=node,
                network=name, networking_config={name: aliases}, **options,
            )  # fmt: skip
            nodes[node] = Container(raw, image.container.patience)
        nodes[NODES[0]].exec(f"chmod 1777 /shared; chown {USER} /shared").ok()
        hostfile = "".join(f"{node} slots={PER_NODE}\n" for node in NODES)
        nodes[NODES[0]].put(hostfile, "/shared/hostfile")
        yield Cluster(image, plan, nodes)
    finally:
        for container in nodes.values():
            container.raw.remove(force=True, v=True)
        network.remove()
        volume.remove(force=True)


@pytest.fixture(scope="session")
def cluster(image: Image, plan: Plan, cluster_key: Path) -> Iterator[Cluster]:
    """Nodes as people start them: no command, one mounted cluster key, so that sshd runs."""
    key = Mount("/run/secrets/ssh_cluster_key", str(cluster_key), type="bind", read_only=True)
    with started(image, plan, command=None, mounts=[key]) as cluster:
        for node in NODES:
            wait_for_sshd(cluster.nodes[node])
        yield cluster


def wait_for_sshd(container: Container) -> None:
    """Until the node's own health check says that its sshd answers."""
    deadline = time.monotonic() + 20
    while (ran := container.exec("test -s /run/trainyard/sshd.port && healthcheck")).rc:
        assert time.monotonic() < deadline, f"{ran}\n{container.raw.logs().decode()}"
        time.sleep(0.2)


@pytest.fixture(scope="session")
def full_run(cluster: Cluster) -> Run:
    """Uninterrupted, over ssh; it saves on its way."""
    checkpoints = f"/shared/full-{uuid.uuid4().hex[:6]}"
    job = Job(cluster, ("--checkpoint-dir", checkpoints, "--save-at", str(SAVE_AT)))
    cluster.exec("node1", ["launch", "--hostfile", "/shared/hostfile", *job.command]).ok()
    return job.run()


def judge(run: Run, cluster: Cluster, reference: Facts, launcher: str, what: str) -> None:
    """Four ranks on two nodes sharded, agreed, and computed what one process does."""
    expect = run.expect(
        cluster.plan, launcher, world_size=WORLD_SIZE, uid=1000, versions=versions(cluster.image)
    )
    assert verify(run.results, reference, expect) == []
    assert sorted(facts["hostname"] for facts in run.results) == sorted(NODES * PER_NODE)
    first = run.results[0]
    cluster.image.note(
        f"two nodes, {what}: {cluster.plan.label}, {WORLD_SIZE} ranks on {', '.join(NODES)},"
        f" loss {first['losses'][0]:.3f} -> {first['losses'][-1]:.3f}, {first['seconds']:.1f} s"
    )


# -- over ssh --------------------------------------------------------------------------------


def test_a_hostfile_trains_on_two_nodes(full_run: Run, cluster: Cluster, reference: Facts) -> None:
    judge(full_run, cluster, reference, "torchrun", "launch --hostfile")


def test_a_hostfile_trains_with_the_deepspeed_launcher(cluster: Cluster, reference: Facts) -> None:
    job = Job(cluster)
    head = ["launch", "--hostfile", "/shared/hostfile", "--engine", "deepspeed"]
    cluster.exec("node1", [*head, *job.command]).ok()
    judge(job.run(), cluster, reference, "deepspeed", "launch --hostfile --engine deepspeed")


def test_a_rank_that_raises_ends_all_with_its_traceback(cluster: Cluster) -> None:
    code = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '3': raise ValueError('rank three gives up')\n"
        "time.sleep(600)\n"
    )
    cluster.nodes["node1"].put(code, "/shared/raises.py")
    begin = time.monotonic()
    ran = cluster.exec("node1", ["launch", "--hostfile", "/shared/hostfile", "/shared/raises.py"])
    assert ran.rc == 1
    assert "ValueError: rank three gives up" in ran.text
    assert "node2" in ran.text.strip().splitlines()[-1]
    assert time.monotonic() - begin < 60
    assert_nothing_runs(cluster, "raises.py")


def test_a_killed_node_is_named_and_the_run_resumes_bit_for_bit(cluster: Cluster, full_run: Run) -> None:
    checkpoints = f"/shared/killed-{uuid.uuid4().hex[:6]}"
    saving = ("--checkpoint-dir", checkpoints, "--save-at", str(SAVE_AT))
    endless = Job(cluster, saving, steps=100_000)
    head = ["launch", "--hostfile", "/shared/hostfile"]
    with ThreadPoolExecutor(1) as pool:
        running: Future[Ran] = pool.submit(cluster.exec, "node1", [*head, *endless.command])
        wait_for_file(cluster, f"{checkpoints}/latest", running)
        time.sleep(2)  # so that it is training, not saving
        cluster.nodes["node2"].raw.kill()
        killed = time.monotonic()
        ran = running.result(timeout=TIMEOUT)
        seconds = time.monotonic() - killed
    assert ran.rc not in (0, 124, 137), ran
    assert "node2" in ran.text.strip().splitlines()[-1], ran
    assert seconds < SECONDS_TO_END
    assert_nothing_runs(cluster, "train_zero3.py", nodes=("node1",))
    cluster.image.note(f"two nodes: one killed, the other ended {seconds:.1f} s later, the lost one named")

    cluster.nodes["node2"].raw.start()
    wait_for_sshd(cluster.nodes["node2"])
    resumed = Job(cluster, ("--checkpoint-dir", checkpoints, "--resume"))
    cluster.exec("node1", [*head, *resumed.command]).ok()
    assert verify_resume(full_run.results, resumed.run().results) == []


def wait_for_file(cluster: Cluster, path: str, running: Future[Ran]) -> None:
    """Until it is there, as long as the job runs."""
    deadline = time.monotonic() + TIMEOUT
    while cluster.nodes["node1"].exec(["test", "-s", path]).rc:
        assert not running.done(), running.result()
        assert time.monotonic() < deadline
        time.sleep(0.3)


def assert_nothing_runs(cluster: Cluster, script: str, nodes: Sequence[str] = NODES) -> None:
    """No rank of a job that ended is left on any node."""
    for node in nodes:
        left = cluster.nodes[node].exec(f"grep -lazs -- {script} /proc/[0-9]*/cmdline | grep -v /self/; true")
        own = re.findall(r"/proc/(\d+)/", left.out)
        alive = [pid for pid in own if cluster.nodes[node].exec(["test", "-d", f"/proc/{pid}"]).rc == 0]
        assert alive == [], f"{node}: {alive}"


# -- without sshd ----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def pods(image: Image, plan: Plan) -> Iterator[Cluster]:
    """Nodes whose entrypoint is bypassed and which run no service, as an orchestrator starts them."""
    with started(image, plan, entrypoint=["sleep"], command=["infinity"]) as cluster:
        yield cluster


def per_node(
    job: Job, variables: Mapping[str, Mapping[str, str]]
) -> list[tuple[str, list[str], Mapping[str, str]]]:
    """One `launch` a node."""
    return [(node, ["launch", *job.command], env) for node, env in variables.items()]


def test_rendezvous_variables_train_on_two_nodes(pods: Cluster, reference: Facts) -> None:
    """As Kubeflow's Trainer and torchrun's own environment name them."""
    job = Job(pods)
    common = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "2",
        "PET_MASTER_ADDR": "node1",
        "PET_MASTER_PORT": "29400",
    }
    variables = {node: {**common, "PET_NODE_RANK": str(rank)} for rank, node in enumerate(NODES)}
    for ran in pods.everywhere(per_node(job, variables)):
        ran.ok()
    judge(job.run(), pods, reference, "torchrun", "rendezvous variables")


def test_slurm_starts_one_task_a_node(pods: Cluster, reference: Facts) -> None:
    """``srun --ntasks-per-node=1 launch --nproc 2 train.py``."""
    job = Job(pods)
    variables = {node: slurm(node, tasks_per_node=1, local=0) for node in NODES}
    runs = [(node, ["launch", "--nproc", "2", *job.command], env) for node, env in variables.items()]
    for ran in pods.everywhere(runs):
        ran.ok()
    judge(job.run(), pods, reference, "torchrun", "Slurm, a task a node")


def test_slurm_starts_one_task_a_rank(pods: Cluster, reference: Facts) -> None:
    """``srun --ntasks-per-node=2 launch train.py``: Slurm is the launcher, `launch` translates."""
    job = Job(pods)
    runs = [
        (node, ["launch", *job.command], slurm(node, tasks_per_node=PER_NODE, local=local))
        for node in NODES
        for local in range(PER_NODE)
    ]
    for ran in pods.everywhere(runs):
        ran.ok()
    judge(job.run(), pods, reference, "none", "Slurm, a task a rank")


def slurm(node: str, tasks_per_node: int, local: int) -> dict[str, str]:
    """What srun sets for one task of a job step (man srun, OUTPUT ENVIRONMENT VARIABLES)."""
    number = NODES.index(node)
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_NTASKS": str(2 * tasks_per_node),
        "SLURM_STEP_NUM_TASKS": str(2 * tasks_per_node),
        "SLURM_TASKS_PER_NODE": f"{tasks_per_node}(x2)",
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks_per_node}(x2)",
        "SLURM_PROCID": str(number * tasks_per_node + local),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(number),
        "SLURMD_NODENAME": node,
    }


def test_mpi_starts_the_ranks(pods: Cluster, reference: Facts) -> None:
    """``mpirun -n 4 -x MASTER_ADDR=node1 launch train.py``, with OpenMPI's variables."""
    job = Job(pods)
    runs = [
        (
            node,
            ["launch", *job.command],
            {
                "OMPI_COMM_WORLD_RANK": str(NODES.index(node) * PER_NODE + local),
                "OMPI_COMM_WORLD_SIZE": str(WORLD_SIZE),
                "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
                "OMPI_COMM_WORLD_LOCAL_SIZE": str(PER_NODE),
                "MASTER_ADDR": "node1",
            },
        )
        for node in NODES
        for local in range(PER_NODE)
    ]
    for ran in pods.everywhere(runs):
        ran.ok()
    judge(job.run(), pods, reference, "none", "MPI")


# -- wrong input: one clear message ----------------------------------------------------------


@pytest.mark.parametrize(
    ("hostfile", "said"),
    {
        "typo": ("node1 slots=2\nnode2 slot=2\n", "/shared/wrong:2: "),
        "twice": ("node1 slots=2\nnode1 slots=2\n", "node1"),
        "nobody": ("# nothing\n", "/shared/wrong"),
    }.values(),
    ids=["typo", "twice", "nobody"],
)
def test_a_wrong_hostfile_is_refused(cluster: Cluster, hostfile: str, said: str) -> None:
    cluster.nodes["node1"].put(hostfile, "/shared/wrong")
    ran = cluster.exec("node1", ["launch", "--hostfile", "/shared/wrong", TRAINER])
    assert ran.rc == 2
    assert said in ran.err
    assert "Traceback" not in ran.text


def test_a_host_that_does_not_answer_is_named(cluster: Cluster) -> None:
    cluster.nodes["node1"].put("node1 slots=2\nnode9 slots=2\n", "/shared/unreachable")
    begin = time.monotonic()
    ran = cluster.exec("node1", ["launch", "--hostfile", "/shared/unreachable", TRAINER])
    assert ran.rc != 0
    assert "node9" in ran.err
    assert "Traceback" not in ran.text
    assert time.monotonic() - begin < 30


def test_too_little_shared_memory_is_named_before_anything_starts(image: Image) -> None:
    ran = image.run_new(["launch", "--nproc", "2", TRAINER], shm_size="16m")
    assert ran.rc != 0
    assert "/dev/shm" in ran.err
    assert "--shm-size" in ran.err
    assert "Traceback" not in ran.text


@pytest.mark.only("not is_cpu")
def test_more_ranks_than_gpus_are_refused(image: Image) -> None:
    asked = str(image.visible_gpus + 8)
    ran = image.run_new(["launch", "--nproc", asked, TRAINER])
    assert ran.rc != 0
    assert "GPU" in ran.err
    assert "--gpus" in ran.err or "ask for" in ran.err
    assert "Traceback" not in ran.text


def test_a_cache_and_a_home_that_cannot_be_written_are_named(image: Image) -> None:
    env = {"TORCH_EXTENSIONS_DIR": "/root/cache", "HOME": "/nowhere", "DS_ACCELERATOR": "cpu"}
    ran = image.run_new(["launch", "--nproc", "2", TRAINER], user="12345:12345", environment=env)
    assert ran.rc != 0
    assert "TORCH_EXTENSIONS_DIR" in ran.err
    assert "HOME=/nowhere" in ran.err
    assert "Traceback" not in ran.text
