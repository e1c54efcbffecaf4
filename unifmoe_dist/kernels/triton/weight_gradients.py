"""Gradients of the experts' weights and key biases: sums over the rows of a group, in order."""

# Arguments of device functions have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unifmoe_dist.kernels.triton.math import dot, expert_pointer, part_channels, power_of_two
from unifmoe_dist.kernels.triton.plan import Plan
from unifmoe_dist.kernels.triton.tuning import Candidates, tuned
from unifmoe_dist.kernels.triton.workspace import Workspace

if TYPE_CHECKING:
    from unifmoe_dist.kernels.triton.ffn import Banks

WEIGHT_TILES = Candidates(
    large=[(256, 32, 8, 3), (128, 32, 8, 3), (128, 64, 8, 3)],
    small=[(64, 32, 4, 2), (128, 32, 8, 2)],
    single=[(64, 32, 4, 2), (64, 32, 8, 2)],
)


@triton.jit
def _rows_here(group_tiles, group, low_tile, high_tile):
    """Tiles of a group among those from `low_tile` to `high_tile`: first, end; whether it began earlier, goes on later;
    whether there is something to write, as there is for a group without rows."""
    start = tl.load(group_tiles + group)
    stop = tl.load(group_tiles + group + 1)
    low = tl.maximum(start, low_tile)
    high = tl.minimum(stop, high_tile)
    some = low < high
    return low, high, some & (start < low_tile), some & (stop > high_tile), some | (start == stop)


