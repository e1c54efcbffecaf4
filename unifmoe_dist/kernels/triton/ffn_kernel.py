"""The block-sparse FFN, both passes: one program per row tile of one (expert, block) group."""

# Arguments of device functions have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from unifmoe_dist.kernels.triton.dropout import keep, row_keys
from unifmoe_dist.kernels.triton.ffn_products import TILES, add_bias, gather_product, spread_product, store_channels
from unifmoe_dist.kernels.triton.math import activate, activation_slope, expert_pointer, part_channels
from unifmoe_dist.kernels.triton.tuning import tuned


@triton.jit
def _hidden(
    pre,
    linear,
    gate,
    mask,
    START,
    SUB: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    DROPOUT: tl.constexpr,
    THRESHOLD: tl.constexpr,
):
    """(rows, SUB) gate * act(pre), times `linear` where GATED, of the channels from START of the block on."""
    start, step, first_channel = mask
    act = activate(pre, ACTIVATION)
    if GATED:
        act = act * linear
    return keep(act * gate, start, step, first_channel + START, SUB, DROPOUT, THRESHOLD)


@triton.jit
def _hidden_backward(
    grad_act,
    gate,
    mask,
    at,
    kept,
    START: tl.constexpr,
    M: tl.constexpr,
    SUB: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DROPOUT: tl.constexpr,
    THRESHOLD: tl.constexpr,
):
    """Keep `_hidden` and the gradients of pre and linear for the weights; return those two and the gate's gradient.

    `at` says where pre and linear are, and where in the workspace. Without GATED linear is 1 and its gradient is none.
    """
    start, step, first_channel = mask
    pre, linear, first, row, valid = at
    hidden, grad_pre, grad_bias, grad_linear, grad_linear_bias = kept
    channel = START + tl.arange(0, SUB)
    inside = valid[:, None] & (channel < M)[None, :]
    here = row[:, None] * M + channel[None, :]
    grad_act = keep(grad_act, start, step, first_channel + START, SUB, DROPOUT, THRESHOLD)
    read = tl.load(pre + here, mask=inside, other=0.0).to(tl.float32)
    act = activate(read, ACTIVATION)
    slope = activation_slope(read, ACTIVATION) * grad_act * gate
    to = first + here
    kind = hidden.dtype.element_ty
    beside = slope
    if GATED:
        beside = act * grad_act * gate
        factor = tl.load(linear + here, mask=inside, other=0.0).to(tl.float32)
        slope = slope * factor
        act = act * factor
        tl.store(grad_linear + to, beside.to(kind), mask=inside)
        if HAS_BIAS:
            tl.store(grad_linear_bias + channel, tl.sum(tl.where(inside, beside, 0.0), 0), mask=channel < M)
    act = keep(act, start, step, first_channel + START, SUB, DROPOUT, THRESHOLD)
    tl.store(hidden + to, (act * gate).to(kind), mask=inside)
    tl.store(grad_pre + to, slope.to(kind), mask=inside)
    if HAS_BIAS:
        tl.store(grad_bias + channel, tl.sum(tl.where(inside, slope, 0.0), 0), mask=channel < M)
    return slope.to(kind), beside.to(kind), tl.sum(tl.where(inside, act * grad_act, 0.0), 1)


