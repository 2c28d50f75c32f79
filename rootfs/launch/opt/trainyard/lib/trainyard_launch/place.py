"""Where are we?  From flags and environment variables alone, with the reasons in words.

In this order, the first that applies decides:

1. flags: --nnodes, --node-rank, --master-addr
2. --hostfile
3. RANK, LOCAL_RANK and WORLD_SIZE: this process is a rank already
4. Open MPI (OMPI_COMM_WORLD_*), MPICH and Intel MPI (PMI_RANK with MPI_LOCALRANKID)
5. a Slurm step (SLURM_STEP_ID): one task on each node, or one task for each rank
6. torchrun's own variables, PET_*: Kubeflow Trainer, PyTorchJob
7. WORLD_SIZE and RANK without LOCAL_RANK: PyTorchJob, where they count pods and not ranks
8. LeaderWorkerSet (LWS_*)
9. NNODES with NODE_RANK or JOB_COMPLETION_INDEX: an Indexed Job of Kubernetes
10. /job/hostfile, where DeepSpeed looks by default
11. else: one node

MPI comes before Slurm: ``mpirun`` in an allocation starts its daemons as one Slurm task a node, and
every rank inherits that task's variables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trainyard_launch import slurm
from trainyard_launch.errors import LaunchError

DEFAULT_HOSTFILE = "/job/hostfile"
DEFAULT_PORT = 29500


def is_loopback(address: str) -> bool:
    """Does an address (or name) never leave its host?"""
    return address in ("localhost", "::1") or address.startswith("127.")


@dataclass(frozen=True)
class Flags:
    """What the command line says about the place."""

    nproc: int | None = None
    hostfile: str | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None


@dataclass(frozen=True)
class Rank:
    """The rank that this process becomes."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    local_known: bool = True  # else ``local_world_size`` is only what is known to be there


@dataclass(frozen=True)
class Place:
    """Where we are: one node, one node of several, one rank, or in front of a list of hosts.

    ``master_port`` is None where the choice is free; ``nproc`` is None where the place does not
    say how many ranks a node has.  ``elastic``: torchrun finds its rendezvous itself, from PET_*.
    """

    name: str
    why: str
    kind: str = "node"  # node, rank or hosts
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int | None = None
    nproc: int | None = None
    nproc_why: str = ""
    rank: Rank | None = None
    hostfile: str = ""
    elastic: bool = False
    notes: tuple[str, ...] = field(default=())


def detect(env: Mapping[str, str], flags: Flags, *, job_hostfile: bool = False) -> Place:
    """Find the place.  ``job_hostfile``: does DeepSpeed's default hostfile exist?

    Variables that are incomplete or contradict each other raise :class:`LaunchError`.
    """
    found = _from_flags(flags)
    for look in _BY_ENVIRONMENT:
        found = found or look(env)
    if found is not None:
        return _with_flags(found, flags)
    if job_hostfile:
        why = f"{DEFAULT_HOSTFILE} exists, DeepSpeed's default"
        return Place("hostfile over ssh", why, kind="hosts", hostfile=DEFAULT_HOSTFILE,
                     master_addr=flags.master_addr or "", master_port=flags.master_port)  # fmt: skip
    master = env.get("MASTER_ADDR", "")
    if master and not is_loopback(master):
        raise LaunchError(
            f"MASTER_ADDR={master} is set, but nothing says how many nodes there are: set NNODES and "
            "NODE_RANK (or --nnodes and --node-rank), or --nnodes 1 for this node alone"
        )
    why = "no hostfile, and no variables of Slurm, MPI or Kubernetes"
    return Place("one node", why, master_port=flags.master_port)


# -- the flags -----------------------------------------------------------------------------


