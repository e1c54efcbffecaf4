"""Stand-ins for layers of experts that take the memory of the real ones and compute nothing.

How many rows an expert computes is known only from the tokens, so on fake tensors a real layer cannot run. A stand-in
routes with the layer's own router where that has fixed shapes, and then makes, keeps and drops the tensors that the
kernels make, keep and drop: `kernels/grouped.py` on the CPU, `kernels/triton/ffn.py` on a GPU, `dispatch/alltoall.py`
between ranks. Tests compare each with the real one.

Shapes carry suffixes: N tokens, D model width, K experts, B blocks of M channels, R rows (one block of one token).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unifmoe_dist.dispatch import limit_load
from unifmoe_dist.expert_layer import ExpertLayer
from unifmoe_dist.experts import ExpertWeights
from unifmoe_dist.kernels import grouped, tile_sizes
from unifmoe_dist.layer import UniFMoELayer
from unifmoe_dist.methods.gated import GatedExpertLayer
from unifmoe_dist.routing_policies import RouterPolicies


@dataclass(frozen=True)
class Load:
    """What routing is taken to decide, means over tokens."""

    shared_blocks: float  # b, blocks that the shared expert computes; 0 in layers without one
    experts: float  # k, residual experts per token

    @staticmethod
    def at_start(layer: ExpertLayer) -> Load:
        """The load of a router as it starts, with affinities nearly alike: b = B / 2 and k = K / 2.

        Of layers that route to a fixed number, that number; of those whose number varies, every expert, the most.
        """
        config = layer.config
        if isinstance(layer, UniFMoELayer):
            alpha = layer.config.shared_demand or 0.5
            return Load(layer.config.num_blocks * alpha, layer.config.fixed_experts or config.num_experts * (1 - alpha))
        return Load(0.0, float(getattr(config, "top_k", config.num_experts)))


class ExpertsStandIn(nn.Module):
    """In the place of a layer of experts, whose weights it uses.

    Args:
        layer: The layer, with the experts that this rank holds.
        load: What routing is taken to decide.
        gpu: Whether the kernels of a GPU run (Triton, for widths that it takes), or those of the CPU.
        ranks: Ranks that share one set of experts.
    """

    def __init__(self, layer: ExpertLayer, load: Load, gpu: bool, ranks: int) -> None:
        super().__init__()
        keys, num_blocks = layer.experts.keys, layer.experts.num_blocks
        fused = keys.shape[2] % 16 == 0 and (keys.shape[1] // num_blocks) % 16 == 0  # triton.ffn.unsupported
        self.layer, self.load, self.gpu, self.ranks = layer, load, gpu and fused, ranks

    def forward(self, x: Tensor, token_mask: Tensor | None = None) -> Tensor:
        tokens, layer = x.reshape(-1, x.shape[-1]), self.layer
        if isinstance(layer, UniFMoELayer):
            return self._unif(layer, tokens).view(x.shape)
        assert isinstance(layer, GatedExpertLayer)
        gates, rows = layer.route(tokens).gates, len(tokens) * self.load.experts
        blocks = torch.ones((len(tokens), 1), dtype=torch.bool, device=x.device)
        if self.ranks == 1:
            return self._experts(tokens, gates, blocks, layer.experts.weights(), rows).view(x.shape)
        exchange = _Exchange(tokens, gates, self.load.experts, self.ranks)
        return exchange.home(self._residual(exchange, blocks, rows)).view(x.shape)

    def _unif(self, layer: UniFMoELayer, tokens: Tensor) -> Tensor:
        config, shared, residual, b = layer.config, layer.shared, layer.experts, self.load.shared_blocks
        shared_rows, rows = len(tokens) * b, len(tokens) * self.load.experts * (config.num_blocks - b)
        coefficients = None
        if self.gpu and layer.router.policies == RouterPolicies():  # ablations route in plain torch
            coefficients, blocks = _FusedRoute.apply(tokens, layer.router.weight, config.num_blocks)
        else:
            routing = limit_load(layer.route(tokens), config.capacity_factor)
            alpha, gates, blocks = routing.shared_demand[:, None], routing.gates, routing.shared_blocks
            if self.gpu:
                coefficients = torch.cat([alpha, gates], dim=1)
        if coefficients is not None:
            alpha, gates = coefficients[:, :1], coefficients[:, 1:]
        if self.ranks > 1:
            exchange = _Exchange(tokens, gates, self.load.experts, self.ranks)
            output = self._experts(tokens, alpha, blocks, shared.weights(), shared_rows)
            return output + exchange.home(self._residual(exchange, ~blocks, rows))
        if coefficients is not None:
            return _fused(tokens, coefficients, blocks, residual.weights(), shared.weights())
        output = self._experts(tokens, alpha, blocks, shared.weights(), shared_rows)
        return output + self._experts(tokens, gates, ~blocks, residual.weights(), rows)

    def _residual(self, exchange: _Exchange, blocks: Tensor, rows: float) -> Tensor:
        arrived, gates = exchange.arrivals()
        mask = blocks.new_empty((len(arrived), blocks.shape[1]))
        # All ranks' tokens together are as many as there are ranks times this rank's, spread evenly.
        return self._experts(arrived, gates, mask, self.layer.experts.weights(), rows)

    def _experts(self, x: Tensor, gates: Tensor, blocks: Tensor, weights: ExpertWeights, rows: float) -> Tensor:
        if self.gpu:
            return _fused(x, gates, blocks, weights, None)
        dropout = self.layer.training and self.layer.config.hidden_dropout > 0
        sizes = weights.num_blocks, round(rows), torch.is_grad_enabled(), dropout
        return _Grouped.apply(x, gates, blocks, *sizes, *_tensors(weights))


def _tensors(bank: ExpertWeights) -> tuple[Tensor | None, ...]:
    return bank.keys, bank.values, bank.key_bias, bank.value_bias


# -- the CPU's kernels ------------------------------------------------------------------------------------------------


class _Grouped(torch.autograd.Function):
    """`grouped._GroupedBlockFFN`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gates: Tensor,
        blocks: Tensor,
        num_blocks: int,
        rows: int,
        recording: bool,
        dropout: bool,
        keys: Tensor,
        *others: Tensor | None,
    ) -> Tensor:
        width, wide = keys.shape[1] // num_blocks, grouped._accumulator(x.dtype)
        lists = [x.new_empty((count,), dtype=torch.int64) for count in (2 * rows, rows, rows)]
        ctx.lists, ctx.chunks = lists, _chunk_sizes(rows, keys.shape[0] * num_blocks)
        kept = recording and rows * width <= grouped.KEPT_FFNS * x.shape[0] * keys.shape[1]
        channels = []
        y = x.new_empty(x.shape, dtype=wide)
        for count in ctx.chunks:
            gathered = x.new_empty((count, x.shape[1]))
            pre = x.new_empty((count, width))
            del gathered
            hidden = pre * torch.empty_like(pre)
            kept_channels = torch.empty_like(pre) if dropout else None
            out = x.new_empty((count, x.shape[1]))
            added = out.to(wide)
            del hidden, kept_channels, out, added
            if kept:
                channels.append(pre)
        ctx.width, ctx.dropout = width, dropout
        ctx.save_for_backward(x, gates, keys, *others, *channels)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gates, keys, values, key_bias, value_bias, *channels = ctx.saved_tensors
        wide = grouped._accumulator(x.dtype)
        grad_x = x.new_empty(x.shape, dtype=wide)
        grad_gates = gates.new_empty(gates.shape, dtype=wide)
        weights = [None if t is None else torch.empty_like(t) for t in (keys, values, key_bias, value_bias)]
        for count in ctx.chunks:
            rows = [x.new_empty((count, x.shape[1])) for _ in range(2)]
            # Gradients after and before the activation, the hidden channels, and those before where they were not kept.
            # With dropout also what is kept of them.
            number = (3 if channels else 4) + ctx.dropout
            channel = [x.new_empty((count, ctx.width)) for _ in range(number)]
            # The gates' gradient multiplies two of them in the wide type.
            inner = [x.new_empty((count, ctx.width), dtype=wide) for _ in range(1 if wide == x.dtype else 3)]
            del inner
            share = x.new_empty((math.ceil(keys.numel() / len(ctx.chunks)),))  # a chunk's part of a weight's gradient
            del share
            out = x.new_empty((count, x.shape[1]))
            added = out.to(wide)
            del rows, channel, out, added
        return (grad_x.to(x.dtype), grad_gates.to(gates.dtype), *[None] * 5, *weights)