@triton.jit
def weight_grad_tile(
    group,
    channel,
    column,
    tiles,
    channels,
    source,
    outs,
    carry,
    rows,
    tile_count,
    group_tiles,
    B: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    PRECISION: tl.constexpr,
    CARRY: tl.constexpr,
):
    """out[expert, part] = channels^T @ source[token], summed over the rows of one group in order, in float32.

    `tiles` are the first and the end of those in the workspace and its first row of them. A group cut there is handed
    on in float32: `carry` is where from and where to, (M, D) each; without CARRY none is cut.
    """
    low_tile, high_tile, first_row = tiles
    low, high, before, after, something = _rows_here(group_tiles, group, low_tile, high_tile)
    if something:
        expert, block = group // B, group % B
        start_channel, limit = part_channels(block, PARTS, WIDTH, M)
        inside = (channel < limit) & (column < D)
        end = low * TILE_ROWS
        if low < high:
            end = (high - 1) * TILE_ROWS + tl.load(tile_count + high - 1)
        acc = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
        if CARRY:
            carried, carry_on = carry
            acc = tl.load(carried + channel * D + column, mask=inside & before, other=0.0)
        for first in range(low * TILE_ROWS, end, BLOCK_R):
            slot = first + tl.arange(0, BLOCK_R)
            valid = slot < end
            token = tl.load(rows + slot, mask=valid, other=0).to(tl.int64)
            local = (slot - low_tile * TILE_ROWS + first_row).to(tl.int64)
            a = tl.load(channels + local[None, :] * M + channel, mask=valid[None, :] & (channel < M), other=0.0)
            b = tl.load(source + token[:, None] * D + column, mask=valid[:, None] & (column < D), other=0.0)
            acc = dot(a, b, acc, PRECISION)
        shared_out, out = outs
        to = expert_pointer(shared_out, out, expert, B // PARTS * WIDTH * D, HAS_SHARED) + start_channel * D
        if CARRY:
            tl.store(carry_on + channel * D + column, acc, mask=inside & after)
            inside = inside & (after == 0)
        tl.store(to + channel * D + column, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def bias_grad_tile(
    group,
    tiles,
    partial,
    outs,
    carry,
    group_tiles,
    B: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    MP: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    CARRY: tl.constexpr,
):
    """out[expert, part] = sum of the tiles' partial sums of one group, in order; cut groups as in the weights."""
    low_tile, high_tile, first_row = tiles
    low, high, before, after, something = _rows_here(group_tiles, group, low_tile, high_tile)
    if something:
        channel = tl.arange(0, MP)
        expert, block = group // B, group % B
        start_channel, limit = part_channels(block, PARTS, WIDTH, M)
        inside = channel < limit
        acc = tl.zeros((MP,), tl.float32)
        if CARRY:
            carried, carry_on = carry
            acc = tl.load(carried + channel, mask=inside & before, other=0.0)
        for first in range(low, high, 16):
            tile = first + tl.arange(0, 16)[:, None]
            here = partial + (tile - low_tile + first_row // TILE_ROWS) * M + channel[None, :]
            acc += tl.sum(tl.load(here, mask=(tile < high) & (channel < M)[None, :], other=0.0), 0)
        shared_out, out = outs
        to = expert_pointer(shared_out, out, expert, B // PARTS * WIDTH, HAS_SHARED) + start_channel
        if CARRY:
            tl.store(carry_on + channel, acc, mask=inside & after)
            inside = inside & (after == 0)
        tl.store(to + channel, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def pick(index, three):
    """One of three pointers of a kind."""
    first, second, third = three
    return tl.where(index == 0, first, tl.where(index == 1, second, third))


@triton.jit
def pick_outs(index, shared, residual, HAS_SHARED: tl.constexpr):
    """Where gradients of one of three kinds of weights go: those of the shared expert, if any, and of the others."""
    if HAS_SHARED:
        return pick(index, shared), pick(index, residual)
    else:
        return shared[0], pick(index, residual)


@tuned(("BLOCK_D", "BLOCK_R"), WEIGHT_TILES)
@triton.jit(do_not_specialize=["held_tiles"])
def weight_grad_kernel(
    channels_0,
    channels_1,
    channels_2,
    source_0,
    source_1,
    source_2,
    shared_out_0,
    shared_out_1,
    shared_out_2,
    out_0,
    out_1,
    out_2,
    carry,
    rows,
    tile_count,
    group_tiles,
    held_tiles,
    B: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    PRECISION: tl.constexpr,
    CARRY: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """`weight_grad_tile` of the workspace's first tiles, for up to three matrices of the experts."""
    CUTS: tl.constexpr = (M + BLOCK_H - 1) // BLOCK_H
    matrix = tl.program_id(2)
    group = tl.program_id(0) // CUTS
    channel = (tl.program_id(0) % CUTS) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    shared_outs = (shared_out_0, shared_out_1, shared_out_2)
    kept = (carry, carry)
    if CARRY:
        kept = (carry, carry + matrix.to(tl.int64) * (M * D))
    weight_grad_tile(
        group,
        channel,
        column,
        (0, held_tiles, 0),
        pick(matrix, (channels_0, channels_1, channels_2)),
        pick(matrix, (source_0, source_1, source_2)),
        pick_outs(matrix, shared_outs, (out_0, out_1, out_2), HAS_SHARED),
        kept,
        rows,
        tile_count,
        group_tiles,
        B,
        PARTS,
        WIDTH,
        D,
        M,
        TILE_ROWS,
        BLOCK_H,
        BLOCK_D,
        BLOCK_R,
        HAS_SHARED,
        PRECISION,
        CARRY,
    )


@triton.jit(do_not_specialize=["held_tiles"])
def bias_grad_kernel(
    partial_0,
    partial_1,
    shared_bias_out_0,
    shared_bias_out_1,
    bias_out_0,
    bias_out_1,
    bias_carry,
    group_tiles,
    held_tiles,
    B: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    MP: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    CARRY: tl.constexpr,
):
    """`bias_grad_tile` of the workspace's first tiles, for up to two projections."""
    projection = tl.program_id(1)
    shared_outs = (shared_bias_out_0, shared_bias_out_1, shared_bias_out_1)
    kept = (bias_carry, bias_carry)
    if CARRY:
        kept = (bias_carry, bias_carry + projection * M)
    bias_grad_tile(
        tl.program_id(0),
        (0, held_tiles, 0),
        pick(projection, (partial_0, partial_1, partial_1)),
        pick_outs(projection, shared_outs, (bias_out_0, bias_out_1, bias_out_1), HAS_SHARED),
        kept,
        group_tiles,
        B,
        PARTS,
        WIDTH,
        M,
        TILE_ROWS,
        MP,
        HAS_SHARED,
        CARRY,
    )


class WeightGradients:
    """What the tiles keep for the gradients of weights and key biases, and the launches that make these of it.

    Args:
        x: (N, D) tokens.
        grad_y: (N, D) gradients of the output.
        space: The workspace.
        banks: Weights.
        grads: Where their gradients go.
        wants: Which are wanted.

    Attributes:
        stored: What `ffn_kernel` stores, by its names.
        arguments: What `overflow_kernel` reads and writes, by its names.
        counts: For how many it is compiled.
    """

    def __init__(self, x: Tensor, grad_y: Tensor, space: Workspace, banks: Banks, grads: Banks, wants: Banks) -> None:
        shape = space.shape
        self.space, self.has_shared = space, banks.has_shared
        projections = banks.projections
        names = ["hidden", *("gradients of " + keys for keys, _ in projections)]
        hidden, *grad_pre = (space.rows_of(name, shape.width, x.dtype, x.device) for name in names)
        tiles = space.tiles, shape.width
        partial = [torch.empty(tiles, dtype=torch.float32, device=x.device) for _ in projections]
        self.stored: dict[str, Any] = dict(hidden=hidden)
        self.stored |= dict(zip(("grad_pre", "grad_linear"), grad_pre, strict=False))
        self.stored |= dict(zip(("grad_bias", "grad_linear_bias"), partial, strict=False))
        sums = [("values", hidden, grad_y)]
        sums += [(keys, of, x) for (keys, _), of in zip(projections, grad_pre, strict=True)]
        matrices = [(*of, *grads.pairs[name]) for name, *of in sums if any(wants.pairs[name])]
        key_biases = [name for _, name in projections]
        biases = [
            (of, *grads.pairs[name]) for name, of in zip(key_biases, partial, strict=True) if any(wants.pairs[name])
        ]
        self.matrices = _named(("channels", "source", "shared_out", "out"), matrices, 3)
        self.biases = _named(("partial", "shared_bias_out", "bias_out"), biases, 2)
        self.counts = dict(MATRICES=len(matrices), BIASES=len(biases))

        def carry(count: int, *sizes: int) -> Tensor | None:
            given = (2, count, *sizes)
            return torch.empty(given, dtype=torch.float32, device=x.device) if space.fillings else None

        self.carry = dict(
            carry=carry(len(matrices), shape.width, shape.dim), bias_carry=carry(len(biases), shape.width)
        )
        self.arguments = self.matrices | self.biases | self.carry

    def launch(self, plan: Plan) -> None:
        """Sums over what is in the workspace."""
        shape, space = self.space.shape, self.space
        groups = shape.experts * shape.blocks
        common = shape.group_arguments() | dict(
            group_tiles=plan.group_tiles, held_tiles=space.tiles, HAS_SHARED=self.has_shared, CARRY=space.fillings > 0
        )
        if self.counts["MATRICES"]:
            parts = triton.cdiv(shape.width, shape.gradient_channels) * groups
            weight_grad_kernel[lambda meta: (parts, triton.cdiv(shape.dim, meta["BLOCK_D"]), self.counts["MATRICES"])](
                **self.matrices,
                **common,
                carry=self.carry["carry"],
                rows=plan.rows,
                tile_count=plan.tile_count,
                D=shape.dim,
                BLOCK_H=shape.gradient_channels,
                PRECISION=shape.precision,
            )
        if self.counts["BIASES"]:
            bias_grad_kernel[(groups, self.counts["BIASES"])](
                **self.biases, **common, bias_carry=self.carry["bias_carry"], MP=power_of_two(shape.width), num_warps=4
            )


def _named(names: tuple[str, ...], rows: list[Any], most: int) -> dict[str, Any]:
    """Arguments `name_i` for each name and i below `most`; beyond the rows that there are, those of the last."""
    filled = [rows[min(i, len(rows) - 1)] if rows else [None] * len(names) for i in range(most)]
    return {f"{name}_{i}": of[n] for i, of in enumerate(filled) for n, name in enumerate(names)}


NO_GRADIENTS: dict[str, None] = (
    _named(("channels", "source", "shared_out", "out"), [], 3)
    | _named(("partial", "shared_bias_out", "bias_out"), [], 2)
    | dict(carry=None, bias_carry=None)
)
"""Arguments of the overflow launch in a forward pass."""
