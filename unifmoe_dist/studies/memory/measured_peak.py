"""The peak of real training steps, to hold estimates against, and the settings in which they were.

On a GPU the allocator keeps the highest number of bytes in use; on the CPU the profiler's records of the allocator give
the same measure (`meters.allocations`).
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.runtime.local_ranks import run_local_ranks
from unifmoe_dist.runtime.ranks import Ranks, running_ranks, world_size_from_environment
from unifmoe_dist.studies.memory.fake_step import estimate, task_of_sizes
from unifmoe_dist.studies.memory.stand_ins import Load
from unifmoe_dist.studies.meters import allocations
from unifmoe_dist.train.cli import parse_train_config
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
    """Train a few steps on made-up items in new processes, estimate the same with the load that routing had there."""
    measured = run_local_ranks(ranks, measure_peak, config, threads=threads)
    load = measured[0][1]  # a mean over all ranks already
    return Check(estimate(config, ranks, torch.cuda.is_available(), load).peak, tuple(peak for peak, _ in measured))


def measure_peak(config: TrainConfig) -> tuple[int, Load | None]:
    """On every rank of a job: its peak in bytes, and the mean routing load over layers, steps and ranks."""
    size = config.expert_parallel_size(world_size_from_environment())
    with running_ranks(size, config.parallel.expert_placement) as ranks:
        from unifmoe_dist.train import deepspeed

        deepspeed.load_all()  # what it makes at import is no part of training
        if ranks.device.type == "cuda":
            load = _train(config, ranks)
            return torch.cuda.max_memory_allocated(), load
        with allocations() as peak:
            load = _train(config, ranks)
        return peak(), load


def _train(config: TrainConfig, ranks: Ranks) -> Load | None:
    from unifmoe_dist.train.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, ranks, Path(ranks.share(folder)), task_of_sizes(config))
        trainer.algorithm.train()
        for _ in range(_STEPS):
            trainer.train_step()
        usage = list(collect_usage(trainer.model, ranks).values())
        ranks.barrier()  # rank 0 writes into its folder
    return Load(fmean(u.shared_block_count for u in usage), fmean(u.expert_count for u in usage)) if usage else None


def settings(folder: Path) -> Iterator[tuple[str, TrainConfig, int]]:
    """What a CPU can run, one thing changed at a time: name, configuration and ranks.

    A BERT of medium size is described in the folder given.
    """
    from transformers import BertConfig

    sizes: dict[str, Any] = dict(hidden_size=256, num_hidden_layers=6, num_attention_heads=8, intermediate_size=1024)
    BertConfig(**sizes).save_pretrained(folder)
    model = "--model.pretrained none --model.dropout 0.1"
    common = {
        "digits ViT": "--data.task digits --data.batch_size 16",
        "DeiT-S": f"{model} --data.task pacs --model.layers [8,10] --model.drop_path 0.1",
        "BERT": f"{model} --data.task rte --model.layers [2,4] --model.num_blocks 16 --model.backbone {folder} "
        "--data.batch_size 32",
    }
    for setting in yaml.safe_load(Path(__file__).with_name("measured_settings.yaml").read_text()):
        name = setting["name"]
        given = [*common[name.partition(",")[0]].split(), *setting["options"].split()]
        yield name, parse_train_config(given), setting["ranks"]
