"""Models without storage, of which sizes alone are asked."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def without_storage() -> Iterator[None]:
    """Models built inside are on the meta device; torch's random numbers are afterwards as before."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"), _Unfilled():
        yield


class _Unfilled(TorchFunctionMode):
    """Weights are left as made: to fill in those without storage takes more than half of the time of building them."""

    fills = frozenset(["uniform_", "normal_", "erfinv_", "mul_", "add_", "clamp_", "fill_", "zero_"])

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in self.fills and args and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))
