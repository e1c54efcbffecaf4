"""What memory holds, by kind, and what it held when it held most."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = ("weights", "master weights", "optimiser states", "gradients", "activations", "buffers")


class Ledger:
    """Bytes in use on one device.

    Attributes:
        live: Bytes in use now, by kind.
        peak: Bytes by kind at the moment of the largest total.
        most: The largest number of every kind, at whatever moment.
    """

    def __init__(self) -> None:
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self._total = self._highest = 0

    def add(self, kind: str, size: float) -> None:
        """Take `size` bytes into use; a negative number gives them back."""
        self.live[kind] += int(size)
        self.most[kind] = max(self.most[kind], self.live[kind])
        self._total += int(size)
        if self._total > self._highest:
            self._highest, self.peak = self._total, self.live.copy()

    def spike(self, kind: str, size: float) -> None:
        """Bytes that are taken and given back at once."""
        self.add(kind, size)
        self.add(kind, -size)

    @property
    def highest(self) -> int:
        """The largest total so far."""
        return self._highest


class LiveBytes(TorchDispatchMode):
    """Enters every storage that operations make into a ledger, and takes it out when the last tensor on it is gone.

    Works on real tensors and, because only sizes matter, on fake ones, which take neither memory nor time.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger
        self.kind = "activations"
        self._known: dict[int, str] = {}

    def ignore(self, tensor: Tensor) -> None:
        """Leave a tensor's storage out: it is entered elsewhere."""
        self._known.setdefault(_address(tensor), "")

    def relabel(self, tensor: Tensor, kind: str) -> None:
        """Enter a tensor's storage under another kind."""
        storage = tensor.untyped_storage()
        before = self._known.get(_address(tensor), "")
        if before and before != kind:
            self._known[_address(tensor)] = kind
            self.ledger.add(before, -storage.nbytes())
            self.ledger.add(kind, storage.nbytes())

    @contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """New storages are of this kind."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return False  # earlier Transformers ask whether a mask is all ones, to drop it: with padding it stays
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._enter(value)
        return result

    def _enter(self, tensor: Tensor) -> None:
        address = _address(tensor)
        if address not in self._known:
            storage = tensor.untyped_storage()
            self._known[address] = self.kind
            self.ledger.add(self.kind, storage.nbytes())
            weakref.finalize(storage, self._leave, address, storage.nbytes()).atexit = False

    def _leave(self, address: int, size: int) -> None:
        self.ledger.add(self._known.pop(address), -size)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
