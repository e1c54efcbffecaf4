"""The routing decision of `routing.py::route` in Triton, with what statistics and the experts' plan need.

Three launches decide: one packs the router and the block prototypes into float32 columns; one does everything per
token, and counts the rows of every (expert, block) group in its 32 tokens; one sums those counts over tokens, and the
statistics. A fourth, `triton.plan.make_plan`, then lists the rows.

Logits and prototype scores are exact to float32 rounding: bfloat16 tokens are multiplied by float32 weights cut into
three bfloat16 parts, whose products are exact; other tokens by three TF32 products. Decisions equal those of `route`
except where rounding decides, such as two affinities that differ in the last bit.

There is no sort. Ranks come from comparing every pair of a row in registers, and an expert is active if the mass of
those ranked before it is below the threshold: float32 sums of the same non-negative numbers in index order cannot
shrink when one is added, so this is a prefix of the order.
"""

# Arguments of device functions have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from unifmoe_dist.eager import not_compiled
from unifmoe_dist.kernels.triton.math import DTYPES, EXACT, dot, power_of_two, precision
from unifmoe_dist.kernels.triton.plan import SPAN, GroupOffsets, count_groups, scan_groups
from unifmoe_dist.routing import ByProducts, Routing

_TOKENS = 32  # per program, a divisor of SPAN
_WIDEST = 256  # columns held in registers
_LARGEST_TABLE = 8192  # (expert, block) counts held in registers; a kernel of its own counts more


def unsupported(x: Tensor, columns: int, num_blocks: int) -> str | None:
    """Why the kernels cannot route x (N, D) over `columns` = K + 1 and `num_blocks`; None if they can."""
    if x.dtype not in DTYPES:
        return f"they route float32, bfloat16 and float16, not {x.dtype}"
    if max(columns, num_blocks) > _WIDEST:
        return f"they route over at most {_WIDEST - 1} experts and {_WIDEST} blocks"
    return None


@not_compiled
def triton_route(
    x_ND: Tensor, weight_KD: Tensor, keys_HD: Tensor, num_blocks: int, token_mask_N: Tensor | None = None
) -> Routing:
    """Same meaning and gradients as `route` on float32 copies of its inputs and the prototypes of `keys_HD`.

    Args:
        x_ND: (N, D) tokens in float32, bfloat16 or float16.
        weight_KD: (K + 1, D) router weight, row 0 the shared column.
        keys_HD: (H, D) keys of the shared expert; the mean of every H / B of them is a block's prototype.
        num_blocks: Blocks B.
        token_mask_N: (N,) bool; a false token gets zeros everywhere, uses nothing and has no gradient.

    Returns:
        The decision, with `by_products` where there are tokens. `shared_demand` and `gates` are views of its
        coefficients.
    """
    coefficients, affinity, blocks, block_count, expert_count, *made = _TritonRoute.apply(
        x_ND.contiguous(), weight_KD.contiguous(), keys_HD.detach().contiguous(), num_blocks, token_mask_N
    )
    alpha, gates = coefficients[:, 0], coefficients[:, 1:]
    routing = Routing(alpha, blocks, affinity, gates, block_count, expert_count)
    if not made:
        return routing
    statistics, earlier, totals = made
    return routing.with_by_products(ByProducts(coefficients, statistics, GroupOffsets(earlier, totals)))


