"""How long a run trains: passes over the data in place of steps, and which evaluation was best so far.

An epoch is ceil(N / batch_size) steps, N the items of the largest training environment. Every batch is full, so that
ranks have equal shares at any world size: where batch_size does not divide N, the last batch of an epoch takes its
missing items from the beginning of the next pass, and no item is left out.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.metrics import ACCURACY, Metric
from unifmoe_dist.data.task import TaskData
from unifmoe_dist.errors import UserError

MOST_PASSES = 10
"""Over the data in one batch; a few are of use where it is tried on a handful of items."""


def steps_per_epoch(config: TrainConfig, task: TaskData) -> int:
    """Optimiser steps in one pass over the largest training environment, rounded up.

    Raises:
        UserError: a batch is far larger than all data, which would take the memory of the machine.
    """
    size, batch = max(len(part) for part in task.train), config.data.batch_size  # type: ignore[arg-type]
    if batch > MOST_PASSES * size:
        raise UserError(
            f"data.batch_size {batch} holds all {size} items of the largest training environment more than "
            f"{MOST_PASSES} times; give at most {size}."
        )
    return -(-size // batch)


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


@dataclass
class Selection:
    """The best validation score by a metric and the evaluations since; the earliest of equal scores wins.

    Ranks that are given the same scores decide alike, so nothing needs to be exchanged.

    Attributes:
        step, score, accuracy: Of the best evaluation; 0 and None before the first.
        waited: Evaluations in a row since then that were no better.
        metric: Says which of two scores is better.
    """

    step: int = 0
    score: float | None = None
    accuracy: float | None = None
    waited: int = 0
    metric: Metric = ACCURACY

    def offer(self, step: int, score: float, accuracy: float) -> bool:
        """Take note of an evaluation; whether it is the best so far."""
        better = self.score is None or self.metric.better(score, self.score)
        if better:
            self.step, self.score, self.accuracy, self.waited = step, score, accuracy, 0
        else:
            self.waited += 1
        return better

    def exhausted(self, patience: int | None) -> bool:
        """Whether `patience` evaluations in a row were no better than the best; never, for None."""
        return patience is not None and self.waited >= patience

    def progress(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {
            "best": self.score,
            "best_step": self.step,
            "best_accuracy": self.accuracy,
            "evaluations_without_improvement": self.waited,
        }

    @classmethod
    def from_progress(cls, saved: dict[str, Any], metric: Metric = ACCURACY) -> Selection:
        """The inverse of `progress`. Checkpoints older than these fields were selected by accuracy."""
        if not saved["best_step"]:
            return cls(metric=metric)
        best, waited = saved["best"], saved.get("evaluations_without_improvement", 0)
        return cls(saved["best_step"], best, saved.get("best_accuracy", best), waited, metric)
