"""Where are we?  Tables of environments, as the schedulers and operators set them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

_ROOTFS = Path(__file__).resolve().parents[2] / "rootfs"
sys.path[:0] = [str(_ROOTFS / "common/opt/trainyard/lib"), str(_ROOTFS / "launch/opt/trainyard/lib")]

from trainyard_launch import slurm  # noqa: E402
from trainyard_launch.command import rank_environment  # noqa: E402
from trainyard_launch.errors import LaunchError  # noqa: E402
from trainyard_launch.place import Flags, Place, Rank, detect  # noqa: E402

NO_FLAGS = Flags()
SLURM_NODES = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
SLURM_RANKS = SLURM_NODES | {
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "node1",
}
HYDRA = {
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "0",
    "MPI_LOCALNRANKS": "2",
    "MASTER_ADDR": "node1",
}
TRAINER = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "4",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
PYTORCHJOB = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "2"}
LWS = {"LWS_LEADER_ADDRESS": "lws-0.lws.default", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
INDEXED = {"NNODES": "2", "JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "train-0.train"}


def test_nothing_means_one_node() -> None:
    found = detect({}, NO_FLAGS)
    assert (found.name, found.kind, found.nnodes, found.nproc) == ("one node", "node", 1, None)


def test_deepspeeds_hostfile_comes_last() -> None:
    assert detect({}, NO_FLAGS, job_hostfile=True).hostfile == "/job/hostfile"
    assert detect(TRAINER, NO_FLAGS, job_hostfile=True).kind == "node"


@pytest.mark.parametrize(
    ("env", "name", "nnodes", "node_rank", "address", "port", "nproc"),
    [
        (SLURM_NODES, "Slurm, one task on each node", 3, 1, "gpu07", 13309, None),
        (SLURM_NODES | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}, "Slurm, one task on each node",
         3, 1, "10.0.0.1", 4000, None),
        (TRAINER, "rendezvous variables (PET_*)", 2, 1, "job-node-0-0.job", 29400, 4),
        (TRAINER | {"PET_NPROC_PER_NODE": "auto"}, "rendezvous variables (PET_*)", 2, 1,
         "job-node-0-0.job", 29400, None),
        # a newer training operator sets both; PET_* counts nodes, WORLD_SIZE counts ranks there
        (TRAINER | {"WORLD_SIZE": "8", "RANK": "1", "MASTER_ADDR": "x"}, "rendezvous variables (PET_*)",
         2, 1, "job-node-0-0.job", 29400, 4),
        (PYTORCHJOB, "WORLD_SIZE and RANK without LOCAL_RANK (PyTorchJob: they count pods)", 3, 2,
         "job-master-0", 23456, None),
        (PYTORCHJOB | {"PET_NPROC_PER_NODE": "2"},
         "WORLD_SIZE and RANK without LOCAL_RANK (PyTorchJob: they count pods)", 3, 2,
         "job-master-0", 23456, 2),
        (LWS, "LeaderWorkerSet", 2, 1, "lws-0.lws.default", 29500, None),
        (INDEXED, "rendezvous variables", 2, 1, "train-0.train", 29500, None),
        (INDEXED | {"NODE_RANK": "0"}, "rendezvous variables", 2, 0, "train-0.train", 29500, None),
    ],
)  # fmt: skip
def test_one_node_of_several(
    env: dict[str, str], name: str, nnodes: int, node_rank: int, address: str, port: int, nproc: int | None
) -> None:
    found = detect(env, NO_FLAGS)
    assert (found.kind, found.name) == ("node", name)
    assert (found.nnodes, found.node_rank, found.master_addr) == (nnodes, node_rank, address)
    assert (found.master_port, found.nproc) == (port, nproc)
    assert found.why


@pytest.mark.parametrize(
    ("env", "name", "rank", "address"),
    [
        (SLURM_RANKS, "Slurm, one task for each rank", Rank(3, 5, 1, 2), "gpu07"),
        (OPEN_MPI, "Open MPI, one process for each rank", Rank(3, 4, 1, 2), "node1"),
        (HYDRA, "MPICH or Intel MPI, one process for each rank", Rank(2, 4, 0, 2), "node1"),
        # mpirun in a Slurm job starts one daemon a node; its variables are inherited
        (SLURM_NODES | OPEN_MPI, "Open MPI, one process for each rank", Rank(3, 4, 1, 2), "node1"),
        (SLURM_NODES | HYDRA, "MPICH or Intel MPI, one process for each rank", Rank(2, 4, 0, 2), "node1"),
        # srun --mpi=pmi2 sets PMI_RANK too
        (SLURM_RANKS | {"PMI_RANK": "3", "PMI_SIZE": "5"}, "Slurm, one task for each rank", Rank(3, 5, 1, 2),
         "gpu07"),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "m"},
         "a rank already", Rank(1, 2, 1, 2), "m"),
    ],
)  # fmt: skip
def test_a_process_that_becomes_a_rank(env: dict[str, str], name: str, rank: Rank, address: str) -> None:
    found = detect(env, NO_FLAGS)
    assert (found.kind, found.name, found.rank, found.master_addr) == ("rank", name, rank, address)


def test_how_many_ranks_a_node_has_is_not_invented() -> None:
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "m"}
    found = detect(ranks, NO_FLAGS).rank
    assert found is not None
    assert not found.local_known
    there = rank_environment(found, "m", 1)
    assert not {"LOCAL_WORLD_SIZE", "LOCAL_SIZE"} & set(there)


def test_a_service_called_master_does_not_give_the_port() -> None:
    """Kubernetes gives every pod MASTER_PORT=tcp://... then."""
    found = detect(INDEXED | {"MASTER_PORT": "tcp://10.96.12.3:29500"}, NO_FLAGS)
    assert found.master_port == 29500