def _chunk_sizes(rows: int, groups: int) -> list[int]:
    """Rows of the chunks in which groups of equal size are computed."""
    size = max(grouped.CHUNK_ROWS, math.ceil(rows / groups))
    return [min(size, rows - first) for first in range(0, rows, size)]


# -- a GPU's kernels --------------------------------------------------------------------------------------------------


class _FusedRoute(torch.autograd.Function):
    """`triton.routing._TritonRoute`: coefficients (N, K + 1) float32 and shared blocks (N, B)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
        columns = weight.new_empty((len(weight) + num_blocks, x.shape[1]), dtype=torch.float32)
        coefficients = x.new_empty((len(x), len(weight)), dtype=torch.float32)
        affinity = x.new_empty((len(x), len(weight) - 1), dtype=torch.float32)
        blocks = x.new_empty((len(x), num_blocks), dtype=torch.bool)
        ctx.save_for_backward(x, columns, coefficients, affinity)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(blocks)
        return coefficients, blocks

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, _, coefficients, _ = ctx.saved_tensors
        torch.empty_like(coefficients)
        weight = x.new_empty((coefficients.shape[1], x.shape[1]), dtype=ctx.weight_dtype)
        return torch.empty_like(x), weight, None


@dataclass(frozen=True)
class FusedSizes:
    """Elements of the buffers of one pass of `triton.ffn`; see `make_plan` and `Rounds` there."""

    plan: int  # int32 numbers of the plan of rows
    rows: int  # of the workspace
    tiles: int  # of a round
    width: int  # channels of a tile
    groups: int  # (expert, block) groups
    several: bool  # whether more than one round may be needed

    @staticmethod
    def of(
        tokens: int, dim: int, width: int, num_blocks: int, experts: int, shared: bool, item: int, backward: bool
    ) -> FusedSizes:
        """For N tokens of `dim` numbers of `item` bytes, and blocks of `width` channels; on a consumer card."""
        parts = tile_sizes.parts(width, item)
        blocks, width = num_blocks * parts, width // parts
        tile = tile_sizes.tile_rows(tokens, experts, largest=64)  # what consumer cards have shared memory for
        tile = tile_sizes.backward_tile_rows(tile, item) if backward else tile
        groups, most = experts * blocks, tile_sizes.max_tiles(tokens, blocks, experts, tile, shared)
        row = (dim + (2 * width if backward else 0)) * item
        affordable = tile_sizes.workspace_bytes(tokens, dim * item) // (row * tile)
        tiles = tile_sizes.round_tiles(tokens, blocks, experts, tile, most, affordable)
        plan = most * (tile + 2) + groups + 2 + tokens * (groups + 1)
        return FusedSizes(plan, tiles * tile, tiles, width, groups, tiles < most)


def _fused(x: Tensor, gates: Tensor, blocks: Tensor, weights: ExpertWeights, shared: ExpertWeights | None) -> Tensor:
    tensors = (() if shared is None else _tensors(shared)) + _tensors(weights)
    width = weights.keys.shape[1] // weights.num_blocks
    return _Fused.apply(x.contiguous(), gates.float().contiguous(), blocks, shared is not None, width, *tensors)


class _Fused(torch.autograd.Function):
    """`triton.ffn._TritonBlockFFN`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gates: Tensor, blocks: Tensor, shared: bool, width: int, *weights: Tensor | None
    ) -> Tensor:
        sizes = _sizes(x, gates, blocks, shared, width, backward=False)
        spans = math.ceil(len(x) / 128)
        earlier, totals = (x.new_empty((n, gates.shape[1], blocks.shape[1]), dtype=torch.int32) for n in (spans, 1))
        ctx.save_for_backward(x, gates, blocks, earlier, totals, *weights)
        ctx.shared, ctx.width = shared, width
        plan = x.new_empty((sizes.plan,), dtype=torch.int32)
        output, total = torch.empty_like(x), x.new_empty(x.shape if sizes.several else (1,), dtype=torch.float32)
        rows = x.new_empty((sizes.rows, x.shape[1]))
        del plan, rows, total
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gates, blocks, _, _, *weights = ctx.saved_tensors
        sizes = _sizes(x, gates, blocks, ctx.shared, ctx.width, backward=True)
        plan = x.new_empty((sizes.plan,), dtype=torch.int32)
        output, total = torch.empty_like(x), x.new_empty(x.shape if sizes.several else (1,), dtype=torch.float32)
        rows = x.new_empty((sizes.rows, x.shape[1] + 2 * sizes.width))
        sums = x.new_empty((len(x) * sizes.groups + sizes.tiles * sizes.width,), dtype=torch.float32)
        grads = [None if t is None else torch.empty_like(t) for t in weights]
        grad_gates = torch.empty_like(gates)
        del plan, rows, sums, total
        return output, grad_gates, None, None, None, *grads