@triton.jit
def ffn_tile(
    tile,
    local_tile,
    x,
    gates,
    weights,
    out,
    beside,
    kept,
    plan,
    seed,
    E: tl.constexpr,
    B: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    SUB: tl.constexpr,
    NUM_SUB: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BACKWARD: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    DROPOUT: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    FIRST_EXPERT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[row] = gate * E_e^(b)(x[token]) for the first ROWS rows of a tile of TILE_ROWS; no more are in use.

    The rows go to place `local_tile` of the workspace. `keys` are those under the activation; where experts are GATED,
    what `linear_keys` read multiplies it; else these and their kin are None. Backward, out[row] is the gradient of
    x[token] through the block, and what weights, gates and key biases need is stored in `beside`.

    Channels before the activation pass from one pass to the other in `kept`, those of its first tiles. A backward
    pass computes those of other tiles again, and has them wait where their gradients go: two products at once would
    need twice the registers.

    A block of WIDTH channels has PARTS parts of M, the last perhaps shorter; B counts the parts of all blocks.
    """
    read, more_read, spread = weights
    shared_keys, keys, shared_key_bias, key_bias = read
    shared_linear_keys, linear_keys, shared_linear_bias, linear_bias = more_read
    shared_values, values = spread
    grad_y, hidden, grad_pre, grad_linear, grad_gate, grad_bias, grad_linear_bias = beside
    kept_channels, kept_tiles = kept
    KEPT: tl.constexpr = kept_channels is not None
    rows, tile_group, tile_count = plan
    group = tl.load(tile_group + tile)
    expert, block = group // B, group % B
    row = tl.arange(0, ROWS)
    valid = row < tl.load(tile_count + tile)
    token = tl.load(rows + tile * TILE_ROWS + row, mask=valid, other=0)
    gate = tl.load(gates + token.to(tl.int64) * E + expert, mask=valid, other=0.0)[:, None]
    if DROPOUT:
        gate = gate * SCALE
    start_channel, limit = part_channels(block, PARTS, WIDTH, M)
    HIDDEN: tl.constexpr = B // PARTS * WIDTH
    EVEN: tl.constexpr = (SUB * NUM_SUB == M) and (PARTS * M == WIDTH)
    k = expert_pointer(shared_keys, keys, expert, HIDDEN * D, HAS_SHARED) + start_channel * D
    v = expert_pointer(shared_values, values, expert, HIDDEN * D, HAS_SHARED) + start_channel * D
    u = k
    if GATED:
        u = expert_pointer(shared_linear_keys, linear_keys, expert, HIDDEN * D, HAS_SHARED) + start_channel * D
    start, step = row_keys(seed, token, expert, DROPOUT, FIRST_EXPERT)
    mask = (start, step, start_channel)
    part = (expert, start_channel, limit)
    is_kept = tile < kept_tiles
    pre, linear = grad_pre, grad_linear
    if KEPT:
        pre = kept_channels + tile.to(tl.int64) * ((1 + GATED) * TILE_ROWS * M)
        linear = pre + TILE_ROWS * M
    columns = D
    first = local_tile.to(tl.int64) * (TILE_ROWS * M)
    if BACKWARD:
        pre = tl.where(is_kept, pre, grad_pre + first)
        if GATED:
            linear = tl.where(is_kept, linear, grad_linear + first)
        columns = tl.where(is_kept, 0, D)  # then nothing is read
    p, s = gather_product(x, token, valid, k, u, limit, columns, D, SUB, NUM_SUB, ROWS, BLOCK_K, PRECISION, GATED, EVEN)
    p = add_bias(p, shared_key_bias, key_bias, part, HIDDEN, SUB, NUM_SUB, HAS_SHARED, HAS_BIAS)
    if GATED:
        s = add_bias(s, shared_linear_bias, linear_bias, part, HIDDEN, SUB, NUM_SUB, HAS_SHARED, HAS_BIAS)
    if KEPT or BACKWARD:
        if is_kept != BACKWARD:
            store_channels(p, pre, valid, M, SUB, NUM_SUB, ROWS)
            if GATED:
                store_channels(s, linear, valid, M, SUB, NUM_SUB, ROWS)
    if BACKWARD:
        tile_bias = grad_bias + local_tile * M
        stored = (hidden, grad_pre, tile_bias, grad_pre, tile_bias)
        if GATED:
            stored = (hidden, grad_pre, tile_bias, grad_linear, grad_linear_bias + local_tile * M)
        q, _ = gather_product(
            grad_y, token, valid, v, v, limit, D, D, SUB, NUM_SUB, ROWS, BLOCK_K, PRECISION, False, EVEN
        )
        tl.debug_barrier()  # other threads may have stored the channels
        at = (pre, linear, first, row, valid)
        h0, b0, gate_sum = _hidden_backward(
            q[0], gate, mask, at, stored, 0, M, SUB, ACTIVATION, GATED, HAS_BIAS, DROPOUT, THRESHOLD
        )
        h1, b1 = h0, b0
        h2, b2 = h0, b0
        h3, b3 = h0, b0
        if NUM_SUB > 1:
            h1, b1, more = _hidden_backward(
                q[1], gate, mask, at, stored, SUB, M, SUB, ACTIVATION, GATED, HAS_BIAS, DROPOUT, THRESHOLD
            )
            gate_sum += more
        if NUM_SUB > 2:
            h2, b2, more = _hidden_backward(
                q[2], gate, mask, at, stored, 2 * SUB, M, SUB, ACTIVATION, GATED, HAS_BIAS, DROPOUT, THRESHOLD
            )
            gate_sum += more
        if NUM_SUB > 3:
            h3, b3, more = _hidden_backward(
                q[3], gate, mask, at, stored, 3 * SUB, M, SUB, ACTIVATION, GATED, HAS_BIAS, DROPOUT, THRESHOLD
            )
            gate_sum += more
        if DROPOUT:
            gate_sum = gate_sum * SCALE
        tl.store(grad_gate + token.to(tl.int64) * (E * B) + group, gate_sum, mask=valid)
        v = k
    else:
        kind = x.dtype.element_ty
        h0 = _hidden(p[0], s[0], gate, mask, 0, SUB, ACTIVATION, GATED, DROPOUT, THRESHOLD).to(kind)
        h1 = h0
        h2 = h0
        h3 = h0
        if NUM_SUB > 1:
            h1 = _hidden(p[1], s[1], gate, mask, SUB, SUB, ACTIVATION, GATED, DROPOUT, THRESHOLD).to(kind)
        if NUM_SUB > 2:
            h2 = _hidden(p[2], s[2], gate, mask, 2 * SUB, SUB, ACTIVATION, GATED, DROPOUT, THRESHOLD).to(kind)
        if NUM_SUB > 3:
            h3 = _hidden(p[3], s[3], gate, mask, 3 * SUB, SUB, ACTIVATION, GATED, DROPOUT, THRESHOLD).to(kind)
        b0, b1, b2, b3 = h0, h1, h2, h3
    to = out + (local_tile.to(tl.int64) * TILE_ROWS + row)[:, None] * D
    spread_product(
        (h0, h1, h2, h3),
        (b0, b1, b2, b3),
        v,
        u,
        to,
        valid,
        limit,
        D,
        SUB,
        NUM_SUB,
        ROWS,
        BLOCK_D,
        PRECISION,
        GATED and BACKWARD,
        EVEN,
    )


@tuned(("BLOCK_K", "BLOCK_D"), TILES)
@triton.jit(do_not_specialize=["kept_tiles"])
def ffn_kernel(
    x,
    gates,
    shared_keys,
    keys,
    shared_key_bias,
    key_bias,
    shared_linear_keys,
    linear_keys,
    shared_linear_bias,
    linear_bias,
    shared_values,
    values,
    out,
    grad_y,
    hidden,
    grad_pre,
    grad_linear,
    grad_gate,
    grad_bias,
    grad_linear_bias,
    kept,
    kept_tiles,
    rows,
    tile_group,
    tile_count,
    num_tiles,
    seed,
    E: tl.constexpr,
    B: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    SUB: tl.constexpr,
    NUM_SUB: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TAIL_ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BACKWARD: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    DROPOUT: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    FIRST_EXPERT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """`ffn_tile` of the tiles that the workspace holds; of those with at most TAIL_ROWS rows in use, no more."""
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles):
        return
    read = (shared_keys, keys, shared_key_bias, key_bias)
    more_read = (shared_linear_keys, linear_keys, shared_linear_bias, linear_bias)
    beside = (grad_y, hidden, grad_pre, grad_linear, grad_gate, grad_bias, grad_linear_bias)
    is_short = tl.load(tile_count + tile) <= TAIL_ROWS
    for short in tl.static_range(0, 1 + (TAIL_ROWS < TILE_ROWS)):
        if (is_short == short) | (TAIL_ROWS >= TILE_ROWS):
            ffn_tile(
                tile,
                tile,
                x,
                gates,
                (read, more_read, (shared_values, values)),
                out,
                beside,
                (kept, kept_tiles),
                (rows, tile_group, tile_count),
                seed,
                E,
                B,
                PARTS,
                WIDTH,
                D,
                M,
                SUB,
                NUM_SUB,
                TILE_ROWS,
                TAIL_ROWS if short else TILE_ROWS,
                ACTIVATION,
                GATED,
                BACKWARD,
                HAS_SHARED,
                HAS_BIAS,
                PRECISION,
                DROPOUT,
                THRESHOLD,
                SCALE,
                FIRST_EXPERT,
                BLOCK_K,
                BLOCK_D,
            )


NOTHING_STORED: dict[str, None] = dict.fromkeys(
    ("grad_y", "hidden", "grad_pre", "grad_linear", "grad_gate", "grad_bias", "grad_linear_bias")
)
"""Arguments that only a backward pass has."""
