"""A GPU's operations on fake tensors: what they make, keep and drop; results mean nothing.

Routing and experts are the Triton path's own code (`kernels/triton/`), whose launches do nothing, with tiles for the
shared memory of consumer cards. Triton itself is stood for, so that none need be installed.

Attention runs in one kernel, which keeps q, k, v, the output and one float32 per query and head (FlashAttention, Dao et
al. 2022, and the memory-efficient kernel), where the CPU falls back to whole attention matrices if attention weights
are dropped. Dropout keeps one byte per element, on the CPU a number.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from unifmoe_dist.kernels import select, tile_sizes, triton


@contextmanager
def gpu_operators() -> Iterator[None]:
    """Have operations take the memory of a GPU's.

    Attention and dropout are replaced in torch.nn.functional: a TorchFunctionMode is suspended in the backward pass,
    where checkpoints run their forward pass again.
    """

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p > 0 else input

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
    ) -> Tensor:
        return _Attention.apply(query, key, value, attn_mask)

    passed = SimpleNamespace(ffn_works=lambda *_: True, routing_works=lambda *_: True)
    with (
        patch.multiple(F, scaled_dot_product_attention=attention, dropout=dropout),
        patch.multiple(select, _wants_triton=lambda x: True, self_test=passed),
        _imported(kernels_without_launches()),
    ):
        yield


class _Attention(torch.autograd.Function):
    """q, k, v (..., T, d) -> (..., T, d)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        # The kernels write (batch, T, heads, d) and return a transposed view, so that no copy follows.
        *batch, heads, length, _ = query.shape
        output = query.new_empty((*batch, length, heads, value.shape[-1])).transpose(-2, -3)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, _, sums = ctx.saved_tensors
        torch.empty_like(sums)  # row sums of grad * output
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


class _NoTriton:
    """Triton, and whatever is asked of it, kernels and launches included."""

    def __init__(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getitem__(self, grid: Any) -> Any:
        return self

    def cdiv(self, a: int, b: int) -> int:
        return -(-a // b)

    def next_power_of_2(self, n: int) -> int:
        return 1 << (n - 1).bit_length()


@cache
def kernels_without_launches() -> dict[str, ModuleType]:
    """Copies of the modules of `kernels/triton/`, by name, imported where Triton is `_NoTriton`."""
    stub: Any = _NoTriton()
    package = triton.__name__
    hidden = {name: None for name in sys.modules if name.startswith(f"{package}.")}
    stubs = dict.fromkeys(("triton", "triton.language", "triton.runtime.autotuner"), stub)
    with _imported({**hidden, **stubs}), patch.dict(vars(triton)):
        for name in ("ffn", "routing"):
            import_module(f"{package}.{name}")
        copies = {name: module for name, module in sys.modules.items() if name.startswith(f"{package}.")}
        for name in copies:
            del sys.modules[name]
    shapes = copies[f"{package}.rounds"].LaunchShape
    shapes._tile_rows = lambda shape, x: tile_sizes.tile_rows(shape.n, shape.experts, largest=64)
    return copies


@contextmanager
def _imported(modules: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """Have modules found under these names by whoever imports them, or none under those of None."""
    before = {name: sys.modules.get(name) for name in modules}

    def put(places: Mapping[str, ModuleType | None]) -> None:
        for name, module in places.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module

    put(modules)
    try:
        yield
    finally:
        put(before)
