"""Block-sparse experts in Triton: only the selected blocks, forward and backward, without a host stall.

Work and memory, per row (one block of one token), M channels in a block, compute type of 2 bytes:
- up- and down-projection are one kernel, so the hidden activations never leave the chip. Two kernels would move 4 M
  more bytes per row; the fused tile also reads less from the L2 cache per product. Blocks wider than 256 channels are
  cut into parts that fit in registers; widths that are no multiple of 16 are masked.
- a row's output (D values) is stored and a second kernel adds the rows of each token in ascending order: 4 D bytes
  per row for 4 M D operations, hidden behind the products on the way out. Sums are float32 and have one order, so
  results repeat bit for bit with the same tiles.
- the number of rows is known only on the device and may reach N (1 + K (B - 1)). Rather than a buffer for the worst
  case, the workspace holds `workspace_bytes` (by default rows for 2 B blocks a token, at most 384 MiB or 24 times
  the tokens' own bytes, whichever is more; a top-2 layer with H = 4 D keeps 18 times its tokens). Tiles beyond it
  are computed by one launch more, `overflow`, whatever their number is; without any it ends at once.
- saved for the backward pass: x, gates, block masks, group offsets, and the channels before the activation of the
  first tiles, as many as fit in what a dense FFN would keep (`kept_bytes`): the worst case needs many times that.
  It makes the plan again, one launch, and for the other tiles these channels, 2 of 10 M D operations per row.

Launches of a whole layer on one rank, whatever K: 8 forward, of which the first four route and plan and one adds to
the running statistics, and 12 backward with biases. Half precision casts two small tensors more in the backward pass,
and autocast casts the weights once a step (`kept`), to which gradients come in their own type. `test_launches` counts
them.

Weight gradients belong to one program per tile of a group, which walks the group's rows in order and adds in float32.

Gated experts read a row by two banks of keys in one loop over the model width, which loads it once, and spread their
two gradients in one. That takes twice the registers, so fewer channels are held (`tile_sizes.WIDEST`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from unifmoe_dist.eager import not_compiled
from unifmoe_dist.experts import ExpertWeights
from unifmoe_dist.kernels import tile_sizes
from unifmoe_dist.kernels.dropout import HiddenDropout
from unifmoe_dist.kernels.scratch import lent
from unifmoe_dist.kernels.triton.dropout import dropout_arguments
from unifmoe_dist.kernels.triton.ffn_kernel import NOTHING_STORED, ffn_kernel
from unifmoe_dist.kernels.triton.ffn_reductions import gate_grad_kernel
from unifmoe_dist.kernels.triton.math import DTYPES, power_of_two
from unifmoe_dist.kernels.triton.overflow import launch_overflow
from unifmoe_dist.kernels.triton.plan import GroupOffsets, Plan, count_groups, make_plan
from unifmoe_dist.kernels.triton.weight_gradients import WeightGradients
from unifmoe_dist.kernels.triton.workspace import LaunchShape, TritonOptions, Workspace, part_channels

_TENSORS = ("keys", "values", "key_bias", "value_bias", "gate_keys", "gate_key_bias")
_WEIGHT_NAMES = (
    *("shared_keys", "keys", "shared_key_bias", "key_bias"),
    *("shared_linear_keys", "linear_keys", "shared_linear_bias", "linear_bias"),
)


def unsupported(x: Tensor, weights: ExpertWeights) -> str | None:
    """Why the kernels cannot compute `weights` for x (N, D); None if they can."""
    experts, hidden, _ = weights.keys.shape
    width, gated = hidden // weights.num_blocks, weights.gate_keys is not None
    if x.dtype not in DTYPES:
        return f"they compute float32, bfloat16 and float16, not {x.dtype}"
    cuts, _ = tile_sizes.parts(width, x.element_size(), gated, part_channels(x.device, gated))
    if x.shape[0] * (experts + 1) * weights.num_blocks * cuts >= 2**30:
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
    # Triton launches on the current device, which need not be x's; autograd sees to it in backward passes.
    with torch.autocast(device_type, enabled=False), torch.cuda.device_of(x_ND):
        tensors: list[Tensor | None] = []
        used: list[Tensor | None] = []
        for bank in (shared, weights):
            tensors += map(({} if bank is None else bank.tensors()).get, _TENSORS)
            with torch.no_grad():  # gradients go to the tensors themselves, in their own type
                given = {} if bank is None else bank.in_type(dtype)
                used += [None if t is None else t.contiguous() for t in map(given.get, _TENSORS)]
        output = _TritonBlockFFN.apply(
            x_ND.to(dtype).contiguous(),
            gates_NE.float().contiguous(),
            blocks_NB.contiguous(),
            weights.num_blocks,
            weights.activation,
            options or TritonOptions(),
            offsets,
            dropout,
            torch.is_grad_enabled(),
            used,
            *tensors,
        )
        return output.to(x_ND.dtype)


class Banks:
    """What there is for each of `_TENSORS`, of the shared expert and of the others, in pairs; Nones where it lacks.

    Attributes:
        pairs: By name.
        projections: Names of weights and biases that read tokens, those under the activation first.
    """

    def __init__(self, of_both: Sequence[Any]) -> None:
        half = len(_TENSORS)
        self.pairs = dict(zip(_TENSORS, zip(of_both[:half], of_both[half:], strict=True), strict=True))
        self.keys, self.gated = self.pairs["keys"][1], self.pairs["gate_keys"][1] is not None
        self.has_shared, self.has_bias = self.pairs["keys"][0] is not None, self.pairs["key_bias"][1] is not None
        gate = [("gate_keys", "gate_key_bias")] if self.gated else []
        self.projections = [*gate, ("keys", "key_bias")]

    def arguments(self) -> dict[str, Tensor | None]:
        """Weights as `ffn_kernel` calls them."""
        given = dict.fromkeys(_WEIGHT_NAMES)
        read = [tensor for names in self.projections for name in names for tensor in self.pairs[name]]
        given |= dict(zip(_WEIGHT_NAMES, read, strict=False))
        return given | dict(zip(("shared_values", "values"), self.pairs["values"], strict=True))

    def choices(self, ctx: Any) -> dict[str, Any]:
        """What both passes compile into the kernel."""
        given = dict(ACTIVATION=ctx.activation, GATED=self.gated, HAS_SHARED=self.has_shared, HAS_BIAS=self.has_bias)
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
        recorded: bool,
        used: Sequence[Tensor | None],
        *tensors: Tensor | None,
    ) -> Tensor:
        kinds = {t.dtype for t in tensors if t is not None}
        ctx.grad_dtype = kinds.pop() if len(kinds) == 1 else x.dtype  # one kernel writes those of all
        ctx.num_blocks, ctx.activation, ctx.options, ctx.dropout = num_blocks, activation, options, dropout
        if not x.shape[0]:
            ctx.save_for_backward(x, gates, blocks, None, None, None, *used)
            return torch.zeros_like(x)
        banks = Banks(used)
        shape = LaunchShape(x, gates, banks.keys, num_blocks, options, banks.gated, banks.has_shared)
        offsets = offsets or count_groups(gates, blocks, banks.has_shared)
        ctx.scratch = lent()
        space = Workspace(x, shape, shape.row_bytes, ctx.scratch)
        kept = space.kept(x, recorded and any(ctx.needs_input_grad))
        ctx.save_for_backward(x, gates, blocks, offsets.earlier, offsets.totals, kept, *used)
        plan = make_plan(gates, blocks, offsets, shape.tile_rows, banks.has_shared, shape.parts, space.counters)
        given = dict(x=x, gates=gates, kept=kept, kept_tiles=len(kept), **banks.arguments())
        choices = shape.tile_arguments() | banks.choices(ctx) | dict(BACKWARD=False)
        _launch_tiles(space, plan, given, choices)
        space.combine(plan, gates, *banks.pairs["value_bias"])
        launch_overflow(space, plan, given | dict(kept=None, kept_tiles=0), choices)  # which would spill, keeping some
        return space.output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, gates, blocks, earlier, totals, kept, *used = ctx.saved_tensors
        if not x.shape[0]:
            zeros = (None if t is None else torch.zeros_like(t) for t in used)
            return (torch.zeros_like(x), torch.zeros_like(gates), *[None] * 8, *zeros)
        options, banks = ctx.options, Banks(used)
        grad_y = grad_y.to(x.dtype).contiguous()
        shape = LaunchShape(x, gates, banks.keys, ctx.num_blocks, options, banks.gated, banks.has_shared)
        if shape.num_sub == 1 and shape.sub > 64:  # what follows the products would spill, done on all channels at once
            shape.sub, shape.num_sub = 64, shape.sub // 64
        beside = 1 + len(banks.projections)  # channels before the values, and gradients of every projection's
        space = Workspace(x, shape, shape.row_bytes + beside * shape.width * x.element_size(), ctx.scratch)
        plan = make_plan(
            gates, blocks, GroupOffsets(earlier, totals), shape.tile_rows, banks.has_shared, shape.parts, space.counters
        )
        wanted = ctx.needs_input_grad[-len(used) :]
        empty = [None if t is None else torch.empty_like(t, dtype=ctx.grad_dtype) for t in used]
        grads, wants = Banks(empty), Banks(wanted)
        sums = WeightGradients(x, grad_y, space, banks, grads, wants)
        grad_gate = torch.empty((shape.n, shape.experts * shape.blocks), dtype=torch.float32, device=x.device)
        given = dict(x=x, gates=gates, kept=kept, kept_tiles=len(kept), **banks.arguments())
        given |= dict(grad_y=grad_y, grad_gate=grad_gate, **sums.stored)
        choices = shape.tile_arguments() | banks.choices(ctx) | dict(BACKWARD=True)
        _launch_tiles(space, plan, given, choices)
        sums.launch(plan)
        space.combine(plan, gates, None, None)
        launch_overflow(space, plan, given | sums.arguments, choices | sums.counts)
        value_biases = banks.pairs["value_bias"]
        grad_gates = _gate_gradient(shape, grad_gate, grad_y, gates, blocks, *value_biases, banks.has_shared)
        if value_biases[1] is not None:
            with torch.autocast(x.device.type, enabled=False):  # a backward pass may run under someone's
                biases = gates.to(x.dtype).T @ grad_y
            split = 1 if banks.has_shared else 0
            grads.pairs["value_bias"] = (biases[:split] if banks.has_shared else None), biases[split:]
        made = [pair[bank] for bank in (0, 1) for pair in grads.pairs.values()]
        wanted_grads = (grad if want else None for grad, want in zip(made, wanted, strict=True))
        return (space.output, grad_gates, *[None] * 8, *wanted_grads)


def _launch_tiles(space: Workspace, plan: Plan, given: dict[str, Any], choices: dict[str, Any]) -> None:
    """Fill the workspace with its tiles."""
    named = dict(rows=plan.rows, tile_group=plan.tile_group, tile_count=plan.tile_count, num_tiles=plan.num_tiles)
    tail = min(space.shape.tile_rows, space.shape.options.tail_rows)
    ffn_kernel[(space.tiles,)](**NOTHING_STORED | given | named | choices | dict(out=space.rows, TAIL_ROWS=tail))


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