class _TritonRoute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, keys: Tensor, num_blocks: int, token_mask: Tensor | None
    ) -> tuple[Tensor, ...]:
        (n, dim), num_experts = x.shape, weight.shape[0] - 1
        coefficients, affinity = (x.new_empty((n, e), dtype=torch.float32) for e in (num_experts + 1, num_experts))
        blocks = x.new_empty((n, num_blocks), dtype=torch.bool)
        block_count, expert_count = (x.new_empty((n,), dtype=torch.int64) for _ in range(2))
        mask = None if token_mask is None else token_mask.contiguous().view(torch.uint8)
        columns = _packed_columns(weight, keys, num_blocks)
        made: tuple[Tensor, ...] = ()
        if n:
            split = x.dtype == torch.bfloat16
            cols, rows = power_of_two(num_experts + 1, 16), power_of_two(num_blocks, 16)
            counting, programs = cols * rows <= _LARGEST_TABLE, triton.cdiv(n, _TOKENS)
            parts = x.new_empty((programs, 6 + num_experts + num_blocks), dtype=torch.float32)
            counts = x.new_empty((programs, num_experts + 1, num_blocks), dtype=torch.int32) if counting else None
            _route_kernel[(programs,)](
                x,
                columns,
                mask,
                coefficients,
                affinity,
                blocks.view(torch.uint8),
                block_count,
                expert_count,
                parts,
                counts,
                n,
                K=num_experts,
                B=num_blocks,
                D=dim,
                KP=cols,
                BP=rows,
                TOKENS=_TOKENS,
                BLOCK_D=_block_d(dim, cols + rows),
                HAS_MASK=mask is not None,
                COUNTING=counting,
                SPLIT=split,
                PRECISION=precision(x.dtype) if split else EXACT,
                num_warps=4,
            )
            if counts is None:
                statistics, offsets = parts.sum(0, dtype=torch.float64), count_groups(coefficients, blocks, True)
            else:
                statistics = x.new_empty(parts.shape[1:], dtype=torch.float64)
                offsets = scan_groups(counts, SPAN // _TOKENS, parts, statistics)
            made = statistics, offsets.earlier, offsets.totals
        ctx.save_for_backward(x, columns, coefficients, affinity, mask)
        ctx.num_blocks, ctx.weight_dtype = num_blocks, weight.dtype
        ctx.mark_non_differentiable(blocks, block_count, expert_count, *made)
        ctx.set_materialize_grads(False)
        return coefficients, affinity, blocks, block_count, expert_count, *made

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_coefficients: Tensor | None, grad_affinity: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        x, columns, coefficients, affinity, mask = ctx.saved_tensors
        (n, dim), num_experts = x.shape, affinity.shape[1]
        if not n:
            return torch.zeros_like(x), columns.new_zeros((num_experts + 1, dim), dtype=ctx.weight_dtype), *[None] * 3
        grad_x = torch.empty_like(x)
        grad_logits = x.new_empty((n, num_experts + 1), dtype=torch.float32)
        width = power_of_two(num_experts + 1, 16)
        common = dict(D=dim, KP=width, BLOCK_D=_block_d(dim, width), PRECISION=EXACT, num_warps=4)
        _route_backward_kernel[(triton.cdiv(n, _TOKENS),)](
            None if grad_coefficients is None else grad_coefficients.contiguous(),
            None if grad_affinity is None else grad_affinity.contiguous(),
            coefficients,
            affinity,
            columns,
            mask,
            grad_logits,
            grad_x,
            n,
            K=num_experts,
            B=ctx.num_blocks,
            TOKENS=_TOKENS,
            HAS_MASK=mask is not None,
            HAS_COEFFICIENTS=grad_coefficients is not None,
            HAS_AFFINITY=grad_affinity is not None,
            **common,
        )
        # Partial sums over spans of tokens, added in order.
        spans = min(64, triton.cdiv(n, 64))
        span = triton.cdiv(triton.cdiv(n, spans), 64) * 64
        partial = columns.new_empty((spans, num_experts + 1, dim))
        _route_weight_kernel[(spans, triton.cdiv(dim, common["BLOCK_D"]))](
            x, mask, grad_logits, partial, n, span, C=num_experts + 1, STEP=32, HAS_MASK=mask is not None, **common
        )
        return grad_x, partial.sum(0).to(ctx.weight_dtype), None, None, None


def _packed_columns(weight: Tensor, keys: Tensor, num_blocks: int) -> Tensor:
    """(K + 1 + B, D) float32: the router's weight, then the prototypes."""
    (num_columns, dim), block = weight.shape, keys.shape[0] // num_blocks
    columns = weight.new_empty((num_columns + num_blocks, dim), dtype=torch.float32)
    width = min(32, power_of_two(dim, 16))
    _columns_kernel[(num_blocks + triton.cdiv(num_columns, 16), triton.cdiv(dim, width))](
        weight,
        keys,
        columns,
        C=num_columns,
        B=num_blocks,
        M=block,
        D=dim,
        BLOCK_M=min(64, power_of_two(block)),
        BLOCK_D=width,
        num_warps=4,
    )
    return columns


def _block_d(dim: int, columns: int) -> int:
    """Slice of the model width per step: the more columns, the narrower, to fit 99 KiB of shared memory."""
    return min(64 if columns <= 64 else 32 if columns <= 160 else 16, power_of_two(dim, 16))


@triton.jit
def _columns_kernel(
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
def _route_kernel(
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
def _route_backward_kernel(
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
def _route_weight_kernel(
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
