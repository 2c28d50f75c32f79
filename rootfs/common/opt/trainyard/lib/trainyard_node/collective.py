"""One rank of the deep health check: an all_reduce whose result is known.  Run under torchrun."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

NUMBERS = 1_000_000


def main(backend: str) -> None:
    """Sum ``rank + 1`` over all ranks; every element must be the sum of 1..world size."""
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    values = torch.full((NUMBERS,), float(rank + 1), device=device)
    dist.all_reduce(values)
    expected = world * (world + 1) / 2
    wrong = int((values != expected).sum())
    dist.destroy_process_group()
    if wrong:
        sys.exit(f"all_reduce over {backend}: {wrong} of {NUMBERS} numbers are not {expected}")
    if rank == 0:
        print(f"torch {torch.__version__}: all_reduce of {NUMBERS} numbers on {world} ranks over {backend}")


if __name__ == "__main__":
    main(sys.argv[1])
