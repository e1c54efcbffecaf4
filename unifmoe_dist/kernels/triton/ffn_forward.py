"""The block-sparse FFN, forward: one program per row tile of one (expert, block) group."""

# Arguments of device functions have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from unifmoe_dist.kernels.triton.dropout import keep, row_keys
from unifmoe_dist.kernels.triton.ffn_products import TILES, bias, gather_product, spread_product
from unifmoe_dist.kernels.triton.math import activate, expert_pointer
from unifmoe_dist.kernels.triton.tuning import tuned


@tuned(("BLOCK_K", "BLOCK_D"), **TILES)
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
    p0, p1, p2 = gather_product(x, token, valid, k, D, M, SUB, NUM_SUB, TILE_ROWS, BLOCK_K, PRECISION)
    kind = x.dtype.element_ty
    p0 += bias(shared_key_bias, key_bias, expert, block, 0, B, M, SUB, HAS_SHARED, HAS_BIAS)
    if DROPOUT:
        gate = gate * SCALE
    start, step = row_keys(seed, token, expert, DROPOUT, FIRST_EXPERT)
    h0 = keep(activate(p0, ACTIVATION) * gate, start, step, block * M, SUB, DROPOUT, THRESHOLD).to(kind)
    h1 = h0
    h2 = h0
    if NUM_SUB == 3:
        p1 += bias(shared_key_bias, key_bias, expert, block, SUB, B, M, SUB, HAS_SHARED, HAS_BIAS)
        p2 += bias(shared_key_bias, key_bias, expert, block, 2 * SUB, B, M, SUB, HAS_SHARED, HAS_BIAS)
        h1 = keep(activate(p1, ACTIVATION) * gate, start, step, block * M + SUB, SUB, DROPOUT, THRESHOLD).to(kind)
        h2 = keep(activate(p2, ACTIVATION) * gate, start, step, block * M + 2 * SUB, SUB, DROPOUT, THRESHOLD).to(kind)
    spread_product(
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
