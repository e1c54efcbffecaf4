"""Where the host would wait for a device: operations whose result, or its size, it must know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING = {"nonzero", "_local_scalar_dense", "masked_select", "equal", "is_nonzero", "bincount", "unique_consecutive"}
_METHODS = ("tolist", "cpu", "numpy")  # without an operation, where tensors are on the CPU


class _Operations(TorchDispatchMode):
    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        masks = [i for i in args[1] if i is not None] if name in ("index", "index_put", "index_put_") else []
        sized = name == "repeat_interleave" and (kwargs or {}).get("output_size") is not None
        unsized = name == "repeat_interleave" and not sized
        if name in _WAITING or "unique" in name or unsized or any(i.dtype == torch.bool for i in masks):
            self.waits.append(name)
        return function(*args, **(kwargs or {}))


@contextmanager
def host_waits() -> Iterator[list[str]]:
    """The waits inside, by name: a stand-in for a device, on CPU tensors."""
    waits: list[str] = []

    def noting(name):
        original = getattr(Tensor, name)

        def method(self, *args, **kwargs):
            waits.append(name)
            return original(self, *args, **kwargs)

        return method

    with ExitStack() as stack:
        for name in _METHODS:
            stack.enter_context(patch.object(Tensor, name, noting(name)))
        stack.enter_context(_Operations(waits))
        yield waits
