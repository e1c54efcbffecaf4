"""The peak of real training steps, to hold estimates against.

On a GPU the allocator keeps the highest number of bytes in use. On the CPU torch's profiler records every allocation
and release of torch's allocator, temporaries inside operations included; their running sum is the same measure.
Resident memory is not: it counts libraries, pages that were released but kept, and no page that was never written.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.runtime.local_ranks import run_local_ranks
from unifmoe_dist.runtime.ranks import running_ranks, world_size_from_environment
from unifmoe_dist.studies.memory.estimate import estimate
from unifmoe_dist.studies.memory.ledger import Ledger, LiveBytes
from unifmoe_dist.studies.memory.models import task_of_sizes
from unifmoe_dist.studies.memory.stand_ins import Load
from unifmoe_dist.train.evaluate import collect_usage

_STEPS = 3  # optimiser states exist from the second on


@dataclass(frozen=True)
class Check:
    """An estimate beside a measurement.

    Args:
        estimated: Bytes.
        ranks: Bytes that every rank took.
    """

    estimated: int
    ranks: tuple[int, ...]

    @property
    def measured(self) -> int:
        """Bytes of the rank that took most."""
        return max(self.ranks)

    @property
    def ratio(self) -> float:
        return self.estimated / self.measured


def check(config: TrainConfig, ranks: int = 1, threads: int = 1) -> Check:
    """Train a few steps on made-up items in new processes, and estimate the same with the load that routing had there.

    Args:
        config: Configuration; needs no data and no weights.
        ranks: World size on this machine.
        threads: CPU threads of each rank.
    """
    gpu = torch.cuda.is_available()
    measured = run_local_ranks(ranks, measure_peak, config, threads=threads)
    load = measured[0][1]  # a mean over all ranks already
    return Check(estimate(config, ranks, gpu, load).peak, tuple(peak for peak, _ in measured))


def measure_peak(config: TrainConfig) -> tuple[int, Load | None]:
    """On every rank of a job: its peak in bytes, and the mean routing load over layers, steps and ranks."""
    size = config.expert_parallel_size(world_size_from_environment())
    with running_ranks(size, config.parallel.expert_placement) as ranks:
        from unifmoe_dist.train import deepspeed
        from unifmoe_dist.train.trainer import Trainer

        deepspeed.load_all()  # what it makes at import is no part of training

        def train() -> Load | None:
            with tempfile.TemporaryDirectory() as folder:
                trainer = Trainer(config, ranks, Path(ranks.share(folder)), task_of_sizes(config))
                trainer.algorithm.train()
                for _ in range(_STEPS):
                    trainer.train_step()
                usage = list(collect_usage(trainer.model, ranks).values())
                ranks.barrier()  # rank 0 writes into its folder
            if not usage:
                return None
            return Load(
                sum(u.shared_block_count for u in usage) / len(usage), sum(u.expert_count for u in usage) / len(usage)
            )

        if ranks.device.type == "cuda":
            load = train()
            return torch.cuda.max_memory_allocated(), load
        elsewhere = _ReleasesElsewhere()
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile, elsewhere:
            load = train()
        records = [
            (event.start_ns(), event.nbytes())
            for event in profile.profiler.kineto_results.events()
            if event.name() == "[memory]"
        ]
        held = itertools.accumulate(size for _, size in sorted([*records, *elsewhere.records]))
        return max(held), load


class _ReleasesElsewhere(LiveBytes):
    """Storages that another thread releases, such as gloo's after an all-reduce: the profiler records its own only.

    Attributes:
        records: Times in nanoseconds and bytes, negative.
    """

    def __init__(self) -> None:
        super().__init__(Ledger())
        self.thread, self.records = threading.get_ident(), list[tuple[int, int]]()

    def _leave(self, address: int, size: int) -> None:
        super()._leave(address, size)
        if threading.get_ident() != self.thread:
            self.records.append((time.time_ns(), -size))
