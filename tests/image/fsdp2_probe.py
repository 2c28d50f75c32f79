"""Train the example's model with FSDP2, two ranks; run by test_training inside an image.

    torchrun --standalone --nproc-per-node 2 fsdp2_probe.py FOLDER

It uses nothing but torch, so it also runs in images without DeepSpeed.  Like the example
trainer it only records facts.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

sys.path.insert(0, "/opt/trainyard/examples")
import train_zero3 as example


def main() -> None:
    """Train, and write this rank's facts."""
    folder, steps, device = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=120))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if device == "cuda":
        torch.cuda.set_device(rank)
    mesh = init_device_mesh(device, (world_size,))
    model = example.build_model(seed=1, tied=False).to(device)
    shapes = [list(p.shape) for p in model.parameters()]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=example.LEARNING_RATE,
        betas=example.BETAS,
        eps=example.EPS,
        weight_decay=example.WEIGHT_DECAY,
    )
    losses = []
    for step in range(steps):
        loss = model(example.local_batch(step, 1, rank, world_size).to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), example.CLIP)
        optimizer.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
    facts = {
        "rank": rank,
        "world_size": world_size,
        "backend": dist.get_backend(),
        "sharded": isinstance(model, FSDPModule),
        "shapes": shapes,
        "local_numel": sum(p.to_local().numel() for p in model.parameters()),
        "moments_numel": sum(state["exp_avg"].to_local().numel() for state in optimizer.state.values()),
        "losses": losses,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank_{rank}.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
