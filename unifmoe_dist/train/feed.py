"""Batches on the device, the next one on its way while one computes.

To a CUDA device a batch goes from pinned memory, on a stream of its own, and the host does not wait for it. Elsewhere
a batch is where the model is when it is read, and nothing is read before it is asked for.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, cuda

from unifmoe_dist.data.task import Batch
from unifmoe_dist.train.batches import TrainBatches
from unifmoe_dist.train.nested import map_tensors, pinned, to_device

Given = TypeVar("Given")


class CopyStream:
    """A stream that copies to a CUDA device beside what computes there."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._stream = device, cuda.Stream(device)

    def start(self, value: Any) -> tuple[Any, Any]:
        """Start to copy tensors in `value`: they on the device, and the event after which they are there."""
        ready = map_tensors(value, pinned)
        with cuda.stream(self._stream):
            moved = map_tensors(ready, lambda t: t.to(self.device, non_blocking=True))
            return moved, self._stream.record_event()

    def hand_over(self, moved: Any, there: Any) -> None:
        """Let the stream that computes wait for the copy; its memory is not taken again before that stream is done."""
        computing = cuda.current_stream(self.device)
        computing.wait_event(there)

        def used(tensor: Tensor) -> Tensor:
            tensor.record_stream(computing)
            return tensor

        map_tensors(moved, used)


class Feed(Generic[Given]):
    """Iterates over batches on their way to a device; `fetch` starts the one that comes next.

    Call it when the work on a batch has been given to the device: the host reads, and the copy travels, meanwhile.

    Args:
        batches: Anything with tensors in it.
        device: Where to.
    """

    def __init__(self, batches: Iterable[Given], device: torch.device) -> None:
        self.source = iter(batches)
        self.device = device
        self._stream = CopyStream(device) if device.type == "cuda" else None
        self._ahead: deque[Callable[[], Given]] = deque()

    def fetch(self) -> None:
        """Start the next batch on its way, unless it is; where no device is fed, do nothing."""
        if self._stream is not None and not self._ahead:
            self._ahead.append(self._start(self._stream))

    def _start(self, stream: CopyStream) -> Callable[[], Given]:
        """Start the next batch; the result gives it, or raises what reading it raised, when its turn has come."""
        try:
            moved, there = stream.start(next(self.source))
        except Exception as error:  # StopIteration, too
            failure = error

            def fail() -> Given:
                raise failure

            return fail

        def give() -> Given:
            stream.hand_over(moved, there)
            return moved

        return give

    def __iter__(self) -> Iterator[Given]:
        return self

    def __next__(self) -> Given:
        if self._stream is None:
            return to_device(next(self.source), self.device)
        self.fetch()
        return self._ahead.popleft()()


class TrainFeed:
    """A rank's training batches on its device, step by step.

    A batch that is on its way when a run is saved is no part of the run: which items a step has is known from its
    number alone.
    """

    def __init__(self, batches: TrainBatches, device: torch.device) -> None:
        self.source, self.device = batches, device
        self._feed: Feed[Batch] | None = None
        self._position = 0  # of the batch that the feed gives next, in micro-batches from step 0

    def step(self, step: int) -> Iterator[Batch]:
        """This rank's micro-batches at `step` (from 0); one that has been given already is read again, aside."""
        count = self.source.micro_batches
        first = step * count
        if self.device.type != "cuda" or self._feed is not None and first < self._position:
            yield from Feed(self.source.step(step), self.device)
            return
        if self._feed is None or first != self._position:
            following = itertools.chain.from_iterable(map(self.source.step, itertools.count(step)))
            self._feed, self._position = Feed(following, self.device), first
        for _ in range(count):
            batch = next(self._feed)
            self._position += 1
            yield batch

    def fetch(self) -> None:
        """Start the batch that comes next on its way, see `Feed.fetch`."""
        if self._feed is not None:
            self._feed.fetch()

    def close(self) -> None:
        """Drop what is on its way, and end the processes that read ahead."""
        self._feed = None
        self.source.close()
