"""Block-sparse experts in Triton: only the selected blocks, forward and backward, without a host stall.

Work and memory, per row (one block of one token), M channels in a block, compute type of 2 bytes:
- up- and down-projection are one kernel, so the hidden activations never leave the chip. Two kernels would move 4 M
  more bytes per row; the fused tile also reads less from the L2 cache per product. Blocks wider than 256 channels are
  cut into equal parts that fit in registers.
- a row's output (D values) is stored and a second kernel adds the rows of each token in ascending order: 4 D bytes
  per row for 4 M D operations, hidden behind the products on the way out. Sums are float32 and have one order, so
  results repeat bit for bit with the same tiles. `atomic=True` adds rows in float32 where they belong, in any order,
  without a workspace.
- the number of rows is known only on the device and may reach N (1 + K (B - 1)). Rather than a buffer for the worst
  case, the workspace holds `workspace_bytes` (by default rows for 2 B blocks a token, at most 256 MiB or 16 times
  the tokens' own bytes, whichever is more: what a top-2 layer with H = 4 D keeps of its activations), and tiles are
  computed in as many rounds as the worst case needs. A round without tiles exits at once, a few microseconds for
  each of its launches. The last round with tiles writes the output itself.
- saved for the backward pass: x, gates, block masks and group offsets. It makes the plan again, one launch, and
  recomputes the hidden activations, 2 of its 10 M D operations per row. Keeping either would need a buffer for the
  worst case.

Launches of a whole layer on one rank with R rounds: 5 + 2 R forward, of which the first four route and plan and one
adds to the running statistics, and 7 + 5 R backward with biases. Half precision casts two small tensors more in the
backward pass, and autocast casts the weights in both. `test_launches` counts them.

Weight gradients belong to one program per tile of a group, which walks the group's rows in order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from unifmoe_dist.eager import not_compiled
from unifmoe_dist.experts import ExpertWeights
from unifmoe_dist.kernels import tile_sizes
from unifmoe_dist.kernels.dropout import HiddenDropout
from unifmoe_dist.kernels.triton.dropout import dropout_arguments
from unifmoe_dist.kernels.triton.ffn_kernel import ffn_kernel
from unifmoe_dist.kernels.triton.ffn_reductions import bias_grad_kernel, gate_grad_kernel, weight_grad_kernel
from unifmoe_dist.kernels.triton.math import DTYPES, power_of_two
from unifmoe_dist.kernels.triton.plan import GroupOffsets, count_groups, make_plan
from unifmoe_dist.kernels.triton.rounds import LaunchShape, Rounds, TritonOptions


def unsupported(x: Tensor, weights: ExpertWeights) -> str | None:
    """Why the kernels cannot compute `weights` for x (N, D); None if they can."""
    experts, hidden, dim = weights.keys.shape
    width = hidden // weights.num_blocks
    if weights.gate_keys is not None:
        return "they do not compute gated experts"
    if x.dtype not in DTYPES:
        return f"they compute float32, bfloat16 and float16, not {x.dtype}"
    if dim % 16 or width % 16:
        return f"model width {dim} and block width {width} must be multiples of 16"
    if x.shape[0] * (experts + 1) * weights.num_blocks * tile_sizes.parts(width, x.element_size()) >= 2**30:
        return f"{x.shape[0]} tokens over {experts} experts are too many rows for 32-bit indices"
    return None


@not_compiled
def triton_block_ffn(
    x_ND: Tensor,
    gates_NE: Tensor,
    blocks_NB: Tensor,
    weights: ExpertWeights,
    shared: ExpertWeights | None = None,
    options: TritonOptions | None = None,
    offsets: GroupOffsets | None = None,
    dropout: HiddenDropout | None = None,
) -> Tensor:
    """Same meaning and gradients as `reference_block_ffn`, plus a shared expert in the same launches.

    Products run in the autocast dtype when autocast is on, else in the dtype of x; float32 products as
    `triton.math.precision` says; sums and gates are float32. Second derivatives are not supported.

    Args:
        x_ND: (N, D) tokens.
        gates_NE: (N, E) coefficients; with `shared`, column 0 is the shared expert's.
        blocks_NB: (N, B) bool, blocks of every active expert; with `shared`, those of the shared expert, and the
            others compute the complement.
        weights: The E experts, without the shared one.
        shared: One expert.
        options: How to compute.
        offsets: Group offsets of the gates and blocks, where routing made them; None counts here.
        dropout: Which hidden channels become 0; with `shared`, expert 0 is that one.

    Returns:
        (N, D) in the dtype of x.
    """
    device_type = x_ND.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x_ND.dtype
    with torch.autocast(device_type, enabled=False):
        tensors = []
        for bank in (shared, weights):
            for name in ("keys", "values", "key_bias", "value_bias"):
                tensor = None if bank is None else getattr(bank, name)
                tensors.append(None if tensor is None else tensor.to(dtype).contiguous())
        output = _TritonBlockFFN.apply(
            x_ND.to(dtype).contiguous(),
            gates_NE.float().contiguous(),
            blocks_NB.contiguous(),
            weights.num_blocks,
            weights.activation,
            options or TritonOptions(),
            offsets,
            dropout,
            *tensors,
        )
        return output.to(x_ND.dtype)


def _choices(ctx: Any, has_shared: bool, has_bias: bool) -> dict[str, Any]:
    """What both passes compile into the kernel."""
    given = dict(ACTIVATION=ctx.activation, HAS_SHARED=has_shared, HAS_BIAS=has_bias, ATOMIC=ctx.options.atomic)
    return given | dropout_arguments(ctx.dropout)


class _TritonBlockFFN(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any,
        x: Tensor,
        gates: Tensor,
        blocks: Tensor,
        num_blocks: int,
        activation: str,
        options: TritonOptions,
        offsets: GroupOffsets | None,
        dropout: HiddenDropout | None,
        shared_keys: Tensor | None,
        shared_values: Tensor | None,
        shared_key_bias: Tensor | None,
        shared_value_bias: Tensor | None,
        keys: Tensor,
        values: Tensor,
        key_bias: Tensor | None,
        value_bias: Tensor | None,
    ) -> Tensor:
        ctx.num_blocks, ctx.activation, ctx.options, ctx.dropout = num_blocks, activation, options, dropout
        tensors = (shared_keys, shared_values, shared_key_bias, shared_value_bias, keys, values, key_bias, value_bias)
        if not x.shape[0]:
            ctx.save_for_backward(x, gates, blocks, None, None, *tensors)
            return torch.zeros_like(x)
        has_shared, has_bias = shared_keys is not None, key_bias is not None
        shape = LaunchShape(x, gates, keys, num_blocks, options)
        offsets = offsets or count_groups(gates, blocks, has_shared)
        ctx.save_for_backward(x, gates, blocks, offsets.earlier, offsets.totals, *tensors)
        plan = make_plan(gates, blocks, offsets, shape.tile_rows, has_shared, shape.parts)
        rounds = Rounds(x, plan, shape, shape.row_bytes, options.atomic, one_round=options.atomic)
        bank = (x, gates, shared_keys, keys, shared_key_bias, key_bias, shared_values, values)
        choices = _choices(ctx, has_shared, has_bias)
        for first in rounds:
            ffn_kernel[(rounds.tiles,)](
                *bank, rounds.rows, *[None] * 5, *plan.tiles, first, BACKWARD=False, **shape.tile_arguments(), **choices
            )
            rounds.combine(first, gates, shared_value_bias, value_bias)
        return rounds.output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, gates, blocks, earlier, totals, *tensors = ctx.saved_tensors
        shared_keys, shared_values, shared_key_bias, shared_value_bias, keys, values, key_bias, value_bias = tensors
        if not x.shape[0]:
            zeros = (None if t is None else torch.zeros_like(t) for t in tensors)
            return (torch.zeros_like(x), torch.zeros_like(gates), *[None] * 6, *zeros)
        options, has_shared, has_bias = ctx.options, shared_keys is not None, key_bias is not None
        grad_y = grad_y.to(x.dtype).contiguous()
        shape = LaunchShape(x, gates, keys, ctx.num_blocks, options)
        shape.tile_rows = options.backward_tile_rows or tile_sizes.backward_tile_rows(shape.tile_rows, x.element_size())
        offsets = GroupOffsets(earlier, totals)
        plan = make_plan(gates, blocks, offsets, shape.tile_rows, has_shared, shape.parts)
        row_bytes = (0 if options.atomic else shape.row_bytes) + 2 * shape.width * x.element_size()
        rounds = Rounds(x, plan, shape, row_bytes, options.atomic)
        hidden, grad_pre = (x.new_empty((rounds.tiles * shape.tile_rows, shape.width)) for _ in range(2))
        grad_gate = torch.empty((shape.n, shape.experts * shape.blocks), dtype=torch.float32, device=x.device)
        grad_bias = torch.empty((rounds.tiles, shape.width), dtype=torch.float32, device=x.device)
        wanted = ctx.needs_input_grad[-len(tensors) :]
        grads = [torch.empty_like(t) if t is not None else None for t in tensors]
        bank = (x, gates, shared_keys, keys, shared_key_bias, key_bias, shared_values, values)
        choices = _choices(ctx, has_shared, has_bias)
        for first in rounds:
            ffn_kernel[(rounds.tiles,)](
                *bank,
                rounds.rows,
                grad_y,
                hidden,
                grad_pre,
                grad_gate,
                grad_bias,
                *plan.tiles,
                first,
                BACKWARD=True,
                **shape.tile_arguments(),
                **choices,
            )
            for channels, source, index in ((hidden, grad_y, 1), (grad_pre, x, 0)):
                if wanted[index] or wanted[index + 4]:
                    _add_weight_gradient(rounds, first, channels, source, grads[index], grads[index + 4])
            if has_bias:
                _add_bias_gradient(rounds, first, grad_bias, grads[2], grads[6])
            rounds.combine(first, gates, None, None)
        grad_gates = _gate_gradient(shape, grad_gate, grad_y, gates, blocks, shared_value_bias, value_bias, has_shared)
        if value_bias is not None:
            sums = gates.to(x.dtype).T @ grad_y
            split = 1 if has_shared else 0
            grads[3], grads[7] = (sums[:split] if has_shared else None), sums[split:]
        kept = (grad if want else None for grad, want in zip(grads, wanted, strict=True))
        return (rounds.output, grad_gates, *[None] * 6, *kept)


def _add_weight_gradient(
    rounds: Rounds, first: int, channels: Tensor, source: Tensor, shared_out: Tensor | None, out: Tensor | None
) -> None:
    """channels^T @ source over the rows of every group in the round that starts at tile `first`."""
    shape, plan = rounds.shape, rounds.plan
    height = min(128, power_of_two(shape.width, 16))
    parts = triton.cdiv(shape.width, height) * shape.experts * shape.blocks
    weight_grad_kernel[lambda meta: (parts, triton.cdiv(shape.dim, meta["BLOCK_D"]))](
        channels,
        source,
        shared_out,
        out,
        plan.rows,
        plan.tile_count,
        plan.group_tiles,
        first,
        rounds.tiles,
        B=shape.blocks,
        D=shape.dim,
        M=shape.width,
        TILE_ROWS=shape.tile_rows,
        BLOCK_H=height,
        HAS_SHARED=shared_out is not None,
        PRECISION=shape.precision,
    )


def _add_bias_gradient(
    rounds: Rounds, first: int, partial: Tensor, shared_out: Tensor | None, out: Tensor | None
) -> None:
    """The tiles' partial sums of every group in the round that starts at tile `first`."""
    shape = rounds.shape
    sizes = dict(B=shape.blocks, M=shape.width, MP=power_of_two(shape.width), HAS_SHARED=shared_out is not None)
    bias_grad_kernel[(shape.experts * shape.blocks,)](
        partial, shared_out, out, rounds.plan.group_tiles, first, rounds.tiles, **sizes, num_warps=4
    )


def _gate_gradient(
    shape: LaunchShape,
    partial: Tensor,
    grad_y: Tensor,
    gates: Tensor,
    blocks: Tensor,
    shared_value_bias: Tensor | None,
    value_bias: Tensor | None,
    has_shared: bool,
) -> Tensor:
    """(N, E) float32 from `partial` (N, E * B), of which only what a token executed is defined."""
    grad_gates = torch.empty_like(gates)
    gate_grad_kernel[(triton.cdiv(shape.n, 32),)](
        partial,
        grad_y,
        gates,
        blocks.view(torch.uint8),
        shared_value_bias,
        value_bias,
        grad_gates,
        shape.n,
        E=shape.experts,
        B=shape.blocks,
        PARTS=shape.parts,
        D=shape.dim,
        EP=power_of_two(shape.experts, 16),
        BLOCK_N=32,
        BLOCK_D=min(64, power_of_two(shape.dim, 16)),
        HAS_SHARED=has_shared,
        HAS_BIAS=value_bias is not None,
        PRECISION=shape.precision,
        num_warps=4,
    )
    return grad_gates