def test_ranks_of_one_node_need_no_master_address() -> None:
    alone = {name: value for name, value in OPEN_MPI.items() if name != "MASTER_ADDR"}
    alone |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    assert detect(alone, NO_FLAGS).master_addr == "127.0.0.1"
    one = SLURM_RANKS | {"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "5"}
    assert detect(one, NO_FLAGS).master_addr == "127.0.0.1"


@pytest.mark.parametrize(
    ("env", "why"),
    [
        (SLURM_NODES | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, "Slurm job 77.0"),
        ({"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "1"}, "no hostfile"),
        (TRAINER | {"PET_NNODES": "1"}, "PET_NNODES=1"),
        ({"WORLD_SIZE": "1", "RANK": "0"}, "WORLD_SIZE=1"),
        (LWS | {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}, "LWS_"),
        ({"NNODES": "1", "NODE_RANK": "0"}, "NNODES=1"),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "no hostfile"),
        ({"JOB_COMPLETION_INDEX": "3"}, "no hostfile"),  # any Indexed Job: says nothing about nodes
    ],
)
def test_a_scheduler_that_gave_one_node(env: dict[str, str], why: str) -> None:
    found = detect(env, NO_FLAGS)
    assert (found.name, found.nnodes) == ("one node", 1)
    assert why in found.why


def test_elastic_rendezvous_is_left_to_torchrun() -> None:
    env = {
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "m:1",
        "PET_NNODES": "1:4",
        "PET_NPROC_PER_NODE": "2",
    }
    found = detect(env, NO_FLAGS)
    assert (found.elastic, found.master_addr, found.nproc) == (True, "m", 2)
    with pytest.raises(LaunchError, match="leave out --master-addr"):
        detect(env, Flags(master_addr="x"))


def test_flags_come_first() -> None:
    everything = SLURM_NODES | OPEN_MPI | TRAINER | PYTORCHJOB | LWS | INDEXED
    found = detect(
        everything, Flags(nnodes=4, node_rank=3, master_addr="m", master_port=7), job_hostfile=True
    )
    assert (found.nnodes, found.node_rank, found.master_addr, found.master_port) == (4, 3, "m", 7)
    assert detect(everything, Flags(nnodes=1)).nnodes == 1
    assert detect(everything, Flags(hostfile="f")).hostfile == "f"


def test_a_flag_corrects_what_was_found() -> None:
    without = {name: value for name, value in OPEN_MPI.items() if name != "MASTER_ADDR"}
    found = detect(without, Flags(master_addr="10.0.0.9", master_port=1234))
    assert (found.master_addr, found.master_port) == ("10.0.0.9", 1234)


WRONG: list[tuple[dict[str, str], Flags, str]] = [
    ({}, Flags(nnodes=2), "--nnodes 2 needs --node-rank and --master-addr"),
    ({}, Flags(nnodes=2, node_rank=0), "--nnodes 2 needs --master-addr"),
    ({}, Flags(nnodes=2, node_rank=2, master_addr="m"), "node rank 2 of 2"),
    ({}, Flags(nnodes=1, node_rank=1), "the only node has rank 0"),
    ({}, Flags(nnodes=2, node_rank=0, master_addr="localhost"), "another node on every node"),
    ({}, Flags(node_rank=1), "--node-rank 1 needs --nnodes"),
    ({}, Flags(hostfile="f", nnodes=2), "leave out --nnodes"),
    ({"MASTER_ADDR": "node1"}, NO_FLAGS, "NNODES and NODE_RANK"),
    ({"LOCAL_RANK": "0"}, NO_FLAGS, "not RANK and WORLD_SIZE"),
    ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "m"}, NO_FLAGS, "rank does not fit"),
    ({"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, NO_FLAGS, "MASTER_ADDR is missing"),
    ({"OMPI_COMM_WORLD_RANK": "0"}, NO_FLAGS, "not OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_LOCAL_RANK"),
    ({**OPEN_MPI, "MASTER_ADDR": ""}, NO_FLAGS, "mpirun -x MASTER_ADDR="),
    ({**HYDRA, "MASTER_ADDR": ""}, NO_FLAGS, "mpirun -genv MASTER_ADDR"),
    ({"PMI_RANK": "0", "PMI_SIZE": "2"}, NO_FLAGS, "not MPI_LOCALRANKID and MPI_LOCALNRANKS"),
    (OPEN_MPI, Flags(nproc=3), "--nproc 3, but Open MPI.*2 on this node"),
    (SLURM_RANKS, Flags(nproc=1), "--nproc 1, but Slurm"),
    ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_PROCID": "0"}, NO_FLAGS, "srun launch"),
    ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, NO_FLAGS, "not SLURM_PROCID and SLURM_LOCALID"),
    # salloc's shell is a step of one task on the first node, with a number that no srun gets
    (
        SLURM_NODES
        | {
            "SLURM_STEP_ID": "4294967290",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_JOB_NUM_NODES": "2",
        },
        NO_FLAGS,
        "batch script \\(or shell\\) of a Slurm job on 2 nodes",
    ),
    (OPEN_MPI | {"MASTER_ADDR": "localhost"}, NO_FLAGS, "the master address is localhost"),
    (INDEXED | {"MASTER_ADDR": "127.0.1.1"}, NO_FLAGS, "the master address is 127.0.1.1"),
    (SLURM_NODES | {"SLURM_STEP_NUM_TASKS": "2"}, NO_FLAGS, "--ntasks-per-node=1"),
    (SLURM_NODES | {"SLURM_STEP_NODELIST": ""}, NO_FLAGS, "SLURM_STEP_NODELIST and SLURM_JOB_NODELIST"),
    (SLURM_NODES | {"SLURM_NODEID": "x"}, NO_FLAGS, "SLURM_NODEID=x is no whole number"),
    (SLURM_RANKS | {"SLURM_STEP_TASKS_PER_NODE": ""}, NO_FLAGS, "--ntasks-per-node"),
    ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, NO_FLAGS, "PET_MASTER_ADDR missing"),
    ({"PET_NNODES": "2", "PET_MASTER_ADDR": "m"}, NO_FLAGS, "PET_NODE_RANK missing"),
    (TRAINER | {"PET_NNODES": "1:2"}, NO_FLAGS, "PET_RDZV_ENDPOINT"),
    (TRAINER | {"PET_NODE_RANK": "2"}, NO_FLAGS, "node rank 2 of 2"),
    (TRAINER | {"PET_MASTER_PORT": "99999"}, NO_FLAGS, "PET_MASTER_PORT=99999 is no port"),
    (TRAINER | {"PET_NPROC_PER_NODE": "many"}, NO_FLAGS, "PET_NPROC_PER_NODE=many"),
    ({"WORLD_SIZE": "2", "RANK": "1"}, NO_FLAGS, "MASTER_ADDR missing"),
    ({"WORLD_SIZE": "2", "MASTER_ADDR": "m"}, NO_FLAGS, "RANK missing"),
    (PYTORCHJOB | {"RANK": "3"}, NO_FLAGS, "node rank 3 of 3"),
    ({"LWS_GROUP_SIZE": "2"}, NO_FLAGS, "LWS_LEADER_ADDRESS and LWS_WORKER_INDEX missing"),
    ({"NNODES": "2", "NODE_RANK": "0"}, NO_FLAGS, "MASTER_ADDR missing"),
    ({"NODE_RANK": "0", "MASTER_ADDR": "m"}, NO_FLAGS, "NNODES missing"),
]


