"""One rank of a job that adds up a tensor: `python probe.py BACKEND RANK WORLD_SIZE PORT`, a program of its own."""

from __future__ import annotations

import datetime
import sys

import torch
import torch.distributed as dist


def main(backend: str, rank: int, world_size: int, port: int) -> None:
    dist.init_process_group(
        backend, f"tcp://127.0.0.1:{port}", datetime.timedelta(seconds=30), world_size=world_size, rank=rank
    )
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    value = torch.full((1024,), rank + 1.0, device=device)
    dist.all_reduce(value)
    right = bool((value == world_size * (world_size + 1) / 2).all())
    dist.destroy_process_group()
    sys.exit(0 if right else "the sum over ranks is wrong")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
