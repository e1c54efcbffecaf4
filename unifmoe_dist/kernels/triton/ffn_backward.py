"""The block-sparse FFN, backward: one program per row tile of one (expert, block) group."""

# Arguments of device functions have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from unifmoe_dist.kernels.triton.dropout import keep, row_keys
from unifmoe_dist.kernels.triton.ffn_products import TILES, bias, gather_product, spread_product
from unifmoe_dist.kernels.triton.math import activate, activation_slope, expert_pointer
from unifmoe_dist.kernels.triton.tuning import tuned


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


@tuned(("BLOCK_K", "BLOCK_D"), **TILES)
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
    p0, p1, p2 = gather_product(x, token, valid, k, D, M, SUB, NUM_SUB, TILE_ROWS, BLOCK_K, PRECISION)
    q0, q1, q2 = gather_product(grad_y, token, valid, v, D, M, SUB, NUM_SUB, TILE_ROWS, BLOCK_K, PRECISION)
    local_row = local_tile.to(tl.int64) * TILE_ROWS + row
    if DROPOUT:
        gate = gate * SCALE
    start, step = row_keys(seed, token, expert, DROPOUT, FIRST_EXPERT)
    p0 += bias(shared_key_bias, key_bias, expert, block, 0, B, M, SUB, HAS_SHARED, HAS_BIAS)
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
        p1 += bias(shared_key_bias, key_bias, expert, block, SUB, B, M, SUB, HAS_SHARED, HAS_BIAS)
        p2 += bias(shared_key_bias, key_bias, expert, block, 2 * SUB, B, M, SUB, HAS_SHARED, HAS_BIAS)
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
    spread_product(
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