def _sizes(x: Tensor, gates: Tensor, blocks: Tensor, shared: bool, width: int, backward: bool) -> FusedSizes:
    return FusedSizes.of(len(x), x.shape[1], width, blocks.shape[1], gates.shape[1], shared, x.element_size(), backward)


# -- between ranks ----------------------------------------------------------------------------------------------------


class _Exchange:
    """`alltoall._AllToAllExchange` between ranks with as many tokens each, whose experts are chosen alike."""

    def __init__(self, x: Tensor, gates: Tensor, experts: float, ranks: int) -> None:
        self.tokens, self.local = len(x), gates.shape[1] // ranks
        rows = round(len(x) * ranks * _probability(gates.shape[1], self.local, experts))
        self.token = x.new_empty((rows,), dtype=torch.int64)
        self.x = x.index_select(0, self.token)
        self.gates = gates.new_empty((round(len(x) * experts),)) + gates.sum()
        self.sent, self.buffer = (x.new_empty((rows, x.shape[1])) for _ in range(2))

    def arrivals(self) -> tuple[Tensor, Tensor]:
        """Rows (R, D) and gates (R, K / ranks) that came."""
        rows, gates = _Land.apply(self.x, self.gates, self.local)
        del self.x, self.gates, self.sent, self.buffer
        return rows, gates

    def home(self, rows: Tensor) -> Tensor:
        """(N, D), summed over the rows that came back."""
        (back,) = _Back.apply(rows)
        total = back.new_zeros((self.tokens, back.shape[1]), dtype=torch.promote_types(back.dtype, torch.float32))
        return total.index_add(0, self.token, back.to(total.dtype)).to(back.dtype)


def _probability(experts: int, local: int, chosen: float) -> float:
    """That one of `chosen` experts out of K is among the `local` ones of a rank."""
    missed = 1.0
    for i in range(local):
        missed *= max(0.0, (experts - chosen - i) / (experts - i))
    return 1 - missed


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, local: int) -> tuple[Tensor, Tensor]:
        ctx.gates = gates.shape[0]
        return torch.empty_like(x), gates.new_empty((len(x), local))

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad_gates: Tensor) -> tuple[Tensor | None, ...]:
        packed = torch.empty_like(grad_x)
        received = torch.empty_like(grad_x)
        del packed
        return received, grad_gates.new_empty((ctx.gates,)), None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> tuple[Tensor]:
        return (torch.empty_like(rows),)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty_like(grad)
