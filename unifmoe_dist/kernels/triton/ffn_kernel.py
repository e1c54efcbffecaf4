"""The block-sparse FFN, both passes: one program per row tile of one (expert, block) group."""

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
def _hidden(
    pre, gate, mask, START, SUB: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, THRESHOLD: tl.constexpr
):
    """(rows, SUB) gate * act(pre) of the channels from START of the block on."""
    start, step, first_channel = mask
    return keep(activate(pre, ACTIVATION) * gate, start, step, first_channel + START, SUB, DROPOUT, THRESHOLD)


@triton.jit
def _hidden_backward(
    pre,
    grad_act,
    gate,
    mask,
    at,
    kept,
    START: tl.constexpr,
    M: tl.constexpr,
    SUB: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    THRESHOLD: tl.constexpr,
):
    """Keep gate * act(pre) and the gradient of pre for the weights; return the latter and the gate's gradient."""
    start, step, first_channel = mask
    local_tile, local_row, valid = at
    hidden, grad_pre, grad_bias = kept
    channel = START + tl.arange(0, SUB)
    inside = valid[:, None] & (channel < M)[None, :]
    act = keep(activate(pre, ACTIVATION), start, step, first_channel + START, SUB, DROPOUT, THRESHOLD)
    grad_act = keep(grad_act, start, step, first_channel + START, SUB, DROPOUT, THRESHOLD)
    slope = activation_slope(pre, ACTIVATION) * grad_act * gate
    to = local_row[:, None] * M + channel[None, :]
    kind = hidden.dtype.element_ty
    tl.store(hidden + to, (act * gate).to(kind), mask=inside)
    tl.store(grad_pre + to, slope.to(kind), mask=inside)
    if HAS_BIAS:
        tl.store(grad_bias + local_tile * M + channel, tl.sum(tl.where(inside, slope, 0.0), 0), mask=channel < M)
    return slope.to(kind), tl.sum(tl.where(inside, act * grad_act, 0.0), 1)


@tuned(("BLOCK_K", "BLOCK_D"), **TILES)
@triton.jit(do_not_specialize=["first_tile"])
def ffn_kernel(
    x,
    gates,
    shared_keys,
    keys,
    shared_key_bias,
    key_bias,
    shared_values,
    values,
    out,
    grad_y,
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
    BACKWARD: tl.constexpr,
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
    """out[row] = gate * E_e^(b)(x[token]) for the rows of one tile.

    Backward, out[row] is the gradient of x[token] through the block, and what weights, gates and key biases need is
    stored beside it.
    """
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
    if DROPOUT:
        gate = gate * SCALE
    k = expert_pointer(shared_keys, keys, expert, B * M * D, HAS_SHARED) + block * (M * D)
    v = expert_pointer(shared_values, values, expert, B * M * D, HAS_SHARED) + block * (M * D)
    start, step = row_keys(seed, token, expert, DROPOUT, FIRST_EXPERT)
    mask = (start, step, block * M)
    p0, p1, p2 = gather_product(x, token, valid, k, D, M, SUB, NUM_SUB, TILE_ROWS, BLOCK_K, PRECISION)
    p0 += bias(shared_key_bias, key_bias, expert, block, 0, B, M, SUB, HAS_SHARED, HAS_BIAS)
    if NUM_SUB == 3:
        p1 += bias(shared_key_bias, key_bias, expert, block, SUB, B, M, SUB, HAS_SHARED, HAS_BIAS)
        p2 += bias(shared_key_bias, key_bias, expert, block, 2 * SUB, B, M, SUB, HAS_SHARED, HAS_BIAS)
    if BACKWARD:
        q0, q1, q2 = gather_product(grad_y, token, valid, v, D, M, SUB, NUM_SUB, TILE_ROWS, BLOCK_K, PRECISION)
        at = (local_tile, local_tile.to(tl.int64) * TILE_ROWS + row, valid)
        kept = (hidden, grad_pre, grad_bias)
        h0, gate_sum = _hidden_backward(
            p0, q0, gate, mask, at, kept, 0, M, SUB, ACTIVATION, HAS_BIAS, DROPOUT, THRESHOLD
        )
        h1 = h0
        h2 = h0
        if NUM_SUB == 3:
            h1, more = _hidden_backward(
                p1, q1, gate, mask, at, kept, SUB, M, SUB, ACTIVATION, HAS_BIAS, DROPOUT, THRESHOLD
            )
            gate_sum += more
            h2, more = _hidden_backward(
                p2, q2, gate, mask, at, kept, 2 * SUB, M, SUB, ACTIVATION, HAS_BIAS, DROPOUT, THRESHOLD
            )
            gate_sum += more
        if DROPOUT:
            gate_sum = gate_sum * SCALE
        tl.store(grad_gate + token.to(tl.int64) * (E * B) + group, gate_sum, mask=valid)
        v = k
    else:
        kind = x.dtype.element_ty
        h0 = _hidden(p0, gate, mask, 0, SUB, ACTIVATION, DROPOUT, THRESHOLD).to(kind)
        h1 = h0
        h2 = h0
        if NUM_SUB == 3:
            h1 = _hidden(p1, gate, mask, SUB, SUB, ACTIVATION, DROPOUT, THRESHOLD).to(kind)
            h2 = _hidden(p2, gate, mask, 2 * SUB, SUB, ACTIVATION, DROPOUT, THRESHOLD).to(kind)
    h = (h0, h1, h2)
    spread_product(
        h, v, out, token, valid, local_tile * TILE_ROWS, D, M, SUB, NUM_SUB, TILE_ROWS, BLOCK_D, PRECISION, ATOMIC
    )
