"""Which items each rank sees at each step: a pure function of (seed, step, rank), so resuming needs no state.

The global batch of a step is the same at every world size; ranks take equal, contiguous slices of it.
"""

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from unifmoe_dist.data.task import Batch, TaskData
from unifmoe_dist.train.read_ahead import read_ahead


@dataclass(frozen=True)
class Item:
    """One item of one of the data sets; `seeds` together seed its augmentation, None leaves it as it is."""

    dataset: int
    index: int
    seeds: tuple[int, ...] | None = None


@dataclass(frozen=True)
class BatchReader:
    """Makes a batch from a list of items: all that a worker process needs to know of a task."""

    datasets: Sequence[Dataset]
    collate: Callable[[list[Any]], Batch]
    augment: Callable[[Any, torch.Generator], Any] | None = None

    def __call__(self, items: Sequence[Item]) -> Batch:
        return self.collate([self._read(item) for item in items])

    def _read(self, item: Item) -> Any:
        value = self.datasets[item.dataset][item.index]
        if self.augment is None or item.seeds is None:
            return value
        return self.augment(value, _generator(*item.seeds))


class TrainBatches:
    """Training batches: `batch_size` items of every environment per step, over all ranks and micro-batches.

    Args:
        batch_size: Items per environment and step; must divide by world_size * micro_batches.
        micro_batches: Parts into which a rank's share is cut.
        workers: Processes that read ahead; they change no batch.
        replacement: Draw every item anew from its whole environment, in place of epochs.
        pin: Whether batches that were read ahead are in pinned memory, from which a device copies by itself.
    """

    def __init__(
        self,
        task: TaskData,
        batch_size: int,
        seed: int,
        rank: int,
        world_size: int,
        micro_batches: int,
        workers: int = 0,
        replacement: bool = False,
        pin: bool = False,
    ) -> None:
        self.task, self.batch_size, self.seed = task, batch_size, seed
        self.rank, self.world_size, self.micro_batches = rank, world_size, micro_batches
        self.workers, self.replacement, self.pin = workers, replacement, pin
        self._read = BatchReader(task.train, task.collate, task.augment)
        self._permutation = lru_cache(maxsize=4 * len(task.train))(self._permutation_of_epoch)
        self._stream: Generator[Batch, None, None] | None = None
        self._position = 0  # of the stream's next batch, counted in micro-batches from step 0

    def _permutation_of_epoch(self, environment: int, epoch: int) -> list[int]:
        generator = _generator(self.seed, environment, epoch)
        return torch.randperm(len(self.task.train[environment]), generator=generator).tolist()  # type: ignore[arg-type]

    def indices(self, environment: int, step: int) -> list[int]:
        """Global batch of one environment at one step; epochs follow each other without a gap."""
        size = len(self.task.train[environment])  # type: ignore[arg-type]
        if self.replacement:
            generator = _generator(self.seed, environment, step, _REPLACEMENT)
            return torch.randint(size, (self.batch_size,), generator=generator).tolist()
        first = step * self.batch_size
        return [self._permutation(environment, i // size)[i % size] for i in range(first, first + self.batch_size)]

    def step(self, step: int) -> Iterator[Batch]:
        """This rank's micro-batches at `step` (from 0).

        With workers, steps asked for one after the other come from those that were read ahead; another step starts
        reading anew there, and one that has been read already is read again here.
        """
        first = step * self.micro_batches
        if self.workers == 0 or self._stream is not None and first < self._position:
            yield from map(self._read, self._items(step))
            return
        if self._stream is None or first != self._position:
            following = itertools.chain.from_iterable(map(self._items, itertools.count(step)))
            self._stream, self._position = read_ahead(self._read, following, self.workers, self.pin), first
        for _ in range(self.micro_batches):
            batch = next(self._stream)
            self._position += 1
            yield batch

    def sample(self, step: int) -> Batch:
        """This rank's first micro-batch at `step`, read here, whatever is read ahead."""
        return self._read(next(self._items(step)))

    def close(self) -> None:
        """End the processes that read ahead; a later step starts new ones."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _items(self, step: int) -> Iterator[list[Item]]:
        """The items of this rank's micro-batches; an item's augmentation does not depend on the rank that reads it."""
        share = self.batch_size // self.world_size // self.micro_batches
        orders = [self.indices(environment, step) for environment in range(len(self.task.train))]
        for micro in range(self.micro_batches):
            first = (self.rank * self.micro_batches + micro) * share
            yield [
                Item(environment, order[position], (self.seed, step, environment, position))
                for environment, order in enumerate(orders)
                for position in range(first, first + share)
            ]


_REPLACEMENT = 1
"""Sets the numbers of draws with replacement apart from those of the epochs' orders."""


def _generator(*numbers: int) -> torch.Generator:
    """A generator seeded by all the numbers together."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1)


def evaluation_batches(
    dataset: Dataset, task: TaskData, batch_size: int, rank: int, world_size: int, workers: int = 0, pin: bool = False
) -> Iterator[tuple[Batch, Tensor]]:
    """This rank's share of a dataset, every item once over all ranks, and a 0/1 weight per item.

    Every rank yields the same number of batches, as collective layers need; a rank that has run out repeats an item
    with weight 0. `workers` processes read ahead, into pinned memory where `pin` says so.
    """
    total = len(dataset)  # type: ignore[arg-type]
    own = range(rank, total, world_size)
    chosen = [
        own[number * batch_size : (number + 1) * batch_size] for number in range(-(-total // (world_size * batch_size)))
    ]
    keys = [[Item(0, index) for index in part or [0]] for part in chosen]
    batches = read_ahead(BatchReader([dataset], task.collate), keys, min(workers, len(keys)), pin)
    for part, batch in zip(chosen, batches, strict=True):
        yield batch, torch.ones(len(part)) if part else torch.zeros(1)
