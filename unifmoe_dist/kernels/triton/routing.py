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
from torch import Tensor
from torch.autograd.function import once_differentiable

from unifmoe_dist.eager import not_compiled
from unifmoe_dist.kernels.triton.math import DTYPES, EXACT, power_of_two, precision
from unifmoe_dist.kernels.triton.plan import SPAN, GroupOffsets, count_rows, scan_groups
from unifmoe_dist.kernels.triton.routing_kernels import (
    columns_kernel,
    route_backward_kernel,
    route_kernel,
    route_weight_kernel,
)
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
    x_ND: Tensor,
    weight_KD: Tensor,
    keys_HD: Tensor,
    num_blocks: int,
    token_mask_N: Tensor | None = None,
    columns_CD: Tensor | None = None,
) -> Routing:
    """Same meaning and gradients as `route` on float32 copies of its inputs and the prototypes of `keys_HD`.

    Args:
        x_ND: (N, D) tokens in float32, bfloat16 or float16.
        weight_KD: (K + 1, D) router weight, row 0 the shared column.
        keys_HD: (H, D) keys of the shared expert; the mean of every H / B of them is a block's prototype.
        num_blocks: Blocks B.
        token_mask_N: (N,) bool; a false token gets zeros everywhere, uses nothing and has no gradient.
        columns_CD: (K + 1 + B, D) float32, `packed_columns` of the weight and the keys; None packs them here.

    Returns:
        The decision, with `by_products` where there are tokens. `shared_demand` and `gates` are views of its
        coefficients.
    """
    with torch.cuda.device_of(x_ND):  # Triton launches on the current device, which need not be x's
        coefficients, affinity, blocks, block_count, expert_count, *made = _TritonRoute.apply(
            x_ND.contiguous(), weight_KD, keys_HD.detach(), num_blocks, token_mask_N, columns_CD
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
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        keys: Tensor,
        num_blocks: int,
        token_mask: Tensor | None,
        columns: Tensor | None,
    ) -> tuple[Tensor, ...]:
        (n, dim), num_experts = x.shape, weight.shape[0] - 1
        coefficients, affinity = (x.new_empty((n, e), dtype=torch.float32) for e in (num_experts + 1, num_experts))
        blocks = x.new_empty((n, num_blocks), dtype=torch.bool)
        block_count, expert_count = (x.new_empty((n,), dtype=torch.int64) for _ in range(2))
        mask = None if token_mask is None else token_mask.contiguous().view(torch.uint8)
        columns = packed_columns(weight, keys, num_blocks) if columns is None else columns
        made: tuple[Tensor, ...] = ()
        if n:
            split = x.dtype == torch.bfloat16
            cols, rows = power_of_two(num_experts + 1, 16), power_of_two(num_blocks, 16)
            counting, programs = cols * rows <= _LARGEST_TABLE, triton.cdiv(n, _TOKENS)
            parts = x.new_empty((programs, 6 + num_experts + num_blocks), dtype=torch.float32)
            counts = x.new_empty((programs, num_experts + 1, num_blocks), dtype=torch.int32) if counting else None
            route_kernel[(programs,)](
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
            statistics, per_span = x.new_empty(parts.shape[1:], dtype=torch.float64), SPAN // _TOKENS
            if counts is None:
                counts, per_span = count_rows(coefficients, blocks, True), 1
            offsets = scan_groups(counts, per_span, parts, statistics)
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
            return torch.zeros_like(x), columns.new_zeros((num_experts + 1, dim), dtype=ctx.weight_dtype), *[None] * 4
        grad_x = torch.empty_like(x)
        grad_logits = x.new_empty((n, num_experts + 1), dtype=torch.float32)
        width = power_of_two(num_experts + 1, 16)
        common = dict(D=dim, KP=width, BLOCK_D=_block_d(dim, width), PRECISION=EXACT, num_warps=4)
        if width > 128:  # fits 99 KiB of shared memory
            common |= dict(num_warps=8, num_stages=1)
        route_backward_kernel[(triton.cdiv(n, _TOKENS),)](
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
        route_weight_kernel[(spans, triton.cdiv(dim, common["BLOCK_D"]))](
            x, mask, grad_logits, partial, n, span, C=num_experts + 1, STEP=32, HAS_MASK=mask is not None, **common
        )
        return grad_x, partial.sum(0).to(ctx.weight_dtype), *[None] * 4


def packed_columns(weight: Tensor, keys: Tensor, num_blocks: int) -> Tensor:
    """(K + 1 + B, D) float32: the router's weight (K + 1, D), then the prototypes of keys (H, D)."""
    weight, keys = weight.contiguous(), keys.contiguous()
    (num_columns, dim), block = weight.shape, keys.shape[0] // num_blocks
    columns = weight.new_empty((num_columns + num_blocks, dim), dtype=torch.float32)
    width = min(32, power_of_two(dim, 16))
    with torch.cuda.device_of(keys):
        columns_kernel[(num_blocks + triton.cdiv(num_columns, 16), triton.cdiv(dim, width))](
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
