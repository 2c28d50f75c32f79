#!/usr/bin/env python3
"""Train a small transformer with DeepSpeed ZeRO-3: a complete script to start from.

The task is next-token prediction on sequences that follow ``y = (3x + 1) mod 97``.  It is
learned within a few dozen steps, on two CPU processes or on many GPUs.  The script is also
what the image's own tests run, so everything that is easy to leave to a default (clipping,
learning rate, betas, weight decay, batch size) is written out: defaults differ between
DeepSpeed releases, and between DeepSpeed and torch.

Start it with any launcher::

    torchrun --standalone --nproc-per-node 2 train_zero3.py --steps 40
    deepspeed --num_gpus 2 train_zero3.py --steps 40
    python train_zero3.py --reference --steps 40        # plain torch, one process

Where a host cannot resolve its own name (``docker run --network none``), torchrun also needs
``--local-addr 127.0.0.1``.

Save in the middle, and continue from there in new processes::

    torchrun ... train_zero3.py --steps 40 --checkpoint-dir /data/run1 --save-at 20
    torchrun ... train_zero3.py --steps 40 --checkpoint-dir /data/run1 --resume

With ``--result-dir DIR`` every rank writes ``DIR/rank_<r>.json``: facts about the run (what
was sharded, which optimizer ran, the loss of every step), from which someone else can judge.

NCCL is used when every local process can have a GPU of its own, gloo on the CPU otherwise;
``DS_ACCELERATOR=cpu`` asks for the CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# -- the task ------------------------------------------------------------------------------

VOCAB = 97
SEQUENCE = 16
GLOBAL_BATCH = 24  # divides evenly among 1, 2, 3, 4, 6, 8, 12 and 24 ranks


def global_batch(step: int, seed: int) -> torch.Tensor:
    """The tokens of one step, for all ranks together: ``[GLOBAL_BATCH, SEQUENCE + 1]``.

    A step's data depends on nothing but its number and the seed, so a resumed run, and a run
    with another number of ranks, sees the same tokens.
    """
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    columns = [torch.randint(VOCAB, (GLOBAL_BATCH,), generator=generator)]
    for _ in range(SEQUENCE):
        columns.append((3 * columns[-1] + 1) % VOCAB)
    return torch.stack(columns, dim=1)


def local_batch(step: int, seed: int, rank: int, world_size: int) -> torch.Tensor:
    """This rank's equal share of :func:`global_batch`."""
    if GLOBAL_BATCH % world_size:
        raise SystemExit(f"{world_size} ranks do not divide the global batch of {GLOBAL_BATCH}")
    return global_batch(step, seed).chunk(world_size)[rank]


