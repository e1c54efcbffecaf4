"""Products over a tile of rows, of which the block-sparse FFN is made.

Both passes are made of two products over a tile of rows and the M channels of its block:
`gather_product`, rows @ weights^T over the model width, and `spread_product`, channels @ weights, one slice of the
model width at a time. Forward: gather(x, keys), activation, gate, spread(values). Backward: gather(x, keys) again,
gather(grad, values), the derivative, spread(keys). Where experts are gated, two banks of keys are read in one product
and spread in one (TWO), so that each row is loaded or stored once.

The M channels are held in registers as up to four (NUM_SUB) tiles of SUB: tile sides are powers of two, and block
widths such as 192 = 3 * 64 are not; and what follows the products in a backward pass would spill, done on 256 at once.
"""

# Arguments of device functions have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from unifmoe_dist.kernels.triton.math import dot, expert_pointer
from unifmoe_dist.kernels.triton.tuning import Candidates

TILES = Candidates(
    large=[(32, 64, 8, 3), (64, 64, 8, 3), (64, 64, 8, 2)],
    small=[(32, 32, 8, 2), (32, 64, 8, 2)],
    single=[(32, 32, 8, 2), (16, 32, 8, 2)],
    wide=[(32, 32, 8, 3), (64, 32, 8, 2), (16, 32, 8, 3)],
)


@triton.jit
def _weights(base, channel, column, limit, D: tl.constexpr, EVEN: tl.constexpr):
    """Weights [channel, column] of one part, either index given as a column vector, so also transposed."""
    at = base + channel * D + column
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=(channel < limit) & (column < D), other=0.0)


@triton.jit
def gather_product(
    source,
    token,
    valid,
    weights,
    second,
    limit,
    columns,
    D: tl.constexpr,
    SUB: tl.constexpr,
    NUM_SUB: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    TWO: tl.constexpr,
    EVEN_CHANNELS: tl.constexpr,
):
    """source[token] @ weights^T for the `limit` channels, as four (TILE_ROWS, SUB) tiles, of which the first NUM_SUB
    are defined; then source[token] @ second^T alike, undefined without TWO."""
    EVEN: tl.constexpr = (D % BLOCK_K == 0) and EVEN_CHANNELS
    channel = tl.arange(0, SUB)[None, :]
    rows = source + token.to(tl.int64)[:, None] * D
    p0 = tl.zeros((TILE_ROWS, SUB), tl.float32)
    p1 = p0
    p2 = p0
    p3 = p0
    s0 = p0
    s1 = p0
    s2 = p0
    s3 = p0
    for first in range(0, columns, BLOCK_K):
        column = first + tl.arange(0, BLOCK_K)
        a = tl.load(rows + column[None, :], mask=valid[:, None] & (column < D)[None, :], other=0.0)
        p0 = dot(a, _weights(weights, channel, column[:, None], limit, D, EVEN), p0, PRECISION)
        if TWO:
            s0 = dot(a, _weights(second, channel, column[:, None], limit, D, EVEN), s0, PRECISION)
        if NUM_SUB > 1:
            p1 = dot(a, _weights(weights, channel + SUB, column[:, None], limit, D, EVEN), p1, PRECISION)
            if TWO:
                s1 = dot(a, _weights(second, channel + SUB, column[:, None], limit, D, EVEN), s1, PRECISION)
        if NUM_SUB > 2:
            p2 = dot(a, _weights(weights, channel + 2 * SUB, column[:, None], limit, D, EVEN), p2, PRECISION)
            if TWO:
                s2 = dot(a, _weights(second, channel + 2 * SUB, column[:, None], limit, D, EVEN), s2, PRECISION)
        if NUM_SUB > 3:
            p3 = dot(a, _weights(weights, channel + 3 * SUB, column[:, None], limit, D, EVEN), p3, PRECISION)
            if TWO:
                s3 = dot(a, _weights(second, channel + 3 * SUB, column[:, None], limit, D, EVEN), s3, PRECISION)
    return (p0, p1, p2, p3), (s0, s1, s2, s3)


