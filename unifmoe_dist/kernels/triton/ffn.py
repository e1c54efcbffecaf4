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

from dataclasses import dataclass
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
from unifmoe_dist.kernels.triton.ffn_backward import backward_kernel
from unifmoe_dist.kernels.triton.ffn_forward import forward_kernel
from unifmoe_dist.kernels.triton.ffn_reductions import (
    bias_grad_kernel,
    combine_kernel,
    finish_kernel,
    gate_grad_kernel,
    weight_grad_kernel,
)
from unifmoe_dist.kernels.triton.math import DTYPES, power_of_two, precision
from unifmoe_dist.kernels.triton.plan import GroupOffsets, Plan, count_groups, make_plan


@dataclass(frozen=True)
class TritonOptions:
    """How the Triton path computes; the results differ by float rounding only.

    Args:
        atomic: Add rows with float32 atomics: less memory, no fixed order of summation.
        workspace_bytes: Bytes for rows waiting to be summed, in each pass; None for the default.
        tile_rows: Rows of a tile, a power of two from 16 to 128; None chooses by the number of tokens.
        backward_tile_rows: The same for the backward pass, which needs twice the registers.
    """

    atomic: bool = False
    workspace_bytes: int | None = None
    tile_rows: int | None = None
    backward_tile_rows: int | None = None


def unsupported(x: Tensor, weights: ExpertWeights) -> str | None:
    """Why the kernels cannot compute `weights` for x (N, D); None if they can."""
    experts, hidden, dim = weights.keys.shape
    width = hidden // weights.num_blocks
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