# -- the model -----------------------------------------------------------------------------


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class TinyLM(nn.Module):
    """A causal language model of about 100 thousand parameters.

    The sizes are odd on purpose: a parameter that does not divide by the number of ranks is
    padded when it is sharded, and that path should be exercised too.
    """

    def __init__(
        self,
        width: int = 45,
        heads: int = 3,
        hidden: int = 181,
        layers: int = 3,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB, width)
        self.position = nn.Embedding(SEQUENCE, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            nn.init.normal_(self.token.weight, std=0.1)  # small enough for an output layer
            self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of predicting every token from the ones before it."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        places = torch.arange(inputs.shape[1], device=tokens.device)
        x = self.token(inputs) + self.position(places)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def build_model(seed: int, tied: bool) -> TinyLM:
    """The model with the initial weights that belong to ``seed``, equal on every rank."""
    torch.manual_seed(seed)
    return TinyLM(tied=tied)


# -- the engine's configuration ------------------------------------------------------------

LEARNING_RATE = 3e-3
BETAS = (0.9, 0.95)
EPS = 1e-6
WEIGHT_DECAY = 0.01
CLIP = 0.5


def engine_config(args: argparse.Namespace, world_size: int) -> dict[str, Any]:
    """The DeepSpeed configuration, from ``--engine-config`` or from the values above.

    A file is taken as it is.  Only its batch sizes are replaced, since they follow from the
    number of ranks, and the flags that were given on the command line win over it.
    """
    if args.engine_config:
        config: dict[str, Any] = json.loads(args.engine_config.read_text())
    else:
        config = {
            "optimizer": {
                "type": "AdamW",
                "params": {
                    "lr": LEARNING_RATE,
                    "betas": list(BETAS),
                    "eps": EPS,
                    "weight_decay": WEIGHT_DECAY,
                },
            },
            # Explicit: DeepSpeed's default was 0 (off) until 0.19.2 and is 1.0 since 0.19.3.
            "gradient_clipping": CLIP,
            "steps_per_print": 2**31 - 1,
        }
    config["train_micro_batch_size_per_gpu"] = GLOBAL_BATCH // world_size
    config["gradient_accumulation_steps"] = 1
    config.pop("train_batch_size", None)

    zero = config.setdefault("zero_optimization", {})
    if args.stage is not None or "stage" not in zero:
        zero["stage"] = 3 if args.stage is None else args.stage
    if zero["stage"] == 3 and not args.engine_config:
        # Explicit: by default, parameters below 100 thousand elements stay whole on every
        # rank.  All of this model's are smaller than that.
        zero["stage3_param_persistence_threshold"] = 0
    if args.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if args.dtype is not None or not args.engine_config:
        config["bf16"] = {"enabled": args.dtype == "bf16"}
    return config


# -- what is recorded ----------------------------------------------------------------------


def numel(tensors: Iterable[torch.Tensor]) -> int:
    """The number of elements in all the tensors together."""
    return sum(t.numel() for t in tensors)


def checksum(parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """One hash over full fp32 parameters, names and bytes."""
    digest = hashlib.sha256()
    for name, value in parameters:
        digest.update(name.encode())
        digest.update(value.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def norms(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, float]:
    """The L2 norm of every full fp32 parameter."""
    return {name: value.detach().double().norm().item() for name, value in parameters}


def extensions_dir() -> Path:
    """Where torch compiles C++ and CUDA extensions just in time."""
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def jit_files() -> list[str]:
    """What lies in :func:`extensions_dir`: nothing, if no kernel was compiled."""
    root = extensions_dir()
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())[:50]


def loaded_ops() -> dict[str, str]:
    """Which DeepSpeed kernels this process has mapped, and from which file.

    Read from the kernel's own list, so it holds whether an op was prebuilt or compiled.
    """
    jit_root = str(extensions_dir().resolve())
    ops: dict[str, str] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if ".so" in path and ("/deepspeed/" in path or path.startswith(jit_root)):
            ops[Path(path).name.split(".")[0].removesuffix("_op")] = path
    return ops


def versions() -> dict[str, str | None]:
    """The versions of what took part: the modules really imported, wherever they came from."""
    found: dict[str, str | None] = {"python": sys.version.split()[0], "cuda": torch.version.cuda}
    for name in ("torch", "deepspeed", "numpy"):
        found[name] = getattr(sys.modules.get(name), "__version__", None)
    return found


def launcher() -> str:
    """Who started this process."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    return "deepspeed" if "CROSS_RANK" in os.environ else "none"


def write_result(args: argparse.Namespace, rank: int, facts: dict[str, Any]) -> None:
    """Write this rank's facts, whole or not at all."""
    if args.result_dir is None:
        return
    args.result_dir.mkdir(parents=True, exist_ok=True)
    target = args.result_dir / f"rank_{rank}.json"
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(facts, indent=1) + "\n")
    partial.replace(target)


def common_facts(args: argparse.Namespace) -> dict[str, Any]:
    """Facts that a reference run and a ZeRO run both have."""
    return {
        "nonce": args.nonce,
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "uid": os.getuid(),
        "launcher": launcher(),
        "dtype": args.dtype or "fp32",
        "versions": versions(),
    }


# -- one process, plain torch --------------------------------------------------------------


def train_reference(args: argparse.Namespace) -> None:
    """Train the same model on the same global batches, without DeepSpeed and without ranks."""
    started = time.monotonic()
    use_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    device = torch.device("cuda" if use_gpu else "cpu")
    model = build_model(args.seed, args.tied).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY
    )
    losses: list[float] = []
    grad_norms: list[float] = []
    for step in range(args.steps):
        loss = model(global_batch(step, args.seed).to(device))
        optimizer.zero_grad()
        loss.backward()
        grad_norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        losses.append(loss.item())
        print(f"reference step {step + 1}: loss {losses[-1]:.6f}", flush=True)
    write_result(
        args,
        0,
        common_facts(args)
        | {
            "mode": "reference",
            "world_size": 1,
            "rank": 0,
            "losses": losses,
            "grad_norms": grad_norms,
            "clip": CLIP,
            "param_numels": [p.numel() for p in model.parameters()],
            "param_norms": norms(model.named_parameters()),
            "optimizer": type(optimizer).__name__,
            "seconds": time.monotonic() - started,
        },
    )


# -- many processes, DeepSpeed -------------------------------------------------------------


def full_parameters(engine: Any) -> list[tuple[str, torch.Tensor]]:
    """Every parameter, whole and in fp32.  All ranks must call this: it communicates."""
    from deepspeed.utils import safe_get_full_fp32_param

    full = []
    for name, parameter in engine.module.named_parameters():
        value = safe_get_full_fp32_param(parameter)
        full.append((name, parameter if value is None else value))  # None: nothing is sharded
    return full


def sharding_facts(engine: Any) -> dict[str, Any]:
    """How much of the model this rank really holds, between two steps."""
    parameters = list(engine.module.parameters())
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    fp32 = getattr(
        optimizer,
        "fp32_partitioned_groups_flat",  # stage 3
        getattr(optimizer, "single_partition_of_fp32_groups", None),  # stages 1 and 2
    )
    moments = [
        value
        for state in inner.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.numel() > 1  # not the step counter
    ]
    return {
        "stage": engine.zero_optimization_stage(),
        "zero_optimizer": type(optimizer).__name__,
        "optimizer": type(inner).__name__,
        "param_numels": [getattr(p, "ds_numel", p.numel()) for p in parameters],
        "full_param_numel": sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
        "local_param_numel": numel(getattr(p, "ds_tensor", p) for p in parameters),
        "live_param_numel": numel(parameters),  # 0 when stage 3 has released them
        "fp32_partition_numel": numel(parameters if fp32 is None else fp32),
        "moments_numel": numel(moments),
    }


