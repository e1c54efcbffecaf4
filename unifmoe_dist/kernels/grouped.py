"""Block-sparse experts in plain torch: gather, one matrix product per (expert, block) group, scatter-add.

Only the selected blocks are computed. Runs on any device; it is the fast path on the CPU. The backward pass is
written by hand, because autograd through E*B small products would keep a gathered copy of the tokens for each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unifmoe_dist.experts import ExpertWeights
from unifmoe_dist.kernels.activations import FUNCTIONS, activation_and_gradient


@torch.compiler.disable
def grouped_block_ffn(x_ND: Tensor, gates_NE: Tensor, blocks_NB: Tensor, weights: ExpertWeights) -> Tensor:
    """Same meaning, shapes and gradients as `reference_block_ffn`, at the cost of the selected blocks only.

    Products run in the autocast dtype when autocast is on, else in the dtype of x; sums over experts and gates are
    float32 (float64 for float64 inputs). Second derivatives are not supported.
    """
    device = x_ND.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_ND.dtype
    with torch.autocast(device, enabled=False):
        tensors = [weights.keys, weights.values, weights.key_bias, weights.value_bias]
        keys, values, key_bias, value_bias = (None if t is None else t.to(dtype) for t in tensors)
        output = _GroupedBlockFFN.apply(
            x_ND.to(dtype), gates_NE, blocks_NB, keys, values, key_bias, value_bias, weights.num_blocks,
            weights.activation,
        )  # fmt: skip
        return output.to(x_ND.dtype)


def _groups(active_NE: Tensor, blocks_NB: Tensor) -> tuple[Tensor, list[list[int]]]:
    """Token rows sorted by (expert, block), tokens ascending inside a group, and the size of every group."""
    selected_EBN = active_NE.T[:, None, :] & blocks_NB.T[None, :, :]
    sizes = selected_EBN.sum(-1).tolist()
    return selected_EBN.nonzero()[:, 2], sizes


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _GroupedBlockFFN(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any, x: Tensor, gates: Tensor, blocks: Tensor, keys: Tensor, values: Tensor,
        key_bias: Tensor | None, value_bias: Tensor | None, num_blocks: int, activation: str,
    ) -> Tensor:  # fmt: skip
        active = gates != 0  # true for NaN, so that a NaN token stays NaN
        rows, sizes = _groups(active, blocks)
        accumulate = _accumulator(x.dtype)
        block_dim = keys.shape[1] // num_blocks
        act = FUNCTIONS[activation]
        y = x.new_zeros(x.shape, dtype=accumulate)
        start = 0
        for expert, block, size in _walk(sizes):
            index = rows[start : start + size]
            start += size
            channels = slice(block * block_dim, (block + 1) * block_dim)
            pre = _affine(x[index], keys[expert, channels], key_bias, expert, channels)
            hidden = act(pre) * gates[index, expert, None].to(x.dtype)
            y.index_add_(0, index, (hidden @ values[expert, channels]).to(accumulate))
        if value_bias is not None:
            y += torch.where(active, gates, 0).to(accumulate) @ value_bias.to(accumulate)
        ctx.save_for_backward(x, gates, rows, keys, values, key_bias, value_bias)
        ctx.sizes, ctx.block_dim, ctx.activation = sizes, block_dim, activation
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, gates, rows, keys, values, key_bias, value_bias = ctx.saved_tensors
        accumulate = _accumulator(x.dtype)
        grad_y = grad_y.to(x.dtype)
        grad_x = x.new_zeros(x.shape, dtype=accumulate)
        grad_gates = torch.zeros_like(gates, dtype=accumulate)
        grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
        grad_key_bias = None if key_bias is None else torch.zeros_like(key_bias)
        start = 0
        for expert, block, size in _walk(ctx.sizes):
            index = rows[start : start + size]
            start += size
            channels = slice(block * ctx.block_dim, (block + 1) * ctx.block_dim)
            x_g, grad_g, gate_g = x[index], grad_y[index], gates[index, expert, None].to(x.dtype)
            pre = _affine(x_g, keys[expert, channels], key_bias, expert, channels)
            grad_act = grad_g @ values[expert, channels].T  # before the gate: its inner product is the gate's gradient
            hidden, grad_pre = activation_and_gradient(ctx.activation, pre, grad_act * gate_g)
            grad_gates[:, expert].index_add_(0, index, (hidden.to(accumulate) * grad_act.to(accumulate)).sum(-1))
            grad_values[expert, channels] = (hidden * gate_g).T @ grad_g
            grad_keys[expert, channels] = grad_pre.T @ x_g
            if grad_key_bias is not None:
                grad_key_bias[expert, channels] = grad_pre.sum(0)
            grad_x.index_add_(0, index, (grad_pre @ keys[expert, channels]).to(accumulate))
        grad_value_bias = None
        if value_bias is not None:
            active = gates != 0
            grad_wide = grad_y.to(accumulate)
            grad_value_bias = (torch.where(active, gates, 0).to(accumulate).T @ grad_wide).to(value_bias.dtype)
            grad_gates += torch.where(active, grad_wide @ value_bias.to(accumulate).T, 0)
        return (
            grad_x.to(x.dtype), grad_gates.to(gates.dtype), None, grad_keys, grad_values,
            grad_key_bias, grad_value_bias, None, None,
        )  # fmt: skip


def _walk(sizes: list[list[int]]) -> list[tuple[int, int, int]]:
    return [(expert, block, n) for expert, row in enumerate(sizes) for block, n in enumerate(row) if n]


def _affine(x: Tensor, keys: Tensor, bias: Tensor | None, expert: int, channels: slice) -> Tensor:
    return x @ keys.T if bias is None else torch.addmm(bias[expert, channels], x, keys.T)
