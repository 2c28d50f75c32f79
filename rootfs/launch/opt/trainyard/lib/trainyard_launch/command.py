"""The command and the environment that start the ranks of one node."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainyard_launch import network
from trainyard_launch.place import Rank

ENGINES = ("torchrun", "deepspeed")


@dataclass(frozen=True)
class Script:
    """What to train with: a file or, with ``-m``, a module, and its arguments, untouched."""

    name: str
    arguments: tuple[str, ...] = ()
    module: bool = False

    def words(self) -> list[str]:
        """As Python takes it."""
        return [*(["-m"] if self.module else []), self.name, *self.arguments]


@dataclass(frozen=True)
class Node:
    """One node's part of a job: its rank among the nodes, and how many ranks every node has."""

    engine: str
    script: Script
    slots: tuple[int, ...]  # ranks of each node; of several unknown ones, this node's for all
    names: tuple[str, ...] = ()
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 0
    elastic: bool = False
    devices: tuple[str, ...] = ()  # GPUs that DeepSpeed's launcher must name; none: 0 to nproc - 1

    @property
    def nproc(self) -> int:
        """Ranks on this node."""
        return self.slots[self.node_rank]


def build(node: Node, hostfile: str = "") -> list[str]:
    """The command.  ``hostfile`` is a file for DeepSpeed with the text of :func:`deepspeed_hosts`."""
    return _deepspeed(node, hostfile) if node.engine == "deepspeed" else _torchrun(node)


def _torchrun(node: Node) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={node.nproc}"]
    if node.elastic:
        pass  # PET_* say the rest
    elif len(node.slots) == 1:
        # --local-addr: torchrun advertises the host's own name, which does not resolve everywhere
        # https://github.com/pytorch/pytorch/issues/150532
        command += ["--standalone", "--local-addr=127.0.0.1"]
    else:
        command += [
            f"--nnodes={len(node.slots)}",
            f"--node-rank={node.node_rank}",
            f"--master-addr={node.master_addr}",
            f"--master-port={node.master_port}",
        ]
    return [*command, *node.script.words()]


def _deepspeed(node: Node, hostfile: str) -> list[str]:
    command = [sys.executable, "-m", "deepspeed.launcher.runner"]
    if len(node.slots) == 1:
        # /dev/null is no regular file, so no hostfile, and not /job/hostfile either, is read
        gpus = f"--include=localhost:{','.join(node.devices)}" if node.devices else f"--num_gpus={node.nproc}"
        command += ["--hostfile=/dev/null", gpus, f"--master_port={node.master_port}"]
    else:
        command += [
            f"--hostfile={hostfile}",
            "--no_ssh",
            f"--node_rank={node.node_rank}",
            f"--master_addr={node.master_addr}",
            f"--master_port={node.master_port}",
        ]
    module = ["--module"] if node.script.module else []
    return [*command, *module, node.script.name, *node.script.arguments]


def devices(visible: str | None, nproc: int, gpus: int) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES gives to ``nproc`` ranks; none where it says nothing special.

    DeepSpeed's launcher throws that variable away and gives its ranks GPUs 0 to N-1:
    https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/launcher/runner.py#L449
    """
    if visible is None or visible == "all" or not gpus:
        return ()
    chosen = tuple(entry.strip() for entry in visible.split(","))[:nproc]
    return () if chosen == tuple(map(str, range(nproc))) else chosen


def device_problem(visible: str | None, nproc: int, gpus: int, nnodes: int) -> str:
    """Why DeepSpeed's launcher cannot use the GPUs that CUDA_VISIBLE_DEVICES names, or ``""``."""
    chosen = devices(visible, nproc, gpus)
    if not chosen or (nnodes == 1 and len(chosen) == nproc and all(entry.isdigit() for entry in chosen)):
        return ""
    return (
        f"--engine deepspeed would ignore CUDA_VISIBLE_DEVICES={visible} and take GPUs 0 to {nproc - 1}; "
        "use --engine torchrun"
    )


def deepspeed_hosts(node: Node) -> str:
    """The hostfile that DeepSpeed's launcher reads to count ranks; without ssh, names only label."""
    names = node.names or tuple(f"node{index}" for index in range(len(node.slots)))
    return "".join(f"{name} slots={slots}\n" for name, slots in zip(names, node.slots, strict=True))


def rank_command(script: Script) -> list[str]:
    """The command of a process that is a rank itself."""
    return [sys.executable, *script.words()]


def rank_environment(rank: Rank, master_addr: str, master_port: int) -> dict[str, str]:
    """What ``torch.distributed`` reads, for a process that is a rank itself."""
    found = {
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_RANK": str(rank.local_rank),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
    }
    if rank.local_known:  # LOCAL_SIZE is the name that DeepSpeed's launcher uses
        found |= dict.fromkeys(("LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(rank.local_world_size))
    return found


def rank_threads(env: Mapping[str, str], rank: Rank, cores: int) -> int | None:
    """Threads for a process that is a rank itself; None where nothing says how many share the cores.

    Slurm may have bound the task to cores of its own, which are not to be divided again.
    """
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        if env.get(name, "").isdigit() and env.get("SLURM_STEP_ID"):
            number = int(env[name])
            if name == "SLURM_CPUS_PER_TASK":
                return max(1, min(number, cores))
            if cores < number:
                return cores
    return max(1, cores // rank.local_world_size) if rank.local_known else None


def environment(
    env: Mapping[str, str], *, threads: int | None, route: network.Route | None
) -> dict[str, str]:
    """Variables to set besides: threads, and on several nodes the interface; the user's stay."""
    wanted = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    if route is not None:
        wanted |= dict.fromkeys(network.VARIABLES, route.interface)
    return {name: value for name, value in wanted.items() if not env.get(name)}


def removed(env: Mapping[str, str], node: Node | None) -> list[str]:
    """Variables to take away: torchrun reads PET_* as its own arguments, beside those given."""
    if node is None or node.elastic or node.engine != "torchrun":
        return []
    return sorted(name for name in env if name.startswith("PET_"))


# -- what travels to other hosts -----------------------------------------------------------

PASSED_PREFIXES = (
    "NCCL_", "GLOO_", "UCX_", "FI_", "TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "TRITON_",
    "DS_", "DEEPSPEED_", "OMP_", "MKL_", "KMP_", "PYTHON", "CUDA_LAUNCH_", "CUDA_MODULE_", "CUDA_DEVICE_",
    "MALLOC_",
)  # fmt: skip
PASSED = (
    "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE",
    "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM", "WANDB_MODE", "WANDB_PROJECT", "XDG_CACHE_HOME",
)  # fmt: skip
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSW", "CREDENTIAL")


def exported(env: Mapping[str, str], more: Sequence[str]) -> dict[str, str]:
    """The variables that every host gets: those above, and those that the user names.

    Not CUDA_VISIBLE_DEVICES, which is about this host, and nothing whose name smells of a secret.
    """
    chosen = {
        name: value
        for name, value in env.items()
        if name in PASSED
        or (name.startswith(PASSED_PREFIXES) and not any(word in name.upper() for word in _SECRETS))
    }
    return chosen | {name: env[name] for name in more if name in env}
