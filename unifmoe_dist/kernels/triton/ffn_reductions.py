"""Reductions of the block-sparse FFN over the groups of a token: to outputs, and to gradients of gates."""

# Arguments of device functions have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from unifmoe_dist.kernels.triton.math import dot, expert_pointer


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


@triton.jit
def combine_token(
    token,
    column,
    tiles,
    is_last,
    partial,
    gates,
    biases,
    total,
    out,
    token_slots,
    token_count,
    E: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """out[token] = value biases + the token's rows, float32 sums in ascending order of slots.

    Of rows whose `tiles` are in the workspace: first, end, first row in it. `total` (N, D) float32 carries the sum from
    one filling of the workspace to the next.
    """
    inside = column < D
    if FIRST:
        acc = tl.zeros_like(column).to(tl.float32)
        if HAS_BIAS:
            acc = _add_value_bias(acc, gates, biases[0], biases[1], token, column, E, D, HAS_SHARED)
    else:
        acc = tl.load(total + token * D + column, mask=inside, other=0.0)
    low_tile, high_tile, first_row = tiles
    low = low_tile * TILE_ROWS
    high = high_tile * TILE_ROWS
    count = tl.load(token_count + token)
    for first in range(0, count, 4):
        item = first + tl.arange(0, 4)
        slot = tl.load(token_slots + token * G + item, mask=item < count, other=-1)
        here = (slot >= low) & (slot < high)
        at = partial + (slot - low + first_row).to(tl.int64)[:, None] * D + column[None, :]
        acc += tl.sum(tl.load(at, mask=here[:, None] & inside[None, :], other=0.0).to(tl.float32), 0)
    tl.store(out + token * D + column, acc.to(out.dtype.element_ty), mask=inside & is_last)
    tl.store(total + token * D + column, acc, mask=inside & (is_last == 0))


@triton.jit(do_not_specialize=["held_tiles"])
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
    held_tiles,
    E: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """`combine_token` of the workspace's first tiles; what is left for later fillings makes `total`, else `out`."""
    combine_token(
        tl.program_id(0).to(tl.int64),
        tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D),
        (0, held_tiles, 0),
        tl.load(num_tiles) <= held_tiles,
        partial,
        gates,
        (shared_value_bias, value_bias),
        total,
        out,
        token_slots,
        token_count,
        E,
        G,
        D,
        TILE_ROWS,
        True,
        HAS_SHARED,
        HAS_BIAS,
    )


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