def _from_flags(flags: Flags) -> Place | None:
    if flags.hostfile is not None:
        if flags.nnodes is not None or flags.node_rank is not None:
            raise LaunchError("--hostfile names the nodes: leave out --nnodes and --node-rank")
        return Place("hostfile over ssh", f"--hostfile {flags.hostfile}", kind="hosts",
                     hostfile=flags.hostfile)  # fmt: skip
    if flags.nnodes is None:
        # --master-addr alone corrects what is found elsewhere, an MPI run's for example
        if flags.node_rank is not None:
            raise LaunchError(f"--node-rank {flags.node_rank} needs --nnodes and --master-addr")
        return None
    if flags.nnodes == 1:
        if flags.node_rank not in (None, 0):
            raise LaunchError(f"--node-rank {flags.node_rank} with --nnodes 1: the only node has rank 0")
        return Place("one node", "--nnodes 1")
    missing = [
        name
        for name, value in (("--node-rank", flags.node_rank), ("--master-addr", flags.master_addr))
        if value is None
    ]
    if missing or flags.node_rank is None:
        raise LaunchError(f"--nnodes {flags.nnodes} needs {' and '.join(missing)} too, on every node")
    return _node("nodes by flags", "--nnodes, --node-rank, --master-addr", flags.nnodes, flags.node_rank,
                 flags.master_addr or "", None)  # fmt: skip


def _with_flags(place: Place, flags: Flags) -> Place:
    """The place, with address and port of the master as the flags say."""
    if place.elastic and (flags.master_addr or flags.master_port):
        raise LaunchError("PET_RDZV_* say where the rendezvous is: leave out --master-addr and --master-port")
    changed = dict(place.__dict__)
    if flags.master_addr:
        changed["master_addr"] = flags.master_addr
    if flags.master_port:
        changed["master_port"] = flags.master_port
    found = Place(**changed)
    if found.kind == "rank" and not found.master_addr:
        raise LaunchError(
            f"{found.name}: {found.notes[0]}. MASTER_ADDR is missing, the address of the node of rank 0: "
            + found.notes[1]
        )
    if flags.nproc is not None and found.rank and flags.nproc != found.rank.local_world_size:
        raise LaunchError(
            f"--nproc {flags.nproc}, but {found.name}: {found.rank.local_world_size} on this node. "
            "Leave out --nproc, or start one task on each node"
        )
    return found


# -- one rank for each process -------------------------------------------------------------


def _rank_already(env: Mapping[str, str]) -> Place | None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if any(not env.get(name) for name in names):
        if env.get("LOCAL_RANK") and not _has(env, "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID"):
            missing = [name for name in names if not env.get(name)]
            raise LaunchError(
                f"LOCAL_RANK={env['LOCAL_RANK']} is set, but not {' and '.join(missing)}: "
                "set all of RANK, LOCAL_RANK and WORLD_SIZE, or none"
            )
        return None
    rank, local_rank, world = (_integer(env, name) for name in names)
    local_world = _integer(env, "LOCAL_WORLD_SIZE") if env.get("LOCAL_WORLD_SIZE") else 0
    why = f"RANK={rank}, LOCAL_RANK={local_rank} and WORLD_SIZE={world} are set"
    numbers = Rank(rank, world, local_rank, local_world or local_rank + 1, local_known=bool(local_world))
    alone = world == 1 or (numbers.local_known and world == numbers.local_world_size)
    remedy = "export MASTER_ADDR and MASTER_PORT"
    return _one_rank("a rank already", why, numbers, env, alone=alone, remedy=remedy)


def _open_mpi(env: Mapping[str, str]) -> Place | None:
    """What mpirun tells its processes: https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html."""
    return _mpi(
        env,
        "Open MPI, one process for each rank",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "mpirun -x MASTER_ADDR=<address of the first host> ... launch train.py",
    )


def _hydra(env: Mapping[str, str]) -> Place | None:
    """MPICH's and Intel MPI's process manager.  Slurm sets PMI_RANK too, but no MPI_LOCALRANKID."""
    if env.get("SLURM_STEP_ID") and not env.get("MPI_LOCALRANKID"):
        return None
    return _mpi(
        env,
        "MPICH or Intel MPI, one process for each rank",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        "mpirun -genv MASTER_ADDR <address of the first host> ... launch train.py",
    )


def _mpi(
    env: Mapping[str, str], name: str, rank: str, size: str, local_rank: str, local_size: str, remedy: str
) -> Place | None:
    names = (rank, size, local_rank, local_size)
    if not env.get(rank):
        return None
    missing = [variable for variable in names if not env.get(variable)]
    if missing:
        raise LaunchError(f"{name}: {rank}={env[rank]} is set, but not {' and '.join(missing)}")
    numbers = Rank(
        _integer(env, rank), _integer(env, size), _integer(env, local_rank), _integer(env, local_size)
    )
    why = ", ".join(f"{variable}={env[variable]}" for variable in names)
    alone = numbers.world_size == numbers.local_world_size
    return _one_rank(name, why, numbers, env, alone=alone, remedy=remedy)


