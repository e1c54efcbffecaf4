"""Some of a run's test data, drawn once and by the same seed for every run: what its layers are watched on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Any

import torch
from torch import Tensor

from unifmoe_dist.data.registry import find_task
from unifmoe_dist.data.task import Batch
from unifmoe_dist.runtime.heartbeat import followed
from unifmoe_dist.studies.run_report.loading import LoadedRun
from unifmoe_dist.studies.usage.maps import PatchGrid
from unifmoe_dist.train.evaluate import to_device

MOST_TOKENS = 20_000
SEED = 0

Place = tuple[int, int]
"""Data set of a task's test data, and index in it."""


@dataclass(frozen=True)
class Sample:
    """Items of a run's test data in the order in which they are seen.

    Args:
        run: The run.
        places: (data set, index) of every item.
    """

    run: LoadedRun
    places: list[Place]

    def items(self, first: int, count: int) -> list[Any]:
        """Items of the task, not collated."""
        return [self.run.task.test[data][index] for data, index in self.places[first : first + count]]

    def batch(self, count: int) -> Batch:
        """The first `count` items, or all if there are fewer, on the run's device."""
        inputs, labels = self.run.task.collate(self.items(0, count))
        return to_device(inputs, self.run.device, torch.float32), labels

    def batches(self, progress: str) -> Iterator[dict[str, Tensor]]:
        """Model inputs of all items; `progress` names the bar that a terminal shows."""
        size = self.run.config.data.eval_batch_size
        for first in followed(range(0, len(self.places), size), progress):
            inputs, _ = self.run.task.collate(self.items(first, size))
            yield to_device(inputs, self.run.device, torch.float32)


def test_places(run: LoadedRun) -> list[Place]:
    """All items of a run's test data, in order."""
    return [(data, index) for data, items in enumerate(run.task.test) for index in range(len(items))]  # type: ignore[arg-type]


def draw_sample(
    run: LoadedRun, most_tokens: int = MOST_TOKENS, most_items: int | None = None, among: Sequence[Place] | None = None
) -> Sample:
    """Items at random, as many as have at most so many tokens together, or so many items; at least one.

    Padding does not count. `among` are the items to choose from, by default all.
    """
    places = list(test_places(run) if among is None else among)
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(SEED)).tolist()
    places = [places[i] for i in order]
    if most_items is not None:
        return Sample(run, places[:most_items])
    if not run.is_text:
        return Sample(run, places[: max(1, most_tokens // PatchGrid.of(run.model).tokens)])
    tokens = accumulate(len(run.task.test[data][index][0]) for data, index in places)
    fitting = sum(1 for _ in takewhile(lambda total: total <= most_tokens, tokens))
    return Sample(run, places[: max(1, fitting)])


def pixels(run: LoadedRun, images: Tensor) -> Tensor:
    """Images (n, channels, height, width) as they were before normalisation, in 0..1, on the CPU."""
    task = find_task(run.config.data.task)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (task.mean, task.std))
    return (images.cpu() * std + mean).clamp(0, 1)


def label_names(run: LoadedRun) -> tuple[str, ...]:
    """Names of the task's classes, or their numbers."""
    names = find_task(run.config.data.task).class_names
    return names or tuple(str(number) for number in range(run.task.num_classes))


def token_strings(run: LoadedRun, items: list[Any]) -> list[list[str]]:
    """Tokens of text items as strings, special ones included."""
    tokenizer = find_task(run.config.data.task).tokenizer(run.config)
    return [tokenizer.convert_ids_to_tokens(item[0]) for item in items]
