"""The first lines of a run: where it runs, what is trained, on what, and in which steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.data.task import TaskData
from unifmoe_dist.methods.registry import method_of
from unifmoe_dist.runtime.ranks import Ranks
from unifmoe_dist.train import deepspeed


def first_lines(
    config: TrainConfig, ranks: Ranks, task: TaskData, model: nn.Module, folder: Path, step: int
) -> list[str]:
    """What is worth knowing before the first step; `step` steps are done. `config` is in steps."""
    if step >= config.steps:
        return [f"{folder} is complete at step {step}; it is tested again"]
    begun = f"goes on from step {step} of {config.steps}" if step else f"starts, {config.steps} steps"
    if ranks.device.type == "cuda":
        device = torch.cuda.get_device_name(ranks.device)
    else:
        device = f"CPU, {_counted(torch.get_num_threads(), 'thread')} per rank"
    parallel, size = config.parallel, config.expert_parallel_size(ranks.world_size)
    held, several = find_task(config.data.task).held_out(config), len(task.train) > 1
    batch = config.data.batch_size * len(task.train)
    at_once = batch // ranks.world_size // parallel.gradient_accumulation
    return [
        f"{folder} {begun}",
        f"  {_counted(ranks.world_size, 'rank')} on {device}; expert-parallel size {size}, ZeRO {parallel.zero_stage}, "
        f"{parallel.precision}",
        f"  model: {_kind(config)}; {_parameters(model, size)}",
        f"  data: {task.name}{f', {held} held out' if held else ''}; {_items(task.train)} items"
        f"{f' of {len(task.train)} environments' if several else ''} to train, {_items(task.validation)} to validate, "
        f"{_items(task.test)} to test",
        f"  batch: {batch:,} items a step{f' ({config.data.batch_size} of each environment)' if several else ''}, "
        f"{at_once:,} at a time on each rank",
    ]


def _kind(config: TrainConfig) -> str:
    chosen = config.model
    if not method_of(chosen.moe).layer:
        return "dense model"
    layers = f"layer{'s' * (len(chosen.layers) > 1)} {', '.join(map(str, chosen.layers))}"
    return f"{chosen.moe} in {layers} with {chosen.num_experts} experts each"


def _parameters(model: nn.Module, expert_parallel_size: int) -> str:
    own = whole = 0
    for parameter in model.parameters():
        own += parameter.numel()
        whole += parameter.numel() * (expert_parallel_size if deepspeed.is_sharded(parameter) else 1)
    return f"{whole:,} parameters" + (f" ({own:,} on each rank)" if own != whole else "")


def _items(datasets: Sequence[Any]) -> str:
    return f"{sum(len(data) for data in datasets):,}"


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"
