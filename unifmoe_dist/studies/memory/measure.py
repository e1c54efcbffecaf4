"""The peak of real training steps, to hold estimates against.

On a GPU the allocator keeps the highest number of bytes in use; on the CPU the profiler's records of the allocator give
the same measure (`meters.allocations`).
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.runtime.local_ranks import run_local_ranks
from unifmoe_dist.runtime.ranks import running_ranks, world_size_from_environment
from unifmoe_dist.studies.memory.estimate import estimate
from unifmoe_dist.studies.memory.models import task_of_sizes
from unifmoe_dist.studies.memory.stand_ins import Load
from unifmoe_dist.studies.meters import allocations
from unifmoe_dist.train.evaluate import collect_usage

_STEPS = 3  # optimiser states exist from the second on


@dataclass(frozen=True)
class Check:
    """An estimate beside a measurement, in bytes."""

    estimated: int
    ranks: tuple[int, ...]  # what every rank took

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
            return Load(fmean(u.shared_block_count for u in usage), fmean(u.expert_count for u in usage))

        if ranks.device.type == "cuda":
            load = train()
            return torch.cuda.max_memory_allocated(), load
        with allocations() as peak:
            load = train()
        return peak(), load