def compute_dtype(engine: Any) -> str:
    """What forward and backward ran in: fp32, bf16 or fp16."""
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    return names[next(engine.module.parameters()).dtype]


def choose_backend() -> tuple[str, int]:
    """``nccl`` if every local process can have its own GPU, else ``gloo``; the local rank.

    DeepSpeed decides on its accelerator when it is imported, so this comes first.
    """
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29533",
    }.items():
        os.environ.setdefault(name, value)  # started without a launcher: one process
    local_rank = int(os.environ["LOCAL_RANK"])
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")
    enough_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= local_size
    if enough_gpus and os.environ.get("DS_ACCELERATOR") != "cpu":
        torch.cuda.set_device(local_rank)
        return "nccl", local_rank
    os.environ["DS_ACCELERATOR"] = "cpu"
    return "gloo", local_rank


def train_zero(args: argparse.Namespace) -> None:
    """Train with DeepSpeed; every rank runs this."""
    started = time.monotonic()
    backend, local_rank = choose_backend()

    import deepspeed
    import torch.distributed as dist

    deepspeed.init_distributed(dist_backend=backend, timeout=timedelta(seconds=args.timeout), verbose=False)
    try:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")

        # Other weights when resuming: if the checkpoint were not loaded, it would show.
        model = build_model(args.seed + args.resume, args.tied)
        config = engine_config(args, world_size)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

        checksums: dict[int, str] = {}
        first_step = 0
        if args.resume:
            path, client_state = engine.load_checkpoint(str(args.checkpoint_dir))
            if path is None:  # DeepSpeed only logs this
                raise SystemExit(f"no checkpoint in {args.checkpoint_dir}")
            first_step = client_state["step"]
            checksums[first_step] = checksum(full_parameters(engine))

        losses: list[float] = []
        grad_norms: list[float | None] = []
        batches = hashlib.sha256()
        for step in range(first_step, args.steps):
            tokens = local_batch(step, args.seed, rank, world_size)
            batches.update(tokens.numpy().tobytes())
            loss = engine(tokens.to(device))
            engine.backward(loss)
            engine.step()

            mean = loss.detach().double()
            dist.all_reduce(mean)
            losses.append(mean.item() / world_size)
            norm = engine.get_global_grad_norm()
            grad_norms.append(None if norm is None else float(norm))
            if rank == 0:
                print(f"step {step + 1}: loss {losses[-1]:.6f}", flush=True)

            if step + 1 == args.save_at:
                checksums[step + 1] = checksum(full_parameters(engine))
                engine.save_checkpoint(
                    str(args.checkpoint_dir), tag=f"step{step + 1}", client_state={"step": step + 1}
                )

        facts = sharding_facts(engine)
        final = full_parameters(engine)
        checksums[args.steps] = checksum(final)
        write_result(
            args,
            rank,
            common_facts(args)
            | facts
            | {
                "mode": "zero",
                "world_size": world_size,
                "rank": rank,
                "backend": dist.get_backend(),
                "dtype": compute_dtype(engine),  # as it ran, also where a file said so
                "accelerator": deepspeed.accelerator.get_accelerator().device_name(),
                "first_step": first_step,
                "losses": losses,
                "grad_norms": grad_norms,
                "clip": engine.gradient_clipping(),
                "batches": batches.hexdigest(),
                "checksums": checksums,
                "param_norms": norms(final),
                "deepspeed_file": deepspeed.__file__,
                "ops": loaded_ops(),
                "extensions_dir": str(extensions_dir()),
                "jit_files": jit_files(),
                "seconds": time.monotonic() - started,
            },
        )
        dist.barrier()
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="train up to this step")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), help="ZeRO stage (3)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="compute type (fp32)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tied", action="store_true", help="share embedding and output weights")
    parser.add_argument("--offload-optimizer", action="store_true", help="Adam on the CPU")
    parser.add_argument("--engine-config", type=Path, help="a DeepSpeed JSON configuration")
    parser.add_argument("--checkpoint-dir", type=Path)
    parser.add_argument("--save-at", type=int, metavar="STEP", help="save after this step")
    parser.add_argument("--resume", action="store_true", help="continue the saved run")
    parser.add_argument("--reference", action="store_true", help="plain torch, one process")
    parser.add_argument("--result-dir", type=Path, help="write rank_<r>.json here")
    parser.add_argument("--nonce", default="", help="copied into the results")
    parser.add_argument("--timeout", type=int, default=120, help="of communication, seconds")
    parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher")
    args = parser.parse_args()
    if (args.resume or args.save_at) and not args.checkpoint_dir:
        parser.error("--resume and --save-at need --checkpoint-dir")
    if args.reference:
        train_reference(args)
    else:
        train_zero(args)


if __name__ == "__main__":
    main()