@triton.jit
def store_channels(products, to, valid, M: tl.constexpr, SUB: tl.constexpr, NUM_SUB: tl.constexpr, ROWS: tl.constexpr):
    """Store what `gather_product` gave to (ROWS, M) at `to`."""
    p0, p1, p2, p3 = products
    channel = tl.arange(0, SUB)[None, :]
    at = to + tl.arange(0, ROWS)[:, None] * M + channel
    kind = to.dtype.element_ty
    tl.store(at, p0.to(kind), mask=valid[:, None] & (channel < M))
    if NUM_SUB > 1:
        tl.store(at + SUB, p1.to(kind), mask=valid[:, None] & (channel + SUB < M))
    if NUM_SUB > 2:
        tl.store(at + 2 * SUB, p2.to(kind), mask=valid[:, None] & (channel + 2 * SUB < M))
    if NUM_SUB > 3:
        tl.store(at + 3 * SUB, p3.to(kind), mask=valid[:, None] & (channel + 3 * SUB < M))


@triton.jit
def spread_product(
    channels,
    more,
    weights,
    second,
    rows,
    valid,
    limit,
    D: tl.constexpr,
    SUB: tl.constexpr,
    NUM_SUB: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    TWO: tl.constexpr,
    EVEN_CHANNELS: tl.constexpr,
):
    """Store channels @ weights (with TWO, + more @ second) to `rows`, pointers (TILE_ROWS, 1)."""
    EVEN: tl.constexpr = (D % BLOCK_D == 0) and EVEN_CHANNELS
    h0, h1, h2, h3 = channels
    s0, s1, s2, s3 = more
    channel = tl.arange(0, SUB)[:, None]
    for first in range(0, D, BLOCK_D):
        column = first + tl.arange(0, BLOCK_D)[None, :]
        acc = tl.zeros((TILE_ROWS, BLOCK_D), tl.float32)
        acc = dot(h0, _weights(weights, channel, column, limit, D, EVEN), acc, PRECISION)
        if NUM_SUB > 1:
            acc = dot(h1, _weights(weights, channel + SUB, column, limit, D, EVEN), acc, PRECISION)
        if NUM_SUB > 2:
            acc = dot(h2, _weights(weights, channel + 2 * SUB, column, limit, D, EVEN), acc, PRECISION)
        if NUM_SUB > 3:
            acc = dot(h3, _weights(weights, channel + 3 * SUB, column, limit, D, EVEN), acc, PRECISION)
        if TWO:
            acc = dot(s0, _weights(second, channel, column, limit, D, EVEN), acc, PRECISION)
            if NUM_SUB > 1:
                acc = dot(s1, _weights(second, channel + SUB, column, limit, D, EVEN), acc, PRECISION)
            if NUM_SUB > 2:
                acc = dot(s2, _weights(second, channel + 2 * SUB, column, limit, D, EVEN), acc, PRECISION)
            if NUM_SUB > 3:
                acc = dot(s3, _weights(second, channel + 3 * SUB, column, limit, D, EVEN), acc, PRECISION)
        tl.store(rows + column, acc.to(rows.dtype.element_ty), mask=valid[:, None] & (column < D))


@triton.jit
def add_bias(
    products,
    shared,
    residual,
    part,
    HIDDEN: tl.constexpr,
    SUB: tl.constexpr,
    NUM_SUB: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """The tiles of `gather_product` with the key biases of their part: expert, first channel, number of channels."""
    p0, p1, p2, p3 = products
    p0 += _bias(shared, residual, part, 0, HIDDEN, SUB, HAS_SHARED, HAS_BIAS)
    if NUM_SUB > 1:
        p1 += _bias(shared, residual, part, SUB, HIDDEN, SUB, HAS_SHARED, HAS_BIAS)
    if NUM_SUB > 2:
        p2 += _bias(shared, residual, part, 2 * SUB, HIDDEN, SUB, HAS_SHARED, HAS_BIAS)
    if NUM_SUB > 3:
        p3 += _bias(shared, residual, part, 3 * SUB, HIDDEN, SUB, HAS_SHARED, HAS_BIAS)
    return p0, p1, p2, p3


@triton.jit
def _bias(
    shared,
    residual,
    part,
    START: tl.constexpr,
    HIDDEN: tl.constexpr,
    SUB: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """(1, SUB) key biases of a part from channel START, zeros where there are none."""
    if HAS_BIAS:
        expert, first_channel, limit = part
        channel = START + tl.arange(0, SUB)
        base = expert_pointer(shared, residual, expert, HIDDEN, HAS_SHARED) + first_channel
        return tl.load(base + channel, mask=channel < limit, other=0.0).to(tl.float32)[None, :]
    else:
        return tl.zeros((1, SUB), tl.float32)
