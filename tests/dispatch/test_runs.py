"""Runs of bytes between ranks: as torch's own collective, and none is lost because another was dropped."""

from __future__ import annotations

import random
import time

import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from unifmoe_dist.dispatch.runs import start_runs


def as_the_collective(rank: int, world: int) -> None:
    """Several on their way at once, waited for in another order; nothing at all for some."""
    choose, made = random.Random(1), []
    for _ in range(6):
        sizes = [[choose.choice([0, 0, 1, 7, 5000]) for _ in range(world)] for _ in range(world)]
        given, taken = sizes[rank], [row[rank] for row in sizes]
        sent = torch.randint(0, 256, (sum(given),), dtype=torch.uint8)
        want, got = (torch.empty(sum(taken), dtype=torch.uint8) for _ in range(2))
        made.append((start_runs(got, sent, taken, given, dist.group.WORLD), got, want))
        dist.all_to_all_single(want, sent, taken, given)
    choose.shuffle(made)
    for work, got, want in made:
        work.wait()
        assert torch.equal(got, want)


def dropped(rank: int, world: int) -> None:
    """A recomputation that stops early leaves exchanges that nobody waits for, on some ranks before others send."""
    for number in range(4):
        if rank == number % world:
            time.sleep(0.1)
        sent = torch.full((world,), 10 * rank + number, dtype=torch.uint8)
        start_runs(torch.empty_like(sent), sent, [1] * world, [1] * world, dist.group.WORLD)
        arrived = torch.empty_like(sent)
        start_runs(arrived, sent, [1] * world, [1] * world, dist.group.WORLD).wait()
        assert arrived.tolist() == [10 * other + number for other in range(world)]


def all_cases(rank: int, world: int) -> bool:
    as_the_collective(rank, world)
    dropped(rank, world)
    return True


def test_runs():
    assert all(run_ranks(4, all_cases, timeout=60))
