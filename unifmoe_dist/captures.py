"""Torch's calls around CUDA graphs, as graphs of layers need them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class Cuda:
    """Captures on CUDA devices, on a stream aside."""

    def __init__(self) -> None:
        self._streams: dict[Hashable, torch.cuda.Stream] = {}

    def takes(self, x: Tensor) -> bool:
        """Whether a pass over x may be captured or repeated now."""
        return x.is_cuda and not torch.cuda.is_current_stream_capturing()

    def place(self, x: Tensor) -> Hashable:
        """Where graphs over x run, one after the other."""
        return x.device, torch.cuda.current_stream(x.device).cuda_stream

    @contextlib.contextmanager
    def aside(self, x: Tensor) -> Iterator[None]:
        """On a stream on which x's device can be captured; leaves its generator as it was."""
        with torch.cuda.device(x.device), torch.random.fork_rng(devices=[x.device]):
            current = torch.cuda.current_stream()
            # Libraries keep memory for each stream, which two places must not share: their graphs may meet.
            if (place := self.place(x)) not in self._streams:
                self._streams[place] = torch.cuda.Stream()
            stream = self._streams[place]
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):
                    yield
            finally:
                current.wait_stream(stream)

    def waits(self, run: Callable[[], Any]) -> bool:
        """Run it, inside `aside`; whether that made the host wait for the device, which no graph can repeat.

        Better known before a capture: one that fails may leave the device's generator in it.
        """
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        return any("called a synchronizing" in str(warning.message) for warning in said)

    def pool(self) -> Any:
        """Memory for graphs that always are repeated in the order of their captures."""
        return torch.cuda.graph_pool_handle()

    def capture(self, pool: Any, run: Callable[[], Sequence[Any]]) -> tuple[Callable[[], None], Sequence[Any]]:
        """What repeats `run`, inside `aside`, and its tensors, which a repetition writes again."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            # Other threads may pin memory meanwhile, which the mode "global" would not have.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                made = run()
        except BaseException:
            _end(pool)
            raise
        finally:
            torch.cuda.set_stream(stream)  # where the capture failed, it has not been put back
        return graph.replay, made


def _end(pool: Any) -> None:
    """Have the allocator know that a failed capture is over, which torch before 2.14 may not tell it.

    It would take it for underway: memory that streams share is never used again then, and `empty_cache` raises.
    """
    number = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # where it knows
        torch._C._cuda_endAllocateToPool(number, pool)
        torch._C._cuda_releasePool(number, pool)
