"""Memory that kernels need within one pass alone, and write before they read it.

Eager passes take it of torch's allocator, which gives it to the next one. A CUDA graph keeps what it was captured with,
and graphs whose saved tensors share a pool with another's freed memory are overwritten by it, unless all are repeated
in the order of their captures. So each has a pool of its own, and what is large and holds nothing between two launches
is lent to all graphs of a stream, which never run at the same time.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import Tensor


class Scratch:
    """What the passes of one capture are lent: a trial tells how much they take, which the captures are then given.

    Args:
        held: What earlier captures of the stream were given, by name; this one adds to it.
    """

    def __init__(self, held: dict[str, Tensor]) -> None:
        self._shared, self._bytes = held, dict[str, int]()
        self._given: dict[str, Tensor] | None = None

    def hold(self, device: torch.device) -> None:
        """Have as much as was taken so far; outside of a capture, whose memory would be that graph's own."""
        for name, size in self._bytes.items():
            if name not in self._shared or self._shared[name].numel() < size:
                # What is too small stays with the graphs that have it.
                self._shared[name] = torch.empty(size, dtype=torch.uint8, device=device)
        self._given = {name: self._shared[name] for name in self._bytes}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Undefined memory of a shape, until the pass ends; two of one pass have different names."""
        size = math.prod(shape) * dtype.itemsize
        given = None if self._given is None else self._given.get(name)
        if given is not None and given.numel() >= size:
            return given[:size].view(dtype).view(*shape)
        self._bytes[name] = max(size, self._bytes.get(name, 0))
        return torch.empty(shape, dtype=dtype, device=device)


_LENT: ContextVar[Scratch | None] = ContextVar("scratch of the pass", default=None)


@contextlib.contextmanager
def lending(scratch: Scratch) -> Iterator[None]:
    """Passes within are lent this memory, and the backward passes that belong to them."""
    token = _LENT.set(scratch)
    try:
        yield
    finally:
        _LENT.reset(token)


def lent() -> Scratch | None:
    """What this pass is lent; a forward pass tells its backward pass, which runs in another thread."""
    return _LENT.get()


def take(scratch: Scratch | None, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`Scratch.take`, or memory of torch's allocator where nothing is lent."""
    if scratch is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return scratch.take(name, shape, dtype, device)
