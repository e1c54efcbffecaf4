"""Block-sparse experts in plain torch: gather, grouped matrix products over (expert, block) groups, scatter-add.

Only the selected blocks are computed. Runs on any device; it is the fast path on the CPU. The backward pass is
written by hand, because autograd through E*B small products would keep a gathered copy of the tokens for each.

Shapes carry suffixes: N tokens, D model width, E experts, B blocks of M channels, G = E*B groups, and R rows, one for
every (expert, block, token) that is selected, in that order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
# after the activation that a top-2 mixture keeps (gated, both projections', of four). Beyond, they are computed again.
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
        output = _GroupedBlockFFN.apply(
            x_ND.to(dtype),
            gates_NE,
            blocks_NB,
            weights.num_blocks,
            weights.activation,
            recording,
            dropout,
            *_in_order(weights.in_type(dtype)),
        )
        return output.to(x_ND.dtype)


def grouped_gradients(
    grad_ND: Tensor,
    x_ND: Tensor,
    gates_NE: Tensor,
    blocks_NB: Tensor,
    weights: ExpertWeights,
    dropout: HiddenDropout | None = None,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """What a gradient of the output is for x, the gates and the weights by name, all of one dtype but the gates.

    As the backward pass of `grouped_block_ffn`, for whom kept nothing of a forward pass.
    """
    plan = list(_chunks(gates_NE != 0, blocks_NB)), weights.num_blocks, weights.activation, dropout
    grad_x, grad_gates, *grads = _gradients(grad_ND, x_ND, gates_NE, *plan, _in_order(weights.tensors()), ())
    assert grad_x is not None and grad_gates is not None
    return grad_x, grad_gates, {name: t for name, t in zip(_TENSORS, grads, strict=True) if t is not None}


_TENSORS = ("values", "value_bias", "keys", "key_bias", "gate_keys", "gate_key_bias")


def _in_order(tensors: Mapping[str, Tensor | None]) -> list[Tensor | None]:
    return [tensors[name] for name in _TENSORS]


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
        num_blocks: int,
        activation: str,
        recording: bool,
        dropout: HiddenDropout | None,
        values: Tensor,
        value_bias: Tensor | None,
        *reading: Tensor | None,
    ) -> Tensor:
        active = gates != 0  # true for NaN, so that a NaN token stays NaN
        ctx.chunks, ctx.activation, ctx.num_blocks = list(_chunks(active, blocks)), activation, num_blocks
        ctx.dropout = dropout
        flat_gates = _scaled_gates(gates, dropout, x.dtype)
        values_GMD, projections = _by_group(values, num_blocks), _projections(reading, num_blocks)
        accumulate = _accumulator(x.dtype)
        rows = sum(len(chunk.tokens) for chunk in ctx.chunks)
        kept = recording and rows * values_GMD.shape[1] <= KEPT_FFNS * x.shape[0] * values.shape[1]
        pres = []
        y = x.new_zeros(x.shape, dtype=accumulate)
        for chunk in ctx.chunks:
            x_R = x.index_select(0, chunk.tokens)
            pre = [_pre(x_R, *projection, chunk) for projection in projections]
            del x_R  # its memory serves what follows
            hidden = FUNCTIONS[activation](pre[0])
            for linear in pre[1:]:
                hidden = hidden * linear
            hidden = hidden * flat_gates.index_select(0, chunk.pairs)[:, None]
            if dropout is not None:
                hidden.mul_(_kept(dropout, chunk, values.shape[0], num_blocks, hidden))
            out = grouped_product(hidden, values_GMD[chunk.groups], chunk.sizes, chunk.ends)
            y.index_add_(0, chunk.tokens, out.to(accumulate))
            if kept:
                pres += pre
        if value_bias is not None:
            y += torch.where(active, gates, 0).to(accumulate) @ value_bias.to(accumulate)
        ctx.save_for_backward(x, gates, values, value_bias, *reading, *pres)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, gates, *saved = ctx.saved_tensors
        plan = ctx.chunks, ctx.num_blocks, ctx.activation, ctx.dropout
        grad_x, grad_gates, *own = _gradients(grad_y, x, gates, *plan, saved[:6], saved[6:])
        return grad_x, grad_gates, *[None] * 5, *own


def _gradients(
    grad_y: Tensor,
    x: Tensor,
    gates: Tensor,
    chunks: Sequence[_Chunk],
    num_blocks: int,
    activation: str,
    dropout: HiddenDropout | None,
    weights: Sequence[Tensor | None],
    pres: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """Gradients of x, the gates and the weights in the order of `_TENSORS`; `pres` is empty where none were kept."""
    values, value_bias, *reading = weights
    assert values is not None
    flat_gates = _scaled_gates(gates, dropout, x.dtype)
    values_GMD, projections = _by_group(values, num_blocks), _projections(reading, num_blocks)
    accumulate = _accumulator(x.dtype)
    grad_y = grad_y.to(x.dtype)
    grad_x = x.new_zeros(x.shape, dtype=accumulate)
    grad_gates = torch.zeros_like(flat_gates, dtype=accumulate)
    grad_values, grads = torch.zeros_like(values_GMD), [_Gradient(*projection) for projection in projections]
    for number, chunk in enumerate(chunks):
        split = (chunk.sizes, chunk.ends)
        x_R, grad_R = x.index_select(0, chunk.tokens), grad_y.index_select(0, chunk.tokens)
        gate_R = flat_gates.index_select(0, chunk.pairs)[:, None]
        pre = pres[number * len(grads) : (number + 1) * len(grads)]
        pre = pre or [_pre(x_R, *projection, chunk) for projection in projections]
        # Before the gate: its inner product with the hidden channels is the gate's gradient.
        grad_hidden = grouped_product(grad_R, values_GMD[chunk.groups].transpose(1, 2), *split)
        kept = None
        if dropout is not None:
            kept = _kept(dropout, chunk, values.shape[0], num_blocks, grad_hidden)
            grad_hidden.mul_(kept)
        hidden, grad_pre = _hidden_and_gradients(activation, pre, grad_hidden * gate_R)
        inner = (hidden.to(accumulate) * grad_hidden.to(accumulate)).sum(-1)
        grad_gates.index_add_(0, chunk.pairs, inner)
        weighted = hidden * gate_R
        if kept is not None:
            weighted.mul_(kept)
        grad_values[chunk.groups] = grouped_outer(weighted, grad_R, *split)
        del weighted, kept
        for grad, grad_channels in zip(grads, grad_pre, strict=True):
            grad_x.index_add_(0, chunk.tokens, grad.add(grad_channels, x_R, chunk).to(accumulate))
    if dropout is not None:
        grad_gates *= dropout.scale
    grad_gates, grad_value_bias = grad_gates.view_as(gates), None
    if value_bias is not None:
        active = gates != 0
        grad_wide = grad_y.to(accumulate)
        grad_value_bias = (torch.where(active, gates, 0).to(accumulate).T @ grad_wide).to(value_bias.dtype)
        grad_gates += torch.where(active, grad_wide @ value_bias.to(accumulate).T, 0)
    own = [tensor for grad in reversed(grads) for tensor in grad.of(values)] + [None, None]
    return grad_x.to(x.dtype), grad_gates.to(gates.dtype), grad_values.view_as(values), grad_value_bias, *own[:4]


def _projections(reading: Sequence[Tensor | None], num_blocks: int) -> list[tuple[Tensor, Tensor | None]]:
    """Weights (G, M, D) and biases (G, M) by which channels read tokens, that under the activation first.

    `reading` is keys, key_bias, gate_keys, gate_key_bias; the last two are None where experts are not gated.
    """
    pairs = [reading[2:], reading[:2]] if reading[2] is not None else [reading[:2]]
    result = []
    for keys, bias in pairs:
        assert keys is not None
        keys_GMD = _by_group(keys, num_blocks)
        result.append((keys_GMD, None if bias is None else bias.reshape(keys_GMD.shape[:2])))
    return result


def _hidden_and_gradients(name: str, pre: Sequence[Tensor], upstream: Tensor) -> tuple[Tensor, list[Tensor]]:
    """act(pre[0]), or act(pre[0]) * pre[1], and what `upstream` is of it for each of `pre`."""
    if len(pre) == 1:
        hidden, gradient = activation_and_gradient(name, pre[0], upstream)
        return hidden, [gradient]
    activated, gradient = activation_and_gradient(name, pre[0], upstream * pre[1])
    return activated * pre[1], [gradient, upstream * activated]


class _Gradient:
    """Gradient of one projection's weights (G, M, D) and biases (G, M), chunk by chunk."""

    def __init__(self, keys_GMD: Tensor, bias_GM: Tensor | None) -> None:
        self.keys, self.weights = keys_GMD, torch.zeros_like(keys_GMD)
        accumulate = _accumulator(keys_GMD.dtype)
        self.bias = None if bias_GM is None else torch.zeros_like(bias_GM, dtype=accumulate)

    def add(self, grad_RM: Tensor, x_RD: Tensor, chunk: _Chunk) -> Tensor:
        """Take in the gradient of a chunk's channels; returns that of its tokens, (R, D)."""
        split = (chunk.sizes, chunk.ends)
        self.weights[chunk.groups] = grouped_outer(grad_RM, x_RD, *split)
        if self.bias is not None:
            self.bias[chunk.groups].index_add_(0, chunk.owner, grad_RM.to(self.bias.dtype))
        return grouped_product(grad_RM, self.keys[chunk.groups], *split)

    def of(self, like_EHD: Tensor) -> list[Tensor | None]:
        """Both by expert, in the type of the weights."""
        experts = like_EHD.shape[0]
        bias = None if self.bias is None else self.bias.to(self.weights.dtype).view(experts, -1)
        return [self.weights.view_as(like_EHD), bias]


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


def _pre(x_RD: Tensor, keys_GMD: Tensor, bias_GM: Tensor | None, chunk: _Chunk) -> Tensor:
    """(R, M) channels as one projection reads them."""
    pre = grouped_product(x_RD, keys_GMD[chunk.groups].transpose(1, 2), chunk.sizes, chunk.ends)
    return pre if bias_GM is None else pre.add_(bias_GM[chunk.groups].index_select(0, chunk.owner))
