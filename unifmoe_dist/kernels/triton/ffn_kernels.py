"""Device code of the block-sparse FFN: one program per row tile of one (expert, block) group, and its reductions.

Both passes are made of two products over a tile of rows and the M channels of its block:
`_gather_product`, rows @ weights^T over the model width, and `_spread_product`, channels @ weights, one slice of the
model width at a time. Forward: gather(x, keys), activation, gate, spread(values). Backward: gather(x, keys) again,
gather(grad, values), the derivative, spread(keys).

The M channels are held in registers as one tile of SUB or three (NUM_SUB), because tile sides are powers of two and
block widths such as 192 = 3 * 64 are not.
"""

# Arguments of device functions have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from unifmoe_dist.kernels.triton.dropout import keep, row_keys
from unifmoe_dist.kernels.triton.math import activate, activation_slope, dot, expert_pointer
from unifmoe_dist.kernels.triton.tuning import Tiles, tuned

_TILES: dict[str, Tiles] = dict(
    half=[
        (32, 32, 8, 2),
        (32, 64, 4, 3),
        (64, 64, 4, 3),
        (32, 64, 8, 2),
        (64, 64, 8, 2),
        (32, 64, 8, 3),
        (64, 64, 8, 3),
        (64, 128, 8, 3),
    ],
    single=[(32, 32, 8, 2), (32, 32, 4, 2), (16, 32, 8, 2)],
)
_WEIGHT_TILES: dict[str, Tiles] = dict(
    half=[(64, 32, 4, 2), (64, 64, 4, 3), (128, 32, 8, 3), (128, 64, 8, 3)], single=[(64, 32, 4, 2), (64, 32, 8, 2)]
)


@triton.jit
def _weights(base, channel, column, D: tl.constexpr, M: tl.constexpr, EVEN: tl.constexpr):
    """Weights [channel, column] of one block, either index given as a column vector, so also transposed."""
    at = base + channel * D + column
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=(channel < M) & (column < D), other=0.0)