@pytest.mark.parametrize(("env", "flags", "message"), WRONG)
def test_incomplete_or_contradictory_is_one_clear_message(
    env: dict[str, str], flags: Flags, message: str
) -> None:
    with pytest.raises(LaunchError, match=message) as raised:
        detect(env, flags)
    assert raised.value.code == 2
    assert "\n" not in str(raised.value)


def test_two_jobs_on_the_same_nodes_get_different_ports() -> None:
    ports = {
        detect(SLURM_NODES | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}, NO_FLAGS).master_port
        for job in range(100, 110)
        for step in range(3)
    }
    assert len(ports) == 30
    assert all(port is not None and 12000 <= port < 32768 for port in ports)


def test_a_place_can_be_compared() -> None:
    assert detect(TRAINER, NO_FLAGS) == detect(dict(TRAINER), NO_FLAGS)
    assert isinstance(detect(TRAINER, NO_FLAGS), Place)


# -- Slurm's notations ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1", ["node1"]),
        ("node1,node2", ["node1", "node2"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("node[098-101]", ["node098", "node099", "node100", "node101"]),
        ("a[1-2],b[3,5-6],c", ["a1", "a2", "b3", "b5", "b6", "c"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("gpu-[0-1].cluster", ["gpu-0.cluster", "gpu-1.cluster"]),
        ("rack-1-node3", ["rack-1-node3"]),
    ],
)
def test_node_lists(text: str, expected: list[str]) -> None:
    assert slurm.nodes(text) == expected


@pytest.mark.parametrize("text", ["", "node[1-", "node[a-b]", "node[3-1]", "node1]", "node[1,[2]]"])
def test_wrong_node_lists(text: str) -> None:
    with pytest.raises(LaunchError, match="node list"):
        slurm.nodes(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("2", [2]), ("2(x3)", [2, 2, 2]), ("4,2(x2),1", [4, 2, 2, 1])]
)
def test_task_counts(text: str, expected: list[int]) -> None:
    assert slurm.tasks(text) == expected


@pytest.mark.parametrize("text", ["", "x", "2(3)", "2(x3", "-1"])
def test_wrong_task_counts(text: str) -> None:
    with pytest.raises(LaunchError, match="task counts"):
        slurm.tasks(text)
