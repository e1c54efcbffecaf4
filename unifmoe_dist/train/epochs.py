"""Counting a run in passes over the data instead of steps.

An epoch is ceil(N / batch_size) steps, N the items of the largest training environment. Every batch is full, so that
ranks have equal shares at any world size: where batch_size does not divide N, the last batch of an epoch takes its
missing items from the beginning of the next pass, and no item is left out.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.task import TaskData
from unifmoe_dist.errors import UserError


def steps_per_epoch(config: TrainConfig, task: TaskData) -> int:
    """Optimiser steps in one pass over the largest training environment, rounded up."""
    return max(-(-len(part) // config.data.batch_size) for part in task.train)  # type: ignore[arg-type]


def in_steps(config: TrainConfig, task: TaskData) -> TrainConfig:
    """The configuration with `epochs`, if given, turned into `steps`, and an evaluation after each."""
    if config.epochs is None:
        return config
    size, planned = steps_per_epoch(config, task), copy(config)
    planned.steps, planned.eval_every = config.epochs * size, size  # as nobody may give them beside epochs
    return planned


def check_epochs(config: TrainConfig, epoch_steps: int, progress: dict[str, Any]) -> None:
    """Refuse to resume a run, counted in epochs, whose epochs were of another length or are behind it.

    Raises:
        UserError: naming both numbers, of `epoch_steps` now and of those in the checkpoint's `progress`.
    """
    if config.epochs is None:
        return
    if epoch_steps != progress.get("epoch_steps", epoch_steps):
        raise UserError(
            f"the run's epochs had {progress['epoch_steps']} steps and would now have {epoch_steps}; resume it with "
            "the data.batch_size and the data that it was started with."
        )
    if config.steps < progress["step"]:
        reached = progress["step"] / epoch_steps
        raise UserError(
            f"the run is at epoch {reached:g} already, beyond --epochs {config.epochs}; give a larger --epochs, or "
            "none to test the run again."
        )
