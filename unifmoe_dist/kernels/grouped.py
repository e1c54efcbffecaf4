"""Block-sparse experts in plain torch: gather, one matrix product per (expert, block) group, scatter-add.

Only the selected blocks are computed. Runs on any device; it is the fast path on the CPU. The backward pass is
written by hand, because autograd through E*B small products would keep a gathered copy of the tokens for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unifmoe_dist.experts import ExpertWeights
from unifmoe_dist.kernels.activations import FUNCTIONS, activation_and_gradient

# Channels before the activation are kept for the backward pass, which is then a seventh cheaper, while they are no more
# than this many FFNs per token: with the shared expert's, which are at most one, no more than the channels before and
# after the activation that a top-2 mixture keeps. Beyond, they are computed again.
KEPT_FFNS = 3


@torch.compiler.disable
def grouped_block_ffn(x_ND: Tensor, gates_NE: Tensor, blocks_NB: Tensor, weights: ExpertWeights) -> Tensor:
    """Same meaning, shapes and gradients as `reference_block_ffn`, at the cost of the selected blocks only.

    Products run in the autocast dtype when autocast is on, else in the dtype of x; sums over experts and gates are
    float32 (float64 for float64 inputs). Second derivatives are not supported.
    """
    device = x_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_ND.dtype
    recording = torch.is_grad_enabled()  # off inside the function itself
    with torch.autocast(device, enabled=False):
        tensors = [weights.keys, weights.values, weights.key_bias, weights.value_bias]
        keys, values, key_bias, value_bias = (None if t is None else t.to(dtype) for t in tensors)
        output = _GroupedBlockFFN.apply(
            x_ND.to(dtype), gates_NE, blocks_NB, keys, values, key_bias, value_bias, weights.num_blocks,
            weights.activation, recording,
        )  # fmt: skip
        return output.to(x_ND.dtype)


def _groups(active_NE: Tensor, blocks_NB: Tensor) -> tuple[Tensor, list[list[int]]]:
    """Token rows sorted by (expert, block), tokens ascending inside a group, and the size of every group."""
    selected_EBN = active_NE.T[:, None, :] & blocks_NB.T[None, :, :]
    sizes = selected_EBN.sum(-1).tolist()
    return selected_EBN.nonzero()[:, 2].contiguous(), sizes  # contiguous: each group is a slice that ops take as it is


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _GroupedBlockFFN(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any, x: Tensor, gates: Tensor, blocks: Tensor, keys: Tensor, values: Tensor,
        key_bias: Tensor | None, value_bias: Tensor | None, num_blocks: int, activation: str, recording: bool,
    ) -> Tensor:  # fmt: skip
        active = gates != 0  # true for NaN, so that a NaN token stays NaN
        rows, sizes = _groups(active, blocks)
        gates_EN = gates.T.to(x.dtype).contiguous()
        accumulate = _accumulator(x.dtype)
        block_dim = keys.shape[1] // num_blocks
        act = FUNCTIONS[activation]
        kept = recording and len(rows) * block_dim <= KEPT_FFNS * x.shape[0] * keys.shape[1]
        pres = []
        y = x.new_zeros(x.shape, dtype=accumulate)
        for expert, channels, index in _walk(sizes, rows, block_dim):
            pre = _affine(x.index_select(0, index), keys[expert, channels], key_bias, expert, channels)
            hidden = act(pre) * gates_EN[expert].index_select(0, index)[:, None]
            y.index_add_(0, index, (hidden @ values[expert, channels]).to(accumulate))
            if kept:
                pres.append(pre)
        if value_bias is not None:
            y += torch.where(active, gates, 0).to(accumulate) @ value_bias.to(accumulate)
        ctx.save_for_backward(x, gates, rows, keys, values, key_bias, value_bias, *pres)
        ctx.sizes, ctx.block_dim, ctx.activation = sizes, block_dim, activation
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, gates, rows, keys, values, key_bias, value_bias, *pres = ctx.saved_tensors
        gates_EN = gates.T.to(x.dtype).contiguous()
        accumulate = _accumulator(x.dtype)
        grad_y = grad_y.to(x.dtype)
        grad_x = x.new_zeros(x.shape, dtype=accumulate)
        grad_gates_EN = torch.zeros_like(gates_EN, dtype=accumulate)
        grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
        grad_key_bias = None if key_bias is None else torch.zeros_like(key_bias)
        for group, (expert, channels, index) in enumerate(_walk(ctx.sizes, rows, ctx.block_dim)):
            x_g, grad_g = x.index_select(0, index), grad_y.index_select(0, index)
            gate_g = gates_EN[expert].index_select(0, index)[:, None]
            pre = pres[group] if pres else _affine(x_g, keys[expert, channels], key_bias, expert, channels)
            grad_act = grad_g @ values[expert, channels].T  # before the gate: its inner product is the gate's gradient
            hidden, grad_pre = activation_and_gradient(ctx.activation, pre, grad_act * gate_g)
            inner = (hidden.to(accumulate) * grad_act.to(accumulate)).sum(-1)
            grad_gates_EN[expert].index_add_(0, index, inner)
            torch.mm((hidden * gate_g).T, grad_g, out=grad_values[expert, channels])
            torch.mm(grad_pre.T, x_g, out=grad_keys[expert, channels])
            if grad_key_bias is not None:
                grad_key_bias[expert, channels] = grad_pre.sum(0)
            grad_x.index_add_(0, index, (grad_pre @ keys[expert, channels]).to(accumulate))
        grad_gates, grad_value_bias = grad_gates_EN.T, None
        if value_bias is not None:
            active = gates != 0
            grad_wide = grad_y.to(accumulate)
            grad_value_bias = (torch.where(active, gates, 0).to(accumulate).T @ grad_wide).to(value_bias.dtype)
            grad_gates = grad_gates + torch.where(active, grad_wide @ value_bias.to(accumulate).T, 0)
        return (
            grad_x.to(x.dtype), grad_gates.to(gates.dtype), None, grad_keys, grad_values,
            grad_key_bias, grad_value_bias, None, None, None,
        )  # fmt: skip


def _walk(sizes: list[list[int]], rows: Tensor, block_dim: int) -> Iterator[tuple[int, slice, Tensor]]:
    """Expert, channels and token rows of every group that has tokens."""
    start = 0
    for expert, row in enumerate(sizes):
        for block, size in enumerate(row):
            if size:
                yield expert, slice(block * block_dim, (block + 1) * block_dim), rows[start : start + size]
            start += size


def _affine(x: Tensor, keys: Tensor, bias: Tensor | None, expert: int, channels: slice) -> Tensor:
    return x @ keys.T if bias is None else torch.addmm(bias[expert, channels], x, keys.T)
