"""Runs that are made to fail, as jobs of real ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.support.jobs import Job

SMALL = [
    "--steps",
    "6",
    "--eval_every",
    "2",
    "--log_every",
    "1",
    "--progress",
    "false",
    "--baseline",
    "false",
    "--model.layers",
    "[1,3]",
    "--model.num_experts",
    "4",
    "--data.batch_size",
    "4",
    "--optim.warmup_steps",
    "2",
]
SHARDED = [*SMALL, "--parallel.expert_parallel_size", "2"]


def words(folder: Path, *more: str, base: list[str] = SHARDED) -> list[str]:
    return [*base, "--output", str(folder / "run"), *more]


def on_call(owner, name: str, number: int, fault) -> None:
    """Have call `number` (from 1) of owner.name run `fault` first."""
    original, calls = getattr(owner, name), iter(range(1, 10**9))

    def wrapped(*args, **kwargs):
        if next(calls) == number:
            fault()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lines_about(job: Job, words: str) -> list[str]:
    return [line for line in job.output.splitlines() if words in line]
