"""Which items each rank sees at each step: a pure function of (seed, step, rank), so resuming needs no state.

The global batch of a step is the same at every world size; ranks take equal, contiguous slices of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from unifmoe_dist.data.base import Batch, TaskData


class TrainBatches:
    """Training batches: `batch_size` items of every environment per step, over all ranks and micro-batches.

    Args:
        task: The data.
        batch_size: Items per environment and step; must divide by world_size * micro_batches.
        seed: Seed of the order and of augmentation.
        rank: This rank.
        world_size: Number of ranks.
        micro_batches: Parts into which a rank's share is cut.
    """

    def __init__(
        self, task: TaskData, batch_size: int, seed: int, rank: int, world_size: int, micro_batches: int
    ) -> None:
        self.task, self.batch_size, self.seed = task, batch_size, seed
        self.rank, self.world_size, self.micro_batches = rank, world_size, micro_batches
        self._permutation = lru_cache(maxsize=4 * len(task.train))(self._permutation_of_epoch)

    def _permutation_of_epoch(self, environment: int, epoch: int) -> list[int]:
        generator = _generator(self.seed, environment, epoch)
        return torch.randperm(len(self.task.train[environment]), generator=generator).tolist()  # type: ignore[arg-type]

    def indices(self, environment: int, step: int) -> list[int]:
        """Global batch of one environment at one step; epochs follow each other without a gap."""
        size = len(self.task.train[environment])  # type: ignore[arg-type]
        first = step * self.batch_size
        return [
            self._permutation(environment, i // size)[i % size] for i in range(first, first + self.batch_size)
        ]

    def step(self, step: int) -> Iterator[Batch]:
        """This rank's micro-batches at `step` (from 0)."""
        share = self.batch_size // self.world_size // self.micro_batches
        for micro in range(self.micro_batches):
            first = (self.rank * self.micro_batches + micro) * share
            places = [
                (environment, position)
                for environment in range(len(self.task.train))
                for position in range(first, first + share)
            ]
            items = [self.task.train[e][self.indices(e, step)[position]] for e, position in places]
            inputs, labels = self.task.collate(items)
            if self.task.augment is not None:
                inputs = self._augmented(inputs, [_generator(self.seed, step, *place) for place in places])
            yield inputs, labels

    def _augmented(self, inputs: dict[str, Tensor], generators: list[torch.Generator]) -> dict[str, Tensor]:
        """Augment item by item: what happens to an item must not depend on the rank that it falls to."""
        assert self.task.augment is not None
        singles = [
            self.task.augment({name: value[i : i + 1] for name, value in inputs.items()}, generator)
            for i, generator in enumerate(generators)
        ]
        return {name: torch.cat([single[name] for single in singles]) for name in inputs}


def _generator(*numbers: int) -> torch.Generator:
    """A generator seeded by all the numbers together."""
    return torch.Generator().manual_seed(
        int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)
    )


def evaluation_batches(
    dataset: Dataset, task: TaskData, batch_size: int, rank: int, world_size: int
) -> Iterator[tuple[Batch, Tensor]]:
    """This rank's share of a dataset, every item once over all ranks, and a 0/1 weight per item.

    Every rank yields the same number of batches, as collective layers need; a rank that has run out repeats an item
    with weight 0.
    """
    total = len(dataset)  # type: ignore[arg-type]
    own = list(range(rank, total, world_size))
    for number in range(-(-total // (world_size * batch_size))):
        chosen = own[number * batch_size : (number + 1) * batch_size]
        weight = torch.ones(len(chosen)) if chosen else torch.zeros(1)
        yield task.collate([dataset[i] for i in (chosen or [0])]), weight