@triton.jit
def _gather_product(
    source,
    token,
    valid,
    weights,
    D: tl.constexpr,
    M: tl.constexpr,
    SUB: tl.constexpr,
    NUM_SUB: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """source[token] @ weights^T for the M channels, as three (TILE_ROWS, SUB) tiles, all the first if NUM_SUB is 1."""
    EVEN: tl.constexpr = (D % BLOCK_K == 0) and (SUB * NUM_SUB == M)
    channel = tl.arange(0, SUB)[None, :]
    rows = source + token.to(tl.int64)[:, None] * D
    p0 = tl.zeros((TILE_ROWS, SUB), tl.float32)
    p1 = p0
    p2 = p0
    for first in range(0, D, BLOCK_K):
        column = first + tl.arange(0, BLOCK_K)
        a = tl.load(rows + column[None, :], mask=valid[:, None] & (column < D)[None, :], other=0.0)
        p0 = dot(a, _weights(weights, channel, column[:, None], D, M, EVEN), p0, PRECISION)
        if NUM_SUB == 3:
            p1 = dot(a, _weights(weights, channel + SUB, column[:, None], D, M, EVEN), p1, PRECISION)
            p2 = dot(a, _weights(weights, channel + 2 * SUB, column[:, None], D, M, EVEN), p2, PRECISION)
    return p0, p1, p2


@triton.jit
def _spread_product(
    h0,
    h1,
    h2,
    weights,
    out,
    token,
    valid,
    first_row,
    D: tl.constexpr,
    M: tl.constexpr,
    SUB: tl.constexpr,
    NUM_SUB: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    ATOMIC: tl.constexpr,
):
    """Store channels @ weights as rows of the workspace, or add them to the rows of their tokens."""
    EVEN: tl.constexpr = (D % BLOCK_D == 0) and (SUB * NUM_SUB == M)
    channel = tl.arange(0, SUB)[:, None]
    if ATOMIC:
        rows = out + token.to(tl.int64)[:, None] * D
    else:
        rows = out + (first_row.to(tl.int64) + tl.arange(0, TILE_ROWS))[:, None] * D
    for first in range(0, D, BLOCK_D):
        column = first + tl.arange(0, BLOCK_D)[None, :]
        acc = tl.zeros((TILE_ROWS, BLOCK_D), tl.float32)
        acc = dot(h0, _weights(weights, channel, column, D, M, EVEN), acc, PRECISION)
        if NUM_SUB == 3:
            acc = dot(h1, _weights(weights, channel + SUB, column, D, M, EVEN), acc, PRECISION)
            acc = dot(h2, _weights(weights, channel + 2 * SUB, column, D, M, EVEN), acc, PRECISION)
        inside = valid[:, None] & (column < D)
        if ATOMIC:
            tl.atomic_add(rows + column, acc, mask=inside, sem="relaxed")
        else:
            tl.store(rows + column, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _bias(
    shared,
    residual,
    expert,
    block,
    START: tl.constexpr,
    B: tl.constexpr,
    M: tl.constexpr,
    SUB: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """(1, SUB) key biases of a block from channel START, zeros where there are none."""
    if HAS_BIAS:
        channel = START + tl.arange(0, SUB)
        base = expert_pointer(shared, residual, expert, B * M, HAS_SHARED) + block * M
        return tl.load(base + channel, mask=channel < M, other=0.0).to(tl.float32)[None, :]
    else:
        return tl.zeros((1, SUB), tl.float32)


@tuned(("BLOCK_K", "BLOCK_D"), **_TILES)
@triton.jit(do_not_specialize=["first_tile"])
def forward_kernel(
    x,
    gates,
    shared_keys,
    keys,
    shared_key_bias,
    key_bias,
    shared_values,
    values,
    out,
    rows,
    tile_group,
    tile_count,
    num_tiles,
    first_tile,
    seed,
    E: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    SUB: tl.constexpr,
    NUM_SUB: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ATOMIC: tl.constexpr,
    PRECISION: tl.constexpr,
    DROPOUT: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    FIRST_EXPERT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[row] = gate * E_e^(b)(x[token]) for the rows of one tile."""
    tile = first_tile + tl.program_id(0)
    if tile >= tl.load(num_tiles):
        return
    group = tl.load(tile_group + tile)
    expert, block = group // B, group % B
    row = tl.arange(0, TILE_ROWS)
    valid = row < tl.load(tile_count + tile)
    token = tl.load(rows + tile * TILE_ROWS + row, mask=valid, other=0)
    gate = tl.load(gates + token.to(tl.int64) * E + expert, mask=valid, other=0.0)[:, None]
    k = expert_pointer(shared_keys, keys, expert, B * M * D, HAS_SHARED) + block * (M * D)
    v = expert_pointer(shared_values, values, expert, B * M * D, HAS_SHARED) + block * (M * D)
    p0, p1, p2 = _gather_product(x, token, valid, k, D, M, SUB, NUM_SUB, TILE_ROWS, BLOCK_K, PRECISION)
    kind = x.dtype.element_ty
    p0 += _bias(shared_key_bias, key_bias, expert, block, 0, B, M, SUB, HAS_SHARED, HAS_BIAS)
    if DROPOUT:
        gate = gate * SCALE
    start, step = row_keys(seed, token, expert, DROPOUT, FIRST_EXPERT)
    h0 = keep(activate(p0, ACTIVATION) * gate, start, step, block * M, SUB, DROPOUT, THRESHOLD).to(kind)
    h1 = h0
    h2 = h0
    if NUM_SUB == 3:
        p1 += _bias(shared_key_bias, key_bias, expert, block, SUB, B, M, SUB, HAS_SHARED, HAS_BIAS)
        p2 += _bias(shared_key_bias, key_bias, expert, block, 2 * SUB, B, M, SUB, HAS_SHARED, HAS_BIAS)
        h1 = keep(activate(p1, ACTIVATION) * gate, start, step, block * M + SUB, SUB, DROPOUT, THRESHOLD).to(kind)
        h2 = keep(activate(p2, ACTIVATION) * gate, start, step, block * M + 2 * SUB, SUB, DROPOUT, THRESHOLD).to(kind)
    _spread_product(
        h0,
        h1,
        h2,
        v,
        out,
        token,
        valid,
        tl.program_id(0) * TILE_ROWS,
        D,
        M,
        SUB,
        NUM_SUB,
        TILE_ROWS,
        BLOCK_D,
        PRECISION,
        ATOMIC,
    )


@triton.jit
def _through_activation(
    pre,
    grad_act,
    gate,
    local_row,
    tile_row,
    valid,
    hidden,
    grad_pre,
    grad_bias,
    start,
    step,
    first_channel,
    START: tl.constexpr,
    M: tl.constexpr,
    SUB: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    THRESHOLD: tl.constexpr,
):
    """Keep gate * act(pre) and the gradient of pre for the weights; return the latter and the gate's gradient."""
    channel = START + tl.arange(0, SUB)[None, :]
    inside = valid[:, None] & (channel < M)
    act = keep(activate(pre, ACTIVATION), start, step, first_channel + START, SUB, DROPOUT, THRESHOLD)
    grad_act = keep(grad_act, start, step, first_channel + START, SUB, DROPOUT, THRESHOLD)
    slope = activation_slope(pre, ACTIVATION) * grad_act * gate
    at = local_row[:, None] * M + channel
    kind = hidden.dtype.element_ty
    tl.store(hidden + at, (act * gate).to(kind), mask=inside)
    tl.store(grad_pre + at, slope.to(kind), mask=inside)
    if HAS_BIAS:
        where = grad_bias + tile_row * M + START + tl.arange(0, SUB)
        tl.store(where, tl.sum(tl.where(inside, slope, 0.0), 0), mask=START + tl.arange(0, SUB) < M)
    return slope.to(kind), tl.sum(tl.where(inside, act * grad_act, 0.0), 1)


@tuned(("BLOCK_K", "BLOCK_D"), **_TILES)
@triton.jit(do_not_specialize=["first_tile"])
def backward_kernel(
    x,
    grad_y,
    gates,
    shared_keys,
    keys,
    shared_key_bias,
    key_bias,
    shared_values,
    values,
    out,
    hidden,
    grad_pre,
    grad_gate,
    grad_bias,
    rows,
    tile_group,
    tile_count,
    num_tiles,
    first_tile,
    seed,
    E: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    SUB: tl.constexpr,
    NUM_SUB: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ATOMIC: tl.constexpr,
    PRECISION: tl.constexpr,
    DROPOUT: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    FIRST_EXPERT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[row]: gradient of x[token] through one block. Also what weights, gates and key biases need."""
    local_tile = tl.program_id(0)
    tile = first_tile + local_tile
    if tile >= tl.load(num_tiles):
        return
    group = tl.load(tile_group + tile)
    expert, block = group // B, group % B
    row = tl.arange(0, TILE_ROWS)
    valid = row < tl.load(tile_count + tile)
    token = tl.load(rows + tile * TILE_ROWS + row, mask=valid, other=0)
    gate = tl.load(gates + token.to(tl.int64) * E + expert, mask=valid, other=0.0)[:, None]
    k = expert_pointer(shared_keys, keys, expert, B * M * D, HAS_SHARED) + block * (M * D)
    v = expert_pointer(shared_values, values, expert, B * M * D, HAS_SHARED) + block * (M * D)
    p0, p1, p2 = _gather_product(x, token, valid, k, D, M, SUB, NUM_SUB, TILE_ROWS, BLOCK_K, PRECISION)
    q0, q1, q2 = _gather_product(grad_y, token, valid, v, D, M, SUB, NUM_SUB, TILE_ROWS, BLOCK_K, PRECISION)
    local_row = local_tile.to(tl.int64) * TILE_ROWS + row
    if DROPOUT:
        gate = gate * SCALE
    start, step = row_keys(seed, token, expert, DROPOUT, FIRST_EXPERT)
    p0 += _bias(shared_key_bias, key_bias, expert, block, 0, B, M, SUB, HAS_SHARED, HAS_BIAS)
    g0, gate_sum = _through_activation(
        p0,
        q0,
        gate,
        local_row,
        local_tile,
        valid,
        hidden,
        grad_pre,
        grad_bias,
        start,
        step,
        block * M,
        0,
        M,
        SUB,
        ACTIVATION,
        HAS_BIAS,
        DROPOUT,
        THRESHOLD,
    )
    g1 = g0
    g2 = g0
    if NUM_SUB == 3:
        p1 += _bias(shared_key_bias, key_bias, expert, block, SUB, B, M, SUB, HAS_SHARED, HAS_BIAS)
        p2 += _bias(shared_key_bias, key_bias, expert, block, 2 * SUB, B, M, SUB, HAS_SHARED, HAS_BIAS)
        g1, more = _through_activation(
            p1,
            q1,
            gate,
            local_row,
            local_tile,
            valid,
            hidden,
            grad_pre,
            grad_bias,
            start,
            step,
            block * M,
            SUB,
            M,
            SUB,
            ACTIVATION,
            HAS_BIAS,
            DROPOUT,
            THRESHOLD,
        )
        gate_sum += more
        g2, more = _through_activation(
            p2,
            q2,
            gate,
            local_row,
            local_tile,
            valid,
            hidden,
            grad_pre,
            grad_bias,
            start,
            step,
            block * M,
            2 * SUB,
            M,
            SUB,
            ACTIVATION,
            HAS_BIAS,
            DROPOUT,
            THRESHOLD,
        )
        gate_sum += more
    if DROPOUT:
        gate_sum = gate_sum * SCALE
    tl.store(grad_gate + token.to(tl.int64) * (E * B) + group, gate_sum, mask=valid)
    _spread_product(
        g0,
        g1,
        g2,
        k,
        out,
        token,
        valid,
        local_tile * TILE_ROWS,
        D,
        M,
        SUB,
        NUM_SUB,
        TILE_ROWS,
        BLOCK_D,
        PRECISION,
        ATOMIC,
    )


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
    start = tl.load(group_tiles + group)
    stop = tl.load(group_tiles + group + 1)
    low = tl.maximum(start, first_tile)
    high = tl.minimum(stop, first_tile + round_tiles)
    if (low >= high) & ((start < stop) | (first_tile > 0)):  # nothing here, except zeros for a group without rows
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
    start = tl.load(group_tiles + group)
    stop = tl.load(group_tiles + group + 1)
    low = tl.maximum(start, first_tile)
    high = tl.minimum(stop, first_tile + round_tiles)
    if (low >= high) & ((start < stop) | (first_tile > 0)):  # nothing here, except zeros for a group without rows
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