def _one_rank(name: str, why: str, rank: Rank, env: Mapping[str, str], *, alone: bool, remedy: str) -> Place:
    for what, value, bound in (
        ("rank", rank.rank, rank.world_size),
        ("local rank", rank.local_rank, rank.local_world_size),
        ("number of local ranks", rank.local_world_size - 1, rank.world_size),
    ):
        if not 0 <= value < bound:
            raise LaunchError(f"{name}: {why}: the {what} does not fit")
    master = env.get("MASTER_ADDR") or ("127.0.0.1" if alone else "")
    if not alone and rank.local_known:
        _reachable(name, master)
    says = f"{rank.world_size} ranks, {rank.local_world_size} of them on this node"
    return Place(
        name, why, kind="rank", nnodes=1 if alone else 2, rank=rank, nproc=rank.local_world_size,
        master_addr=master, master_port=_port(env, "MASTER_PORT") or DEFAULT_PORT, notes=(says, remedy),
    )  # fmt: skip


# -- Slurm ---------------------------------------------------------------------------------


def _slurm(env: Mapping[str, str]) -> Place | None:
    if not env.get("SLURM_JOB_ID"):
        return None
    if not _is_step(env):
        nnodes = _integer(env, "SLURM_JOB_NUM_NODES", "SLURM_NNODES", default=1)
        if nnodes > 1:
            raise LaunchError(
                f"this is the batch script (or shell) of a Slurm job on {nnodes} nodes, on one of them: "
                "start `srun launch ...`, with --ntasks-per-node=1"
            )
        return None
    need = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
    missing = [name for name in need if not env.get(name)]
    if missing:
        raise LaunchError(f"SLURM_STEP_ID={env['SLURM_STEP_ID']} is set, but not {' and '.join(missing)}")
    ntasks = _integer(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    nnodes = _integer(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    node_rank = _integer(env, "SLURM_NODEID")
    job = f"job {env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}"
    if ntasks == nnodes == 1:
        return Place("one node", f"Slurm {job}: one task on one node")
    if ntasks < nnodes:
        raise LaunchError(f"Slurm {job}: {ntasks} tasks on {nnodes} nodes; use --ntasks-per-node=1")
    master = env.get("MASTER_ADDR") or _first_node(env)
    port = _port(env, "MASTER_PORT") or _slurm_port(env)
    if ntasks == nnodes:
        why = f"{job}: {ntasks} tasks on {nnodes} nodes, this is node {node_rank}"
        return _node("Slurm, one task on each node", why, nnodes, node_rank, master, port)
    counts = _slurm_tasks(env, ntasks, nnodes)
    if not 0 <= node_rank < len(counts):
        raise LaunchError(f"Slurm {job}: SLURM_NODEID={node_rank}, but there are {len(counts)} nodes")
    rank = Rank(_integer(env, "SLURM_PROCID"), ntasks, _integer(env, "SLURM_LOCALID"), counts[node_rank])
    why = (
        f"{job}: {ntasks} tasks on {nnodes} nodes, SLURM_PROCID={rank.rank}, SLURM_LOCALID={rank.local_rank}"
    )
    where = {**env, "MASTER_ADDR": "127.0.0.1" if nnodes == 1 else master, "MASTER_PORT": str(port)}
    return _one_rank("Slurm, one task for each rank", why, rank, where, alone=nnodes == 1, remedy="")


def _is_step(env: Mapping[str, str]) -> bool:
    """Was this process started by srun?

    The shell of salloc can be a step of its own, on the first node only, with a number out of the
    range that Slurm keeps for such: https://github.com/SchedMD/slurm/blob/master/slurm/slurm.h
    (SLURM_INTERACTIVE_STEP is 0xfffffffa, SLURM_BATCH_SCRIPT 0xfffffffb).
    """
    return bool(env.get("SLURM_STEP_ID")) and _integer(env, "SLURM_STEP_ID") < 0xFFFFFFF0


def _first_node(env: Mapping[str, str]) -> str:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if env.get(name):
            return slurm.nodes(env[name])[0]
    raise LaunchError(
        "Slurm: SLURM_STEP_NODELIST and SLURM_JOB_NODELIST are both missing, and so is MASTER_ADDR, "
        "the address of the first node: export one of them"
    )


def _slurm_tasks(env: Mapping[str, str], ntasks: int, nnodes: int) -> list[int]:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if env.get(name):
            counts = slurm.tasks(env[name])
            if sum(counts) == ntasks and len(counts) == nnodes:
                return counts
    if ntasks % nnodes:
        raise LaunchError(
            f"Slurm: {ntasks} tasks on {nnodes} nodes, and SLURM_STEP_TASKS_PER_NODE does not say how many "
            "run on this one: use --ntasks-per-node"
        )
    return [ntasks // nnodes] * nnodes


def _slurm_port(env: Mapping[str, str]) -> int:
    """A port that all tasks of this step agree on and another job on the same node does not use.

    It lies below the ports that Linux gives away by itself (32768 and up).
    """
    return 12000 + (_integer(env, "SLURM_JOB_ID") * 17 + _integer(env, "SLURM_STEP_ID")) % 20000


# -- Kubernetes ----------------------------------------------------------------------------


def _pet(env: Mapping[str, str]) -> Place | None:
    """torchrun's arguments as variables.

    Kubeflow Trainer sets these five:
    https://github.com/kubeflow/trainer/blob/master/pkg/runtime/framework/plugins/torch/torch.go
    An elastic PyTorchJob sets PET_RDZV_* instead and a range of nodes.
    """
    nproc, why = _pet_nproc(env)
    if _has(env, "PET_RDZV_ENDPOINT"):
        shown = ", ".join(f"{name}={env[name]}" for name in sorted(env) if name.startswith("PET_"))
        return Place("elastic rendezvous (PET_RDZV_*)", shown, nnodes=2, nproc=nproc, nproc_why=why,
                     master_addr=env["PET_RDZV_ENDPOINT"].rpartition(":")[0] or env["PET_RDZV_ENDPOINT"],
                     elastic=True)  # fmt: skip
    if not _has(env, "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR"):
        return None
    if env.get("PET_NNODES") == "1":
        return Place("one node", "PET_NNODES=1", nproc=nproc, nproc_why=why)
    master = env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR", "")
    values = {"PET_NNODES": env.get("PET_NNODES"), "PET_NODE_RANK": env.get("PET_NODE_RANK"),
              "PET_MASTER_ADDR": master}  # fmt: skip
    _complete("rendezvous variables (PET_*)", values)
    if not env["PET_NNODES"].isdigit():
        raise LaunchError(
            f"PET_NNODES={env['PET_NNODES']} is a range, which needs PET_RDZV_BACKEND and PET_RDZV_ENDPOINT"
        )
    why_here = ", ".join(f"{name}={value}" for name, value in values.items())
    port = _port(env, "PET_MASTER_PORT") or _port(env, "MASTER_PORT")
    place = _node("rendezvous variables (PET_*)", why_here, _integer(env, "PET_NNODES"),
                  _integer(env, "PET_NODE_RANK"), master, port)  # fmt: skip
    return Place(**{**place.__dict__, "nproc": nproc, "nproc_why": why})


def _pet_nproc(env: Mapping[str, str]) -> tuple[int | None, str]:
    value = env.get("PET_NPROC_PER_NODE", "")
    if value in ("", "auto", "gpu", "cpu"):
        return None, ""  # by GPUs or 1, as everywhere; torchrun's "cpu" would be one for each core
    return _integer(env, "PET_NPROC_PER_NODE"), f"PET_NPROC_PER_NODE={value}"


def _pytorchjob(env: Mapping[str, str]) -> Place | None:
    """The training operator's v1 job: RANK is the pod's index, WORLD_SIZE the number of pods.

    https://github.com/kubeflow/training-operator/blob/release-1.9/pkg/controller.v1/pytorch/envvar.go
    """
    if not (env.get("RANK") or env.get("WORLD_SIZE")):
        return None
    values = {name: env.get(name) for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR")}
    name = "WORLD_SIZE and RANK without LOCAL_RANK (PyTorchJob: they count pods)"
    nproc, nproc_why = _pet_nproc(env)
    if env.get("WORLD_SIZE") == "1" and env.get("RANK", "0") == "0":
        return Place("one node", "WORLD_SIZE=1", nproc=nproc, nproc_why=nproc_why)
    _complete(name, values)
    why = ", ".join(f"{key}={value}" for key, value in values.items())
    nnodes = _integer(env, "WORLD_SIZE")
    place = _node(name, why, nnodes, _integer(env, "RANK"), env["MASTER_ADDR"], _port(env, "MASTER_PORT"))
    return Place(**{**place.__dict__, "nproc": nproc, "nproc_why": nproc_why})


def _leader_worker_set(env: Mapping[str, str]) -> Place | None:
    """Variables of every pod: https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables/"""
    names = ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
    if not _has(env, *names):
        return None
    _complete("LeaderWorkerSet", {name: env.get(name) for name in names})
    why = ", ".join(f"{name}={env[name]}" for name in names)
    nnodes = _integer(env, "LWS_GROUP_SIZE")
    if nnodes == 1:
        return Place("one node", why)
    return _node("LeaderWorkerSet", why, nnodes, _integer(env, "LWS_WORKER_INDEX"),
                 env["LWS_LEADER_ADDRESS"], _port(env, "MASTER_PORT"))  # fmt: skip


def _indexed_job(env: Mapping[str, str]) -> Place | None:
    """The pod index of an Indexed Job: https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode"""
    if not _has(env, "NNODES", "NODE_RANK"):
        return None
    if env.get("NNODES") == "1":
        return Place("one node", "NNODES=1")
    index = "NODE_RANK" if env.get("NODE_RANK") else "JOB_COMPLETION_INDEX"
    values = {"NNODES": env.get("NNODES"), "NODE_RANK (or JOB_COMPLETION_INDEX)": env.get(index),
              "MASTER_ADDR": env.get("MASTER_ADDR")}  # fmt: skip
    _complete("rendezvous variables", values)
    why = f"NNODES={env['NNODES']}, {index}={env[index]}, MASTER_ADDR={env['MASTER_ADDR']}"
    return _node("rendezvous variables", why, _integer(env, "NNODES"), _integer(env, index),
                 env["MASTER_ADDR"], _port(env, "MASTER_PORT"))  # fmt: skip


# -- common --------------------------------------------------------------------------------


def _node(name: str, why: str, nnodes: int, node_rank: int, master: str, port: int | None) -> Place:
    """One node of several, whose numbers fit together."""
    if nnodes < 1 or not 0 <= node_rank < nnodes:
        raise LaunchError(f"{name}: {why}: node rank {node_rank} of {nnodes} nodes; ranks run from 0 on")
    if nnodes > 1:
        _reachable(name, master)
    return Place(name, why, nnodes=nnodes, node_rank=node_rank, master_addr=master,
                 master_port=port or DEFAULT_PORT)  # fmt: skip


def _reachable(name: str, master: str) -> None:
    if is_loopback(master):
        raise LaunchError(
            f"{name}: the master address is {master}, which is another node on every node; "
            "it must be an address of the first node that the others reach"
        )


def _complete(name: str, values: Mapping[str, str | None]) -> None:
    missing = [key for key, value in values.items() if not value]
    if missing:
        there = ", ".join(f"{key}={value}" for key, value in values.items() if value)
        raise LaunchError(f"{name}: {there} is set, but {' and '.join(missing)} missing. Set all, or none")


def _has(env: Mapping[str, str], *names: str) -> bool:
    return any(env.get(name) for name in names)


def _integer(env: Mapping[str, str], *names: str, default: int | None = None) -> int:
    """The first of these variables that is set, as a number."""
    for name in names:
        value = env.get(name, "")
        if value.isascii() and value.isdigit():
            return int(value)
        if value:
            raise LaunchError(f"{name}={value} is no whole number")
    if default is not None:
        return default
    raise LaunchError(f"{' and '.join(names)} missing")


def _port(env: Mapping[str, str], name: str) -> int | None:
    # Kubernetes gives every pod MASTER_PORT=tcp://... where a Service is called master
    # https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
    if not env.get(name) or "://" in env[name]:
        return None
    port = _integer(env, name)
    if not 0 < port < 65536:
        raise LaunchError(f"{name}={port} is no port: 1 to 65535")
    return port


_BY_ENVIRONMENT: tuple[Callable[[Mapping[str, str]], Place | None], ...] = (
    _rank_already,
    _open_mpi,
    _hydra,
    _slurm,
    _pet,
    _pytorchjob,
    _leader_worker_set,
    _indexed_job,
)
