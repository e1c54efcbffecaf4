"""Operations that keep other tensors on a GPU than on the CPU, with sizes as on a GPU.

Attention there runs in one fused kernel, which keeps q, k, v, the output and one float32 per query and head
(FlashAttention, Dao et al. 2022, and the memory-efficient kernel); the CPU falls back to whole attention matrices where
attention weights are dropped. Dropout keeps one byte per element on a GPU, a number on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@contextmanager
def gpu_operators() -> Iterator[None]:
    """Attention and dropout with the memory of a GPU's kernels; results mean nothing.

    Replaces the two functions of torch.nn.functional: a TorchFunctionMode is suspended in the backward pass, where
    checkpoints run their forward pass again.
    """
    before = F.scaled_dot_product_attention, F.dropout
    F.scaled_dot_product_attention, F.dropout = _attention, _dropout
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.dropout = before


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
) -> Tensor:
    return _FusedAttention.apply(query, key, value, attn_mask)


class _FusedAttention(torch.autograd.Function):
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
        inner = torch.empty_like(sums)  # row sums of grad * output
        del inner
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None