class _Shape:
    """Sizes that the launches of one call share."""

    def __init__(self, x: Tensor, gates: Tensor, keys: Tensor, num_blocks: int, options: TritonOptions) -> None:
        self.n, self.dim = x.shape
        self.experts = gates.shape[1]
        width = keys.shape[1] // num_blocks
        self.parts = tile_sizes.parts(width, x.element_size())
        self.blocks, self.width = num_blocks * self.parts, width // self.parts
        # Three equal tiles where that wastes fewer channels than one power of two.
        third = power_of_two(triton.cdiv(self.width, 3), 16)
        self.sub, self.num_sub = power_of_two(self.width, 16), 1
        if 3 * third < self.sub:
            self.sub, self.num_sub = third, 3
        self.tile_rows = options.tile_rows or self._tile_rows(x)
        self.row_bytes = self.dim * x.element_size()
        default = tile_sizes.workspace_bytes(self.n, self.row_bytes)
        self.limit = default if options.workspace_bytes is None else options.workspace_bytes
        self.precision = precision(x.dtype)

    def _tile_rows(self, x: Tensor) -> int:
        largest = 128 if x.element_size() == 2 else 64
        if x.is_cuda:
            properties = torch.cuda.get_device_properties(x.device)
            if getattr(properties, "shared_memory_per_block_optin", 2**20) < 128 * 1024:
                largest = 64  # consumer cards
        return tile_sizes.tile_rows(self.n, self.experts, largest)

    def round_tiles(self, plan: Plan, row_bytes: int) -> int:
        """Tiles computed in a round."""
        affordable = self.limit // (row_bytes * self.tile_rows)
        sizes = self.n, self.blocks, self.experts, self.tile_rows
        return tile_sizes.round_tiles(*sizes, plan.max_tiles, affordable)

    def tile_arguments(self) -> dict[str, Any]:
        return dict(
            E=self.experts,
            B=self.blocks,
            D=self.dim,
            M=self.width,
            SUB=self.sub,
            NUM_SUB=self.num_sub,
            TILE_ROWS=self.tile_rows,
            PRECISION=self.precision,
        )


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
        shape = _Shape(x, gates, keys, num_blocks, options)
        offsets = offsets or count_groups(gates, blocks, has_shared)
        ctx.save_for_backward(x, gates, blocks, offsets.earlier, offsets.totals, *tensors)
        plan = make_plan(gates, blocks, offsets, shape.tile_rows, has_shared, shape.parts)
        rounds = _Rounds(x, plan, shape, shape.row_bytes, options.atomic, one_round=options.atomic)
        for first in rounds:
            forward_kernel[(rounds.tiles,)](
                x,
                gates,
                shared_keys,
                keys,
                shared_key_bias,
                key_bias,
                shared_values,
                values,
                rounds.rows,
                plan.rows,
                plan.tile_group,
                plan.tile_count,
                plan.num_tiles,
                first,
                ACTIVATION=activation,
                HAS_SHARED=has_shared,
                HAS_BIAS=has_bias,
                ATOMIC=options.atomic,
                **shape.tile_arguments(),
                **dropout_arguments(dropout),
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
        shape = _Shape(x, gates, keys, ctx.num_blocks, options)
        shape.tile_rows = options.backward_tile_rows or tile_sizes.backward_tile_rows(shape.tile_rows, x.element_size())
        offsets = GroupOffsets(earlier, totals)
        plan = make_plan(gates, blocks, offsets, shape.tile_rows, has_shared, shape.parts)
        row_bytes = (0 if options.atomic else shape.row_bytes) + 2 * shape.width * x.element_size()
        rounds = _Rounds(x, plan, shape, row_bytes, options.atomic)
        hidden, grad_pre = (x.new_empty((rounds.tiles * shape.tile_rows, shape.width)) for _ in range(2))
        grad_gate = torch.empty((shape.n, shape.experts * shape.blocks), dtype=torch.float32, device=x.device)
        grad_bias = torch.empty((rounds.tiles, shape.width), dtype=torch.float32, device=x.device)
        wanted = ctx.needs_input_grad[-len(tensors) :]
        grads = [torch.empty_like(t) if t is not None else None for t in tensors]
        common = dict(B=shape.blocks, M=shape.width, HAS_SHARED=has_shared)
        for first in rounds:
            backward_kernel[(rounds.tiles,)](
                x,
                grad_y,
                gates,
                shared_keys,
                keys,
                shared_key_bias,
                key_bias,
                shared_values,
                values,
                rounds.rows,
                hidden,
                grad_pre,
                grad_gate,
                grad_bias,
                plan.rows,
                plan.tile_group,
                plan.tile_count,
                plan.num_tiles,
                first,
                ACTIVATION=ctx.activation,
                HAS_SHARED=has_shared,
                HAS_BIAS=has_bias,
                ATOMIC=options.atomic,
                **shape.tile_arguments(),
                **dropout_arguments(ctx.dropout),
            )
            for channels, source, index in ((hidden, grad_y, 1), (grad_pre, x, 0)):
                if not (wanted[index] or wanted[index + 4]):
                    continue
                height = min(128, power_of_two(shape.width, 16))
                parts = triton.cdiv(shape.width, height) * shape.experts * shape.blocks
                weight_grad_kernel[lambda meta, parts=parts: (parts, triton.cdiv(shape.dim, meta["BLOCK_D"]))](
                    channels,
                    source,
                    grads[index],
                    grads[index + 4],
                    plan.rows,
                    plan.tile_count,
                    plan.group_tiles,
                    first,
                    rounds.tiles,
                    D=shape.dim,
                    TILE_ROWS=shape.tile_rows,
                    BLOCK_H=height,
                    PRECISION=shape.precision,
                    **common,
                )
            if has_bias:
                bias_grad_kernel[(shape.experts * shape.blocks,)](
                    grad_bias,
                    grads[2],
                    grads[6],
                    plan.group_tiles,
                    first,
                    rounds.tiles,
                    MP=power_of_two(shape.width),
                    **common,
                    num_warps=4,
                )
            rounds.combine(first, gates, None, None)
        grad_gates = torch.empty_like(gates)
        gate_grad_kernel[(triton.cdiv(shape.n, 32),)](
            grad_gate,
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
        if value_bias is not None:
            sums = gates.to(x.dtype).T @ grad_y
            split = 1 if has_shared else 0
            grads[3], grads[7] = (sums[:split] if has_shared else None), sums[split:]
        kept = (grad if want else None for grad, want in zip(grads, wanted, strict=True))
        return (rounds.output, grad_gates, *[None] * 6, *kept)


class _Rounds:
    """Rounds of tiles through a workspace, and the sum of its rows over each token.

    Args:
        like: (N, D), gives the type and device of the output.
        plan: The plan.
        shape: Sizes.
        row_bytes: Workspace bytes per row.
        atomic: Rows are added to the float32 sum by the tile kernels.
        one_round: Nothing but that sum limits the number of tiles.
    """

    def __init__(
        self, like: Tensor, plan: Plan, shape: _Shape, row_bytes: int, atomic: bool, one_round: bool = False
    ) -> None:
        self.plan, self.shape, self.atomic = plan, shape, atomic
        self.tiles = plan.max_tiles if one_round else shape.round_tiles(plan, row_bytes)
        self.output = torch.empty_like(like)
        several = self.tiles < plan.max_tiles
        if atomic:
            self.rows = self.total = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
        else:
            self.rows = like.new_empty((self.tiles * shape.tile_rows, shape.dim))
            # With a single round nothing is carried over.
            size = like.shape if several else (1,)
            self.total = torch.empty(size, dtype=torch.float32, device=like.device)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(range(0, self.plan.max_tiles, self.tiles))

    def combine(self, first: int, gates: Tensor, shared_value_bias: Tensor | None, value_bias: Tensor | None) -> None:
        """Sum the rows of the round that starts at tile `first`, and on the first, the value biases."""
        shape, plan = self.shape, self.plan
        sizes = dict(
            E=shape.experts,
            D=shape.dim,
            HAS_SHARED=shared_value_bias is not None,
            HAS_BIAS=value_bias is not None,
            BLOCK_D=min(512, power_of_two(shape.dim)),
            num_warps=4,
        )
        grid = (shape.n, triton.cdiv(shape.dim, sizes["BLOCK_D"]))
        if not self.atomic:
            combine_kernel[grid](
                self.rows,
                gates,
                shared_value_bias,
                value_bias,
                self.total,
                self.output,
                plan.token_slots,
                plan.token_count,
                plan.num_tiles,
                first,
                self.tiles,
                G=shape.experts * shape.blocks,
                TILE_ROWS=shape.tile_rows,
                **sizes,
            )
        elif first + self.tiles >= plan.max_tiles:
            finish_kernel[grid](self.total, gates, shared_value_bias, value_bias, self.output, **sizes)
