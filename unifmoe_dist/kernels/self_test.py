"""The Triton kernels prove themselves on a device before layers rely on them there.

Compilers and devices differ, and a wrong sum is worse than a slow one. At the first use of a shape a small case runs
forward and backward in both Triton and plain torch; if they disagree, or Triton fails, plain torch is used, with a
warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from unifmoe_dist.eager import not_compiled
from unifmoe_dist.experts import ExpertWeights
from unifmoe_dist.kernels.dropout import HiddenDropout
from unifmoe_dist.kernels.grouped import grouped_block_ffn
from unifmoe_dist.routing import Routing, route

TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}  # of the largest value
_TOKENS = 96


def ffn_works(x: Tensor, weights: ExpertWeights, dropout: bool = False) -> bool:
    """Whether `triton_block_ffn` agrees with plain torch on x's device, for the widths and types of `weights`, with
    dropout of hidden channels or without."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    width = weights.keys.shape[1] // weights.num_blocks
    bias, gated = weights.key_bias is not None, weights.gate_keys is not None
    return _ffn_works(x.device, dtype, x.shape[1], width, weights.activation, bias, gated, dropout)


def routing_works(x: Tensor, columns: int, num_blocks: int) -> bool:
    """Whether `triton_route` agrees with plain torch on x's device, for (N, D) tokens and (columns, D) weights."""
    return _routing_works(x.device, x.dtype, x.shape[1], columns, num_blocks)


@cache
@not_compiled
def _ffn_works(
    device: torch.device,
    dtype: torch.dtype,
    dim: int,
    width: int,
    activation: str,
    bias: bool,
    gated: bool,
    dropout: bool,
) -> bool:
    from unifmoe_dist.kernels.triton.ffn import triton_block_ffn

    def compare() -> list[tuple[Tensor, Tensor]]:
        experts, blocks = 2, 2
        draw = _Draw(device, dtype)
        x, keys, values = draw(_TOKENS, dim), draw(experts, blocks * width, dim), draw(experts, blocks * width, dim)
        key_bias, value_bias = (draw(experts, n) if bias else None for n in (blocks * width, dim))
        gate_keys = draw(experts, blocks * width, dim) if gated else None
        gate_bias = draw(experts, blocks * width) if gated and bias else None
        gates = draw(_TOKENS, experts).float().abs()
        gates, chosen = gates.masked_fill(gates < 0.4 * gates.amax(), 0.0), draw(_TOKENS, blocks) > 0
        seed = torch.tensor([1, -1], dtype=torch.int32, device=device)
        more: dict[str, Any] = {"dropout": HiddenDropout(0.3, seed)} if dropout else {}
        results = []
        for kernel in (triton_block_ffn, grouped_block_ffn):
            given = (keys, values, key_bias, value_bias, gate_keys, gate_bias)
            leaves = [None if t is None else t.detach().requires_grad_() for t in given]
            x_leaf, gate_leaf = x.detach().requires_grad_(), gates.detach().requires_grad_()
            gate = dict(zip(("gate_keys", "gate_key_bias"), leaves[4:], strict=True))
            weights = ExpertWeights(*leaves[:4], blocks, activation, **gate)  # type: ignore[call-arg, arg-type]
            y = kernel(x_leaf, gate_leaf, chosen, weights, **more)
            wanted = [x_leaf, gate_leaf, *(t for t in leaves if t is not None)]
            results.append([y.detach(), *torch.autograd.grad(y, wanted, torch.ones_like(y))])
        return list(zip(*results, strict=True))

    kind = f"{'gated ' if gated else ''}block-sparse experts"
    what = f"{kind} of width {dim} and blocks of {width} in {dtype}{' with dropout' if dropout else ''}"
    return _proven(what, TOLERANCE[dtype], compare)


@cache
@not_compiled
def _routing_works(device: torch.device, dtype: torch.dtype, dim: int, columns: int, num_blocks: int) -> bool:
    from unifmoe_dist.kernels.triton.routing import triton_route

    def compare() -> list[tuple[Tensor, Tensor]]:
        draw = _Draw(device, torch.float32)
        x, weight = draw(_TOKENS, dim).to(dtype), torch.nn.functional.normalize(draw(columns, dim), dim=1)
        prototypes = draw(num_blocks, dim)
        pairs = []
        for decide in (lambda x, w, p: triton_route(x, w, p, num_blocks), lambda x, w, p: route(x.float(), w, p)):
            x_leaf, w_leaf = x.detach().requires_grad_(), weight.detach().requires_grad_()
            r: Routing = decide(x_leaf, w_leaf, prototypes)
            grads = torch.autograd.grad(r.shared_demand.square().sum() + r.gates.square().sum(), [x_leaf, w_leaf])
            decisions = [r.shared_blocks.float().mean(0), (r.gates != 0).float().mean(0), _group_sizes(r) / _TOKENS]
            pairs.append([r.shared_demand.detach(), r.affinity.detach(), *decisions, *grads])
        return list(zip(*pairs, strict=True))

    # A token whose decision is within rounding may fall either way: one in a hundred may.
    return _proven(f"routing of width {dim} to {columns - 1} experts in {dtype}", 2e-2, compare)


def _group_sizes(routing: Routing) -> Tensor:
    """(K + 1, B) rows of every (expert, block) group, as the kernels counted them or from the decision."""
    if routing.by_products is not None:
        return routing.by_products.group_offsets.totals.float()
    shared, active = routing.shared_blocks.float(), (routing.gates != 0).float()
    return torch.cat([shared.sum(0, keepdim=True), active.T @ (1 - shared)])


class _Draw:
    """Normal numbers from a generator of its own, so that a trial changes no one's random numbers."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=self.generator) / (shape[-1] ** 0.5 if len(shape) == 3 else 1.0)
        return numbers.to(self.device, self.dtype)


def _proven(what: str, tolerance: float, compare: Callable[[], list[tuple[Tensor, Tensor]]]) -> bool:
    try:
        from unifmoe_dist.kernels.triton.tuning import first_tiles

        # So small a case says nothing about speed.
        with torch.inference_mode(False), torch.enable_grad(), first_tiles():
            for got, expected in compare():
                largest = expected.float().abs().amax().clamp(min=1e-3)
                error = float((got.float() - expected.float()).abs().amax() / largest)
                if not error <= tolerance:  # NaN as well
                    raise ArithmeticError(f"it differs from plain torch by {error:.2g} of the largest value")
    except Exception as error:  # whatever a compiler, driver or kernel raises: the answer is not to use it
        warnings.warn(f"Triton is not used for {what}: {type(error).__name__}: {error}", stacklevel=2)
        return False
    return True
