"""Device code of the routing decision; `triton.routing` says what its launches are for."""

# Arguments of device functions have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from unifmoe_dist.kernels.triton.math import dot


@triton.jit
def columns_kernel(
    weight,
    keys,
    columns,
    C: tl.constexpr,
    B: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program per block averages its M keys, the others copy 16 rows of the router's weight."""
    block = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    if block < B:
        total = tl.zeros((BLOCK_D,), tl.float32)
        for first in range(0, M, BLOCK_M):
            channel = first + tl.arange(0, BLOCK_M)[:, None]
            key = keys + (block * M + channel).to(tl.int64) * D + d[None, :]
            total += tl.sum(tl.load(key, mask=(channel < M) & (d < D)[None, :], other=0.0).to(tl.float32), 0)
        tl.store(columns + (C + block) * D + d, total / M, mask=d < D)
    else:
        at = ((block - B) * 16 + tl.arange(0, 16))[:, None] * D + d[None, :]
        inside = (d < D)[None, :] & (at < C * D)
        tl.store(columns + at, tl.load(weight + at, mask=inside, other=0.0).to(tl.float32), mask=inside)


@triton.jit
def _exact_dot(x, w, acc, rest, SPLIT: tl.constexpr, PRECISION: tl.constexpr):
    """acc + rest + x @ w to float32 rounding, for float32 w; rest sums what the first bfloat16 part of w leaves out."""
    if SPLIT:
        high = w.to(tl.bfloat16)
        error = w - high.to(tl.float32)
        middle = error.to(tl.bfloat16)
        low = (error - middle.to(tl.float32)).to(tl.bfloat16)
        rest = dot(x, middle, dot(x, low, rest, PRECISION), PRECISION)
        return dot(x, high, acc, PRECISION), rest
    else:
        return dot(x.to(tl.float32), w, acc, PRECISION), rest


@triton.jit
def _column(values, column, index):
    """(tokens,) one column of a tile."""
    return tl.sum(tl.where(column == index, values, 0.0), 1)


@triton.jit(do_not_specialize=["n"])
def route_kernel(
    x,
    weight,
    token_mask,
    coefficients_out,
    affinity_out,
    blocks_out,
    block_count_out,
    expert_count_out,
    statistics_out,
    counts_out,
    n,
    K: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    KP: tl.constexpr,
    BP: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_MASK: tl.constexpr,
    COUNTING: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Logits in columns 0 (shared) and 1..K (experts) of one tile, prototype scores in another."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    wide = token.to(tl.int64)[:, None]
    valid = token < n
    k = tl.arange(0, KP)[None, :]
    b = tl.arange(0, BP)[None, :]
    logits = tl.zeros((TOKENS, KP), tl.float32)
    scores = tl.zeros((TOKENS, BP), tl.float32)
    logits_rest = tl.zeros((TOKENS, KP), tl.float32)
    scores_rest = tl.zeros((TOKENS, BP), tl.float32)
    prototypes = weight + (K + 1) * D
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        xs = tl.load(x + wide * D + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
        w = tl.load(weight + k * D + d[:, None], mask=(k <= K) & (d < D)[:, None], other=0.0)
        logits, logits_rest = _exact_dot(xs, w, logits, logits_rest, SPLIT, PRECISION)
        p = tl.load(prototypes + b * D + d[:, None], mask=(b < B) & (d < D)[:, None], other=0.0)
        scores, scores_rest = _exact_dot(xs, p, scores, scores_rest, SPLIT, PRECISION)

    if SPLIT:  # the parts of an infinite product may differ in sign
        logits = tl.where(tl.abs(logits) < float("inf"), logits + logits_rest, logits)
        scores = tl.where(tl.abs(scores) < float("inf"), scores + scores_rest, scores)

    # How much to share.
    TAU: tl.constexpr = (B - 1) / (B * B)
    alpha = TAU + (1 - 2 * TAU) * (1.0 / (1.0 + tl.exp(-_column(logits, k, 0))))
    amount = B * alpha
    amount = tl.where(amount != amount, 1.0, amount)
    whole = tl.floor(amount)
    odd = whole - 2.0 * tl.floor(whole * 0.5)
    rest = amount - whole
    count = (whole + tl.where((rest > 0.5) | ((rest == 0.5) & (odd == 1.0)), 1.0, 0.0)).to(tl.int32)
    count = tl.minimum(tl.maximum(count, 1), B - 1)

    # What to share: a block's rank is the number of blocks before it. NaN sorts first, ties by index, as in torch.
    rank = tl.zeros((TOKENS, BP), tl.int32)
    nan = scores != scores
    for index in range(0, B):
        other = _column(scores, b, index)[:, None]
        other_nan = other != other
        before = (other > scores) | (other_nan & (nan == 0))
        tie = (other == scores) | (other_nan & nan)
        rank += (before | (tie & (index < b))).to(tl.int32)
    shared = (rank < count[:, None]) & (b < B)

    # How many experts the remainder needs.
    is_expert = (k >= 1) & (k <= K)
    logits = tl.where(is_expert, logits, float("-inf"))
    exponentials = tl.exp(logits - tl.max(logits, 1)[:, None])
    affinity = exponentials / tl.sum(exponentials, 1)[:, None]
    mass = tl.zeros((TOKENS, KP), tl.float32)
    for index in range(1, K + 1):
        other = _column(affinity, k, index)[:, None]
        before = (other > affinity) | (other != other) | ((other == affinity) & (index < k))
        mass += tl.where(before & (k != index), other, 0.0)
    needed = (1.0 - alpha)[:, None]
    active = is_expert & ((mass >= needed) == 0)  # true for NaN as well
    counted = valid
    if HAS_MASK:
        counted = valid & (tl.load(token_mask + token, mask=valid, other=0) != 0)
    alpha = tl.where(counted, alpha, 0.0)
    affinity = tl.where(counted[:, None] & is_expert, affinity, 0.0)
    active = active & counted[:, None]
    shared = shared & counted[:, None]
    gates = tl.where(active, affinity, 0.0)
    count = tl.where(counted, count, 0)
    expert_count = tl.sum(active.to(tl.int32), 1)

    tl.store(block_count_out + token, count.to(tl.int64), mask=valid)
    tl.store(expert_count_out + token, expert_count.to(tl.int64), mask=valid)
    inside = valid[:, None] & is_expert
    tl.store(affinity_out + wide * K + (k - 1), affinity, mask=inside)
    coefficients = tl.where(k == 0, alpha[:, None], gates)
    tl.store(coefficients_out + wide * (K + 1) + k, coefficients, mask=valid[:, None] & (k <= K))
    tl.store(blocks_out + wide * B + b, shared.to(tl.uint8), mask=valid[:, None] & (b < B))

    # One row of sums per program, in the order of `Usage`.
    row = statistics_out + tl.program_id(0) * (6 + K + B)
    tl.store(row, tl.sum(counted.to(tl.float32), 0))
    tl.store(row + 1, tl.sum((count + expert_count * (B - count)).to(tl.float32), 0))
    tl.store(row + 2, tl.sum(expert_count.to(tl.float32), 0))
    tl.store(row + 3, tl.sum(count.to(tl.float32), 0))
    tl.store(row + 4, tl.sum(alpha, 0))
    tl.store(row + 5, 0.0)  # dropped
    k_row = tl.arange(0, KP)
    b_row = tl.arange(0, BP)
    used = (gates != 0) & active
    load = tl.sum(used.to(tl.float32), 0)
    tl.store(row + 5 + k_row, load, mask=(k_row >= 1) & (k_row <= K))
    tl.store(row + 6 + K + b_row, tl.sum(shared.to(tl.float32), 0), mask=b_row < B)

    if COUNTING:  # rows of every group: the tokens that share a block, or use an expert and do not share the block
        table = counts_out + tl.program_id(0) * ((K + 1) * B)
        tl.store(table + b_row, tl.sum(shared.to(tl.int32), 0), mask=b_row < B)
        rest = (shared == 0).to(tl.float16)
        count = tl.dot(tl.trans(used.to(tl.float16)), rest, tl.zeros((KP, BP), tl.float32)).to(tl.int32)
        column = k_row[:, None]
        tl.store(table + column * B + b, count, mask=(column >= 1) & (column <= K) & (b < B))


@triton.jit(do_not_specialize=["n"])
def route_backward_kernel(
    grad_coefficients,
    grad_affinity,
    coefficients_in,
    affinity_in,
    weight,
    token_mask,
    grad_logits,
    grad_x,
    n,
    K: tl.constexpr,
    B: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_COEFFICIENTS: tl.constexpr,
    HAS_AFFINITY: tl.constexpr,
    D: tl.constexpr,
    KP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Through gates = affinity where active, the softmax and the sigmoid; then grad_x = grad_logits @ weight."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    wide = token.to(tl.int64)[:, None]
    valid = token < n
    counted = valid
    if HAS_MASK:
        counted = valid & (tl.load(token_mask + token, mask=valid, other=0) != 0)
    k = tl.arange(0, KP)[None, :]
    inside = counted[:, None] & (k >= 1) & (k <= K)
    affinity = tl.load(affinity_in + wide * K + (k - 1), mask=inside, other=0.0)
    upstream = tl.zeros((TOKENS, KP), tl.float32)
    if HAS_AFFINITY:
        upstream += tl.load(grad_affinity + wide * K + (k - 1), mask=inside, other=0.0)
    grad_alpha = tl.zeros((TOKENS,), tl.float32)
    if HAS_COEFFICIENTS:
        at = wide * (K + 1) + k
        active = tl.load(coefficients_in + at, mask=inside, other=0.0) != 0
        upstream += tl.where(active, tl.load(grad_coefficients + at, mask=inside, other=0.0), 0.0)
        grad_alpha += tl.load(grad_coefficients + token.to(tl.int64) * (K + 1), mask=counted, other=0.0)
    grad = affinity * (upstream - tl.sum(upstream * affinity, 1)[:, None])
    TAU: tl.constexpr = (B - 1) / (B * B)
    SPAN: tl.constexpr = 1 - 2 * TAU
    alpha = tl.load(coefficients_in + token.to(tl.int64) * (K + 1), mask=counted, other=TAU)
    sigmoid = (alpha - TAU) / SPAN
    slope = grad_alpha * SPAN * sigmoid * (1.0 - sigmoid)
    grad = tl.where(k == 0, slope[:, None], grad)
    tl.store(grad_logits + wide * (K + 1) + k, grad, mask=valid[:, None] & (k <= K))
    column = tl.arange(0, KP)[:, None]
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)[None, :]
        w = tl.load(weight + column * D + d, mask=(column <= K) & (d < D), other=0.0)
        product = tl.dot(grad, w, tl.zeros((TOKENS, BLOCK_D), tl.float32), input_precision=PRECISION)
        tl.store(grad_x + wide * D + d, product.to(grad_x.dtype.element_ty), mask=valid[:, None] & (d < D))


@triton.jit(do_not_specialize=["n", "span"])
def route_weight_kernel(
    x,
    token_mask,
    grad_logits,
    partial,
    n,
    span,
    C: tl.constexpr,
    STEP: tl.constexpr,
    HAS_MASK: tl.constexpr,
    D: tl.constexpr,
    KP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """partial[s] = grad_logits^T @ x over the tokens of span s."""
    start = tl.program_id(0) * span
    c = tl.arange(0, KP)[:, None]
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    acc = tl.zeros((KP, BLOCK_D), tl.float32)
    for first in range(start, tl.minimum(start + span, n), STEP):
        token = first + tl.arange(0, STEP)
        counted = token < n
        if HAS_MASK:
            counted = counted & (tl.load(token_mask + token, mask=counted, other=0) != 0)
        wide = token.to(tl.int64)
        g = tl.load(grad_logits + wide[None, :] * C + c, mask=counted[None, :] & (c < C), other=0.0)
        xs = tl.load(x + wide[:, None] * D + d, mask=counted[:, None] & (d < D), other=0.0)
        acc = tl.dot(g, xs.to(tl.float32), acc, input_precision=PRECISION)
    tl.store(partial + (tl.program_id(0) * C + c) * D + d, acc, mask=(c < C) & (d < D))
