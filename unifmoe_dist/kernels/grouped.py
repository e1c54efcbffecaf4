"""Block-sparse experts in plain torch: gather, grouped matrix products over (expert, block) groups, scatter-add.

Only the selected blocks are computed. Runs on any device; it is the fast path on the CPU. The backward pass is
written by hand, because autograd through E*B small products would keep a gathered copy of the tokens for each.

Shapes carry suffixes: N tokens, D model width, E experts, B blocks of M channels, G = E*B groups, and R rows, one for
every (expert, block, token) that is selected, in that order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unifmoe_dist.eager import not_compiled
from unifmoe_dist.experts import ExpertWeights
from unifmoe_dist.kernels.activations import FUNCTIONS, activation_and_gradient
from unifmoe_dist.kernels.dropout import HiddenDropout
from unifmoe_dist.kernels.grouped_products import grouped_outer, grouped_product

# Channels before the activation are kept for the backward pass, which is then a seventh cheaper, while they are no more
# than this many FFNs per token: with the shared expert's, which are at most one, no more than the channels before and
# after the activation that a top-2 mixture keeps. Beyond, they are computed again.
KEPT_FFNS = 3

# On the CPU as many groups are taken together as have this many rows: few calls, and gathered rows stay in cache.
CHUNK_ROWS = 8192


@not_compiled
def grouped_block_ffn(
    x_ND: Tensor, gates_NE: Tensor, blocks_NB: Tensor, weights: ExpertWeights, dropout: HiddenDropout | None = None
) -> Tensor:
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
            x_ND.to(dtype),
            gates_NE,
            blocks_NB,
            keys,
            values,
            key_bias,
            value_bias,
            weights.num_blocks,
            weights.activation,
            recording,
            dropout,
        )
        return output.to(x_ND.dtype)


@dataclass(frozen=True)
class _Chunk:
    """Consecutive groups that are computed together.

    Args:
        groups: Which of the G groups.
        tokens: (R,) token of every row.
        pairs: (R,) index of (token, expert) in the flat gates.
        owner: (R,) index of the row's group among `groups`.
        sizes: Rows of every group.
        ends: (groups,) int32 on the CPU, where each ends.
    """

    groups: slice
    tokens: Tensor
    pairs: Tensor
    owner: Tensor
    sizes: list[int]
    ends: Tensor


def _chunks(active_NE: Tensor, blocks_NB: Tensor) -> Iterator[_Chunk]:
    """All selected rows in chunks; on a GPU one group at a time, so that sums over groups have a fixed order."""
    limit = CHUNK_ROWS if active_NE.device.type == "cpu" else 0
    sizes, owner, tokens = _rows(active_NE, blocks_NB)
    pairs = tokens * active_NE.shape[1] + owner // blocks_NB.shape[1]
    first, row = 0, 0
    while first < len(sizes):
        last, count = first + 1, sizes[first]
        while last < len(sizes) and count + sizes[last] <= limit:
            count += sizes[last]
            last += 1
        if count:
            rows, mine = slice(row, row + count), sizes[first:last]
            ends = torch.tensor(mine).cumsum(0, dtype=torch.int32)
            yield _Chunk(slice(first, last), tokens[rows], pairs[rows], owner[rows] - first, mine, ends)
        first, row = last, row + count


def _rows(active_NE: Tensor, blocks_NB: Tensor) -> tuple[list[int], Tensor, Tensor]:
    """The number of rows of each of the G groups, and (R,) group and token of every row."""
    selected_GN = (active_NE.T[:, None, :] & blocks_NB.T[None, :, :]).flatten(0, 1)
    owner, tokens = selected_GN.nonzero().T.contiguous()
    return selected_GN.sum(-1).tolist(), owner, tokens


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _GroupedBlockFFN(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any,
        x: Tensor,
        gates: Tensor,
        blocks: Tensor,
        keys: Tensor,
        values: Tensor,
        key_bias: Tensor | None,
        value_bias: Tensor | None,
        num_blocks: int,
        activation: str,
        recording: bool,
        dropout: HiddenDropout | None,
    ) -> Tensor:
        active = gates != 0  # true for NaN, so that a NaN token stays NaN
        ctx.chunks, ctx.activation, ctx.num_blocks = list(_chunks(active, blocks)), activation, num_blocks
        ctx.dropout = dropout
        flat_gates = _scaled_gates(gates, dropout, x.dtype)
        keys_GMD, values_GMD = _by_group(keys, num_blocks), _by_group(values, num_blocks)
        accumulate = _accumulator(x.dtype)
        rows = sum(len(chunk.tokens) for chunk in ctx.chunks)
        kept = recording and rows * keys_GMD.shape[1] <= KEPT_FFNS * x.shape[0] * keys.shape[1]
        pres = []
        y = x.new_zeros(x.shape, dtype=accumulate)
        for chunk in ctx.chunks:
            pre = _pre(x.index_select(0, chunk.tokens), keys_GMD, key_bias, chunk)
            hidden = FUNCTIONS[activation](pre) * flat_gates.index_select(0, chunk.pairs)[:, None]
            if dropout is not None:
                hidden.mul_(_kept(dropout, chunk, keys.shape[0], num_blocks, hidden))
            out = grouped_product(hidden, values_GMD[chunk.groups], chunk.sizes, chunk.ends)
            y.index_add_(0, chunk.tokens, out.to(accumulate))
            if kept:
                pres.append(pre)
        if value_bias is not None:
            y += torch.where(active, gates, 0).to(accumulate) @ value_bias.to(accumulate)
        ctx.save_for_backward(x, gates, keys, values, key_bias, value_bias, *pres)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, gates, keys, values, key_bias, value_bias, *pres = ctx.saved_tensors
        dropout = ctx.dropout
        flat_gates = _scaled_gates(gates, dropout, x.dtype)
        keys_GMD, values_GMD = _by_group(keys, ctx.num_blocks), _by_group(values, ctx.num_blocks)
        accumulate = _accumulator(x.dtype)
        grad_y = grad_y.to(x.dtype)
        grad_x = x.new_zeros(x.shape, dtype=accumulate)
        grad_gates = torch.zeros_like(flat_gates, dtype=accumulate)
        grad_keys, grad_values = torch.zeros_like(keys_GMD), torch.zeros_like(values_GMD)
        grad_key_bias = None if key_bias is None else x.new_zeros(keys_GMD.shape[:2], dtype=accumulate)
        for number, chunk in enumerate(ctx.chunks):
            groups, split = chunk.groups, (chunk.sizes, chunk.ends)
            x_R, grad_R = x.index_select(0, chunk.tokens), grad_y.index_select(0, chunk.tokens)
            gate_R = flat_gates.index_select(0, chunk.pairs)[:, None]
            pre = pres[number] if pres else _pre(x_R, keys_GMD, key_bias, chunk)
            # Before the gate: its inner product with the hidden channels is the gate's gradient.
            grad_act = grouped_product(grad_R, values_GMD[groups].transpose(1, 2), *split)
            kept = None
            if dropout is not None:
                kept = _kept(dropout, chunk, keys.shape[0], ctx.num_blocks, grad_act)
                grad_act.mul_(kept)
            hidden, grad_pre = activation_and_gradient(ctx.activation, pre, grad_act * gate_R)
            inner = (hidden.to(accumulate) * grad_act.to(accumulate)).sum(-1)
            grad_gates.index_add_(0, chunk.pairs, inner)
            weighted = hidden * gate_R
            if kept is not None:
                weighted.mul_(kept)
            grad_values[groups] = grouped_outer(weighted, grad_R, *split)
            del weighted, kept
            grad_keys[groups] = grouped_outer(grad_pre, x_R, *split)
            if grad_key_bias is not None:
                grad_key_bias[groups].index_add_(0, chunk.owner, grad_pre.to(accumulate))
            grad_x.index_add_(0, chunk.tokens, grouped_product(grad_pre, keys_GMD[groups], *split).to(accumulate))
        if dropout is not None:
            grad_gates *= dropout.scale
        grad_gates, grad_value_bias = grad_gates.view_as(gates), None
        if value_bias is not None:
            active = gates != 0
            grad_wide = grad_y.to(accumulate)
            grad_value_bias = (torch.where(active, gates, 0).to(accumulate).T @ grad_wide).to(value_bias.dtype)
            grad_gates += torch.where(active, grad_wide @ value_bias.to(accumulate).T, 0)
        if grad_key_bias is not None:
            grad_key_bias = grad_key_bias.to(keys.dtype).view_as(key_bias)
        return (
            grad_x.to(x.dtype),
            grad_gates.to(gates.dtype),
            None,
            grad_keys.view_as(keys),
            grad_values.view_as(values),
            grad_key_bias,
            grad_value_bias,
            None,
            None,
            None,
            None,
        )


def _scaled_gates(gates: Tensor, dropout: HiddenDropout | None, dtype: torch.dtype) -> Tensor:
    """(N * E,) coefficients of channels that are not dropped."""
    return (gates if dropout is None else gates * dropout.scale).to(dtype).flatten()


def _kept(dropout: HiddenDropout, chunk: _Chunk, experts: int, num_blocks: int, like_RM: Tensor) -> Tensor:
    """(R, M), 0 for the dropped channels of a chunk's rows and 1 for the others."""
    block, width = (chunk.owner + chunk.groups.start) % num_blocks, like_RM.shape[1]
    return dropout.kept(chunk.tokens, chunk.pairs % experts, block * width, width, like_RM.dtype)


def _by_group(weights_EHD: Tensor, num_blocks: int) -> Tensor:
    experts, hidden, dim = weights_EHD.shape
    return weights_EHD.reshape(experts * num_blocks, hidden // num_blocks, dim)


def _pre(x_RD: Tensor, keys_GMD: Tensor, key_bias: Tensor | None, chunk: _Chunk) -> Tensor:
    """(R, M) channels before the activation."""
    pre = grouped_product(x_RD, keys_GMD[chunk.groups].transpose(1, 2), chunk.sizes, chunk.ends)
    if key_bias is None:
        return pre
    bias_GM = key_bias.reshape(keys_GMD.shape[:2])[chunk.groups]
    return pre.add_(bias_GM.index_select(0, chunk.owner))
