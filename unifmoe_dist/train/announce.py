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
    lines = _where(config, ranks), _what(config, ranks, model), _data(config, task), _batch(config, ranks, task)
    return [f"{folder} {begun}", *(f"  {line}" for line in lines)]


def _where(config: TrainConfig, ranks: Ranks) -> str:
    if ranks.device.type == "cuda":
        device = torch.cuda.get_device_name(ranks.device)
    else:
        device = f"CPU, {_counted(torch.get_num_threads(), 'thread')} per rank"
    parallel = config.parallel
    size = config.expert_parallel_size(ranks.world_size)
    return (
        f"{_counted(ranks.world_size, 'rank')} on {device}; expert-parallel size {size}, ZeRO {parallel.zero_stage}, "
        f"{parallel.precision}"
    )


def _what(config: TrainConfig, ranks: Ranks, model: nn.Module) -> str:
    own = whole = 0
    size = config.expert_parallel_size(ranks.world_size)
    for parameter in model.parameters():
        own += parameter.numel()
        whole += parameter.numel() * (size if deepspeed.is_sharded(parameter) else 1)
    here = f" ({own:,} on each rank)" if own != whole else ""
    chosen = config.model
    if not method_of(chosen.moe).layer:
        kind = "dense model"
    else:
        layers = ", ".join(map(str, chosen.layers))
        kind = f"{chosen.moe} in layer{'s' * (len(chosen.layers) > 1)} {layers} with {chosen.num_experts} experts each"
    return f"model: {kind}; {whole:,} parameters{here}"


def _data(config: TrainConfig, task: TaskData) -> str:
    held = find_task(config.data.task).held_out(config)
    environments = f" of {_counted(len(task.train), 'environment')}" if len(task.train) > 1 else ""
    return (
        f"data: {task.name}{f', {held} held out' if held else ''}; {_items(task.train)} items{environments} to train, "
        f"{_items(task.validation)} to validate, {_items(task.test)} to test"
    )


def _batch(config: TrainConfig, ranks: Ranks, task: TaskData) -> str:
    batch = config.data.batch_size * len(task.train)
    each = f" ({config.data.batch_size} of each environment)" if len(task.train) > 1 else ""
    at_once = batch // ranks.world_size // config.parallel.gradient_accumulation
    return f"batch: {batch:,} items a step{each}, {at_once:,} at a time on each rank"


def _items(datasets: Sequence[Any]) -> str:
    return f"{sum(len(data) for data in datasets):,}"


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"
