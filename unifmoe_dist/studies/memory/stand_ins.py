"""Layers of experts, and a GPU's operations, on fake tensors: what they make, keep and drop; results mean nothing.

Layers run their own code, less the few places that depend on values: how many rows an expert computes is known only
from the tokens. So the rows of the CPU's kernels and those that travel between ranks are given, spread evenly over
experts and ranks.

On a GPU, routing and experts are the Triton path's own code (`kernels/triton/`), whose launches do nothing, with tiles
for the shared memory of consumer cards. Triton itself is stood for, so that none need be installed. Attention runs in
one kernel, which keeps q, k, v, the output and one float32 per query and head (FlashAttention, Dao et al. 2022, and the
memory-efficient kernel), where the CPU falls back to whole attention matrices if attention weights are dropped. Dropout
keeps one byte per element, on the CPU a number.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unifmoe_dist.dispatch import alltoall
from unifmoe_dist.expert_layer import ExpertLayer
from unifmoe_dist.experts import ExpertWeights
from unifmoe_dist.kernels import HiddenDropout, grouped, grouped_block_ffn, grouped_products, select, tile_sizes, triton
from unifmoe_dist.kernels.exchange import TorchPacking
from unifmoe_dist.layer import UniFMoELayer
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
        model: Its layers hold the experts of one rank. It is left with hooks and other dispatchers.
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
        patch.object(alltoall, "start_runs", lambda *_: done),
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

    def dispatch(self, x: Tensor, gates: Tensor, blocks: Tensor, trained: bool = True) -> alltoall.AllToAllExchange:
        ranks, gates = self.ranks, gates.float()
        rows, chosen = round(len(x) * self.crossings(gates.shape[1])), round(len(x) * self.experts)
        counts = [[n * (r + 1) // ranks - n * r // ranks for n in (rows, chosen)] for r in range(ranks)]
        packing = select.pack_tokens(x, gates, blocks, ranks, [1, 1])
        if isinstance(packing, TorchPacking):
            packing._places = _even_places  # type: ignore[method-assign]
        packing.agree([[[*of_rank, 1, 1] for of_rank in counts]] * 2)
        nowhere: Any = None
        return alltoall.AllToAllExchange(nowhere, packing, x, gates, blocks)


def _even_places(mask: Tensor, count: int) -> Tensor:
    """As many places as the counts say, whatever is active."""
    return mask.new_zeros(count, dtype=torch.int64)


# -- a GPU ------------------------------------------------------------------------------------------------------------


@contextmanager
def gpu_operators() -> Iterator[None]:
    """Have operations take the memory of a GPU's.

    Attention and dropout are replaced in torch.nn.functional: a TorchFunctionMode is suspended in the backward pass,
    where checkpoints run their forward pass again.
    """

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p > 0 else input

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
    ) -> Tensor:
        return _Attention.apply(query, key, value, attn_mask)

    passed = SimpleNamespace(**dict.fromkeys(("ffn_works", "routing_works", "exchange_works"), lambda *_: True))
    with (
        patch.multiple(F, scaled_dot_product_attention=attention, dropout=dropout),
        patch.multiple(select, _wants_triton=lambda x: True, self_test=passed),
        _imported(kernels_without_launches()),
    ):
        yield


class _Attention(torch.autograd.Function):
    """q, k, v (..., T, d) -> (..., T, d)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        # The kernels write (batch, T, heads, d) and return a transposed view, so that no copy follows.
        *batch, heads, length, _ = query.shape
        output = query.new_empty((*batch, length, heads, value.shape[-1])).transpose(-2, -3)
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, _, sums = ctx.saved_tensors
        torch.empty_like(sums)  # row sums of grad * output
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


class _NoTriton:
    """Triton, and whatever is asked of it, kernels and launches included."""

    def __init__(self, *_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getitem__(self, grid: Any) -> Any:
        return self

    def cdiv(self, a: int, b: int) -> int:
        return -(-a // b)

    def next_power_of_2(self, n: int) -> int:
        return 1 << (n - 1).bit_length()


@cache
def kernels_without_launches() -> dict[str, ModuleType]:
    """Copies of the modules of `kernels/triton/`, by name, imported where Triton is `_NoTriton`."""
    stub: Any = _NoTriton()
    package = triton.__name__
    hidden = {name: None for name in sys.modules if name.startswith(f"{package}.")}
    stubs = dict.fromkeys(("triton", "triton.language", "triton.runtime.autotuner"), stub)
    with _imported({**hidden, **stubs}), patch.dict(vars(triton)):
        for name in ("ffn", "routing", "exchange"):
            import_module(f"{package}.{name}")
        copies = {name: module for name, module in sys.modules.items() if name.startswith(f"{package}.")}
        for name in copies:
            del sys.modules[name]
    shapes = copies[f"{package}.workspace"].LaunchShape
    shapes._tile_rows = lambda shape, x: tile_sizes.tile_rows(shape.n, shape.experts, largest=64)
    return copies


@contextmanager
def _imported(modules: Mapping[str, ModuleType | None]) -> Iterator[None]:
    """Have modules found under these names by whoever imports them, or none under those of None."""
    before = {name: sys.modules.get(name) for name in modules}

    def put(places: Mapping[str, ModuleType | None]) -> None:
        for name, module in places.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module

    put(modules)
    try:
        yield
    finally:
        put(before)
