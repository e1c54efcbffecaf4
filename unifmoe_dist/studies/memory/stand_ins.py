"""Layers of experts on fake tensors: their own code, less the few places that depend on values.

How many rows an expert computes is known only from the tokens. So the rows of the CPU's kernels and those that travel
between ranks are given, spread evenly over experts and ranks; a GPU's kernels (`gpu_path.py`) need no such number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from unifmoe_dist.dispatch import Arrivals, alltoall
from unifmoe_dist.dispatch.bits import pack_bits, unpack_bits
from unifmoe_dist.dispatch.exchange import AsyncExchange
from unifmoe_dist.expert_layer import ExpertLayer
from unifmoe_dist.experts import ExpertWeights
from unifmoe_dist.kernels import HiddenDropout, grouped, grouped_block_ffn, grouped_products, select
from unifmoe_dist.layer import UniFMoELayer
from unifmoe_dist.studies.memory.gpu_path import gpu_operators
from unifmoe_dist.upcycling import moe_layers


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


@contextmanager
def standing_in(model: nn.Module, load: Load | None, gpu: bool, ranks: int) -> Iterator[None]:
    """Have a model's layers of experts take the memory of real ones, whatever the values; they compute nothing.

    Args:
        model: The model, whose layers hold the experts of one rank. It is left with hooks and other dispatchers.
        load: What routing is taken to decide; None takes each layer's load at the start.
        gpu: Whether the kernels of a GPU run (Triton, for widths that it takes), or those of the CPU.
        ranks: Ranks that share one set of experts.
    """
    rows: dict[Tensor, float] = {}  # that a bank computes for each that reaches it, by the bank's values
    for layer in moe_layers(model).values():
        assumed = load or Load.at_start(layer)
        blocks = layer.experts.num_blocks - assumed.shared_blocks  # layers of complete experts have one
        rows[layer.experts.values] = assumed.experts * blocks
        if isinstance(layer, UniFMoELayer):
            rows[layer.shared.values] = assumed.shared_blocks
        if ranks > 1:
            layer.dispatcher = _EvenDispatcher(ranks, assumed.experts)
            rows[layer.experts.values] /= layer.dispatcher.crossings(layer.config.num_experts)
        # Sentences are as long as can be: no token is masked, so none has to move.
        layer.register_forward_pre_hook(lambda _, given, words: (given[:1], {}), with_kwargs=True)

    def ffn(
        x: Tensor, gates: Tensor, blocks: Tensor, weights: ExpertWeights, dropout: HiddenDropout | None = None
    ) -> Tensor:
        count = round(len(x) * rows[weights.values])
        with patch.object(grouped, "_rows", lambda active, blocks: _even_rows(count, active, blocks)):
            return grouped_block_ffn(x, gates, blocks, weights, dropout)

    done = SimpleNamespace(wait=lambda: None)
    with (
        patch.object(select, "grouped_block_ffn", ffn),
        patch.object(grouped_products, "_grouped_mm", _grouped_mm),
        patch.object(alltoall, "dist", SimpleNamespace(all_to_all_single=lambda *_, **__: done)),
        gpu_operators() if gpu else nullcontext(),
    ):
        yield


def _even_rows(count: int, active: Tensor, blocks: Tensor) -> tuple[list[int], Tensor, Tensor]:
    """`grouped._rows` of `count` rows in groups of equal size."""
    groups = active.shape[1] * blocks.shape[1]
    sizes = [count * (g + 1) // groups - count * g // groups for g in range(groups)]
    owner, tokens = torch.zeros((2, count), dtype=torch.int64)  # in one storage, as there
    owner.copy_(torch.arange(groups).repeat_interleave(torch.tensor(sizes), output_size=count))
    return sizes, owner, tokens


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """torch's, which takes no fake tensors in float32."""
    return a.new_empty((len(a), b.shape[2]) if b.ndim == 3 else (len(offs), len(a), b.shape[1]))


@dataclass(frozen=True)
class _EvenDispatcher:
    """`AllToAllDispatcher` between ranks with as many tokens each, whose experts are chosen alike."""

    ranks: int
    experts: float  # k
    local = False

    def crossings(self, num_experts: int) -> float:
        """Rows that reach a rank, over the tokens of a rank: k of K experts miss its own with falling chances."""
        missed = 1.0
        for i in range(num_experts // self.ranks):
            missed *= max(0.0, (num_experts - self.experts - i) / (num_experts - i))
        return self.ranks * (1 - missed)

    def dispatch(self, x: Tensor, gates: Tensor, blocks: Tensor, trained: bool = True) -> _EvenExchange:
        return _EvenExchange(self, x, gates, blocks)


class _EvenExchange(alltoall._AllToAllExchange):
    def __init__(self, dispatcher: _EvenDispatcher, x: Tensor, gates: Tensor, blocks: Tensor) -> None:
        ranks = dispatcher.ranks
        self.num_tokens, self.num_blocks, self.num_local = len(x), blocks.shape[1], gates.shape[1] // ranks
        rows, chosen = round(len(x) * dispatcher.crossings(gates.shape[1])), round(len(x) * dispatcher.experts)
        row_counts, gate_counts = (
            [n * (r + 1) // ranks - n * r // ranks for r in range(ranks)] for n in (rows, chosen)
        )
        self.token = x.new_zeros((rows,), dtype=torch.int64)
        nowhere: Any = None
        self.home, self.home_needs = alltoall._AllToAll(nowhere, [row_counts], [row_counts]), True
        counts = [row_counts, gate_counts, row_counts]
        bits = pack_bits(blocks.new_empty((rows, self.num_blocks + self.num_local)))
        sent = x[self.token], gates.new_empty((chosen,)) + gates.sum(), bits
        self.sent = AsyncExchange(alltoall._AllToAll(nowhere, counts, counts), True).start(*sent)

    def arrivals(self) -> Arrivals:
        x, gates, bits = self.sent.wait()
        blocks = unpack_bits(bits, self.num_blocks + self.num_local)[:, : self.num_blocks]
        return Arrivals(x, gates.new_empty((len(x), self.num_local)) + gates.sum(), blocks)
