"""Reductions of the block-sparse FFN: over the rows of a group to weights, over the groups of a token to outputs."""

# Arguments of device functions have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from unifmoe_dist.kernels.triton.math import dot, expert_pointer
from unifmoe_dist.kernels.triton.tuning import Tiles, tuned

_WEIGHT_TILES: dict[str, Tiles] = dict(
    half=[(64, 32, 4, 2), (64, 64, 4, 3), (128, 32, 8, 3), (128, 64, 8, 3)], single=[(64, 32, 4, 2), (64, 32, 8, 2)]
)


@triton.jit
def _tiles_of_round(group_tiles, group, first_tile, round_tiles):
    """First tile of a group; first and end of its tiles in this round; whether the round has nothing to write."""
    start = tl.load(group_tiles + group)
    stop = tl.load(group_tiles + group + 1)
    low = tl.maximum(start, first_tile)
    high = tl.minimum(stop, first_tile + round_tiles)
    return start, low, high, (low >= high) & ((start < stop) | (first_tile > 0))  # zeros for a group without rows


@tuned(("BLOCK_D", "BLOCK_R"), **_WEIGHT_TILES)
@triton.jit(do_not_specialize=["first_tile", "round_tiles"])
def weight_grad_kernel(
    channels,
    source,
    shared_out,
    out,
    rows,
    tile_count,
    group_tiles,
    first_tile,
    round_tiles,
    B: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """out[expert, block] = channels^T @ source[token], summed over the rows of one group in order.

    A group cut by the end of a round is continued in the next, on top of what is stored.
    """
    PARTS: tl.constexpr = (M + BLOCK_H - 1) // BLOCK_H
    group = tl.program_id(0) // PARTS
    start, low, high, nothing = _tiles_of_round(group_tiles, group, first_tile, round_tiles)
    if nothing:
        return
    channel = (tl.program_id(0) % PARTS) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    expert, block = group // B, group % B
    at = expert_pointer(shared_out, out, expert, B * M * D, HAS_SHARED) + block * (M * D) + channel * D + column
    inside = (channel < M) & (column < D)
    end = low * TILE_ROWS
    if low < high:
        end = (high - 1) * TILE_ROWS + tl.load(tile_count + high - 1)
    acc = tl.load(at, mask=inside & (low > start), other=0.0).to(tl.float32)
    for first in range(low * TILE_ROWS, end, BLOCK_R):
        slot = first + tl.arange(0, BLOCK_R)
        valid = slot < end
        token = tl.load(rows + slot, mask=valid, other=0).to(tl.int64)
        local = (slot - first_tile * TILE_ROWS).to(tl.int64)
        a = tl.load(channels + local[None, :] * M + channel, mask=valid[None, :] & (channel < M), other=0.0)
        b = tl.load(source + token[:, None] * D + column, mask=valid[:, None] & (column < D), other=0.0)
        acc = dot(a, b, acc, PRECISION)
    tl.store(at, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_tile", "round_tiles"])
def bias_grad_kernel(
    partial,
    shared_out,
    out,
    group_tiles,
    first_tile,
    round_tiles,
    B: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    HAS_SHARED: tl.constexpr,
):
    """out[expert, block] = sum of the tiles' partial sums of one group, in order; rounds as in the weights."""
    group = tl.program_id(0)
    start, low, high, nothing = _tiles_of_round(group_tiles, group, first_tile, round_tiles)
    if nothing:
        return
    channel = tl.arange(0, MP)
    expert, block = group // B, group % B
    at = expert_pointer(shared_out, out, expert, B * M, HAS_SHARED) + block * M + channel
    acc = tl.load(at, mask=(channel < M) & (low > start), other=0.0).to(tl.float32)
    for first in range(low, high, 16):
        tile = first + tl.arange(0, 16)[:, None]
        here = partial + (tile - first_tile) * M + channel[None, :]
        acc += tl.sum(tl.load(here, mask=(tile < high) & (channel < M)[None, :], other=0.0), 0)
    tl.store(at, acc.to(out.dtype.element_ty), mask=channel < M)


@triton.jit
def _add_value_bias(
    acc, gates, shared_value_bias, value_bias, token, column, E: tl.constexpr, D: tl.constexpr, HAS_SHARED: tl.constexpr
):
    for index in range(0, E):
        expert = index + token * 0  # a tensor in the interpreter as well
        gate = tl.load(gates + token * E + expert)
        at = expert_pointer(shared_value_bias, value_bias, expert, D, HAS_SHARED) + column
        term = gate * tl.load(at, mask=column < D, other=0.0).to(tl.float32)
        acc += tl.where(gate != 0, term, 0.0)
    return acc


@triton.jit(do_not_specialize=["first_tile", "round_tiles"])
def combine_kernel(
    partial,
    gates,
    shared_value_bias,
    value_bias,
    total,
    out,
    token_slots,
    token_count,
    num_tiles,
    first_tile,
    round_tiles,
    E: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[token] = value biases + the token's rows of every round, float32 sums in ascending order of slots.

    `total` (N, D) float32 carries the sum to the next round; the last round that has rows writes `out`.
    """
    tiles = tl.load(num_tiles)
    if (first_tile >= tiles) & (first_tile > 0):
        return
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < D
    acc = tl.load(total + token * D + column, mask=inside & (first_tile > 0), other=0.0)
    if HAS_BIAS:
        if first_tile == 0:
            acc = _add_value_bias(acc, gates, shared_value_bias, value_bias, token, column, E, D, HAS_SHARED)
    low = first_tile * TILE_ROWS
    high = (first_tile + round_tiles) * TILE_ROWS
    count = tl.load(token_count + token)
    for first in range(0, count, 4):
        item = first + tl.arange(0, 4)
        slot = tl.load(token_slots + token * G + item, mask=item < count, other=-1)
        here = (slot >= low) & (slot < high)
        at = partial + (slot - low).to(tl.int64)[:, None] * D + column[None, :]
        acc += tl.sum(tl.load(at, mask=here[:, None] & inside[None, :], other=0.0).to(tl.float32), 0)
    if first_tile + round_tiles >= tiles:
        tl.store(out + token * D + column, acc.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(total + token * D + column, acc, mask=inside)


@triton.jit
def finish_kernel(
    total,
    gates,
    shared_value_bias,
    value_bias,
    out,
    E: tl.constexpr,
    D: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[token] = value biases + total[token]: the end of the mode that adds rows atomically."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < D
    acc = tl.load(total + token * D + column, mask=inside, other=0.0)
    if HAS_BIAS:
        acc = _add_value_bias(acc, gates, shared_value_bias, value_bias, token, column, E, D, HAS_SHARED)
    tl.store(out + token * D + column, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n"])
def gate_grad_kernel(
    partial,
    grad_y,
    gates,
    blocks,
    shared_value_bias,
    value_bias,
    out,
    n,
    E: tl.constexpr,
    B: tl.constexpr,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    EP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out[token, expert] = sum over its blocks of partial + grad_y . value_bias, and 0 where the gate is 0."""
    token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    wide = token.to(tl.int64)[:, None]
    expert = tl.arange(0, EP)[None, :]
    inside = (token < n)[:, None] & (expert < E)
    active = tl.load(gates + wide * E + expert, mask=inside, other=0.0) != 0
    acc = tl.zeros((BLOCK_N, EP), tl.float32)
    for block in range(0, B):
        chosen = tl.load(blocks + wide * (B // PARTS) + block // PARTS, mask=(token < n)[:, None], other=0) != 0
        if HAS_SHARED:
            chosen = chosen == (expert == 0)
        acc += tl.load(partial + wide * (E * B) + expert * B + block, mask=active & chosen, other=0.0)
    if HAS_BIAS:
        for first in range(0, D, BLOCK_D):
            column = first + tl.arange(0, BLOCK_D)
            a = tl.load(
                grad_y + wide * D + column[None, :], mask=(token < n)[:, None] & (column < D)[None, :], other=0.0
            )
            at = expert_pointer(shared_value_bias, value_bias, expert, D, HAS_SHARED) + column[:, None]
            b = tl.load(at, mask=(expert < E) & (column < D)[:, None], other=0.0)
            acc = dot(a, b, acc, PRECISION)
    tl.store(out + wide * E + expert, tl.where(active, acc, 0.0), mask=inside)
