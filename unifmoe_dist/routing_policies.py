"""The router's three decisions as policies: the method's own, and the paper's non-adaptive replacement of each.

| decision | the method | its ablation |
| --- | --- | --- |
| alpha, the shared demand | `adaptive_demand` | `FixedDemand` |
| the order in which blocks are shared | `prototype_order` | `prefix_order` |
| k, the residual experts | `cumulative_count` | `FixedCount` |

Policies are values: two routers with equal policies decide alike. Shape suffixes are those of `routing`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unifmoe_dist.config import UniFMoEConfig
from unifmoe_dist.eager import exporting_to_onnx

DemandPolicy = Callable[[Tensor, int], Tensor]
OrderPolicy = Callable[[Tensor, Tensor], Tensor]
CountPolicy = Callable[[Tensor, Tensor], Tensor]


def adaptive_demand(logit_N: Tensor, num_blocks: int) -> Tensor:
    """alpha in (tau, 1 - tau), from the logits of the shared column; carries gradient to it."""
    tau = (num_blocks - 1) / num_blocks**2
    return tau + (1 - 2 * tau) * torch.sigmoid(logit_N)


@dataclass(frozen=True)
class FixedDemand:
    """The same `alpha` for every token; the shared column then learns from the Gram loss alone."""

    alpha: float

    def __call__(self, logit_N: Tensor, num_blocks: int) -> Tensor:
        return torch.full_like(logit_N, self.alpha)


def descending(scores_NE: Tensor) -> tuple[Tensor, Tensor]:
    """Scores from the largest, and their indices (N, E); ties to the lower index."""
    if exporting_to_onnx():  # which has no stable sort, but whose TopK puts the lower index first
        return scores_NE.topk(scores_NE.shape[-1])
    return scores_NE.sort(dim=-1, descending=True, stable=True)


def prototype_order(x_ND: Tensor, prototypes_BD: Tensor) -> Tensor:
    """(N, B) rank of every block: the prototype that agrees most with the token first, ties to the lower index."""
    _, order_NB = descending(x_ND @ prototypes_BD.T)
    positions = torch.arange(order_NB.shape[-1], device=order_NB.device).expand_as(order_NB)
    return torch.empty_like(order_NB).scatter_(1, order_NB, positions)


def prefix_order(x_ND: Tensor, prototypes_BD: Tensor) -> Tensor:
    """(N, B) rank of every block: its index, whatever the token."""
    return torch.arange(prototypes_BD.shape[0], device=x_ND.device).expand(x_ND.shape[0], -1)


def cumulative_count(sorted_NK: Tensor, alpha_N: Tensor) -> Tensor:
    """k of every token: the smallest prefix of the descending affinities whose mass reaches beta = 1 - alpha."""
    reached_NK = sorted_NK.cumsum(-1) >= (1 - alpha_N)[:, None]  # false for NaN as well
    return ((reached_NK.cumsum(-1) == 0).sum(-1) + 1).clamp(max=sorted_NK.shape[1])


@dataclass(frozen=True)
class FixedCount:
    """The same number of residual experts for every token: top-k activation."""

    count: int

    def __call__(self, sorted_NK: Tensor, alpha_N: Tensor) -> Tensor:
        return torch.full_like(alpha_N, self.count, dtype=torch.long)


@dataclass(frozen=True)
class RouterPolicies:
    """How a router decides. The defaults are the method's, which kernels may fuse.

    Args:
        demand: (N,) shared logits and B -> (N,) alpha in (0, 1).
        order: (N, D) tokens and (B, D) prototypes -> (N, B) ranks; the b lowest are shared. Called without gradient.
        count: (N, K) affinities, descending, and (N,) alpha -> (N,) int64 k in 1 .. K. Called without gradient.
    """

    demand: DemandPolicy = adaptive_demand
    order: OrderPolicy = prototype_order
    count: CountPolicy = cumulative_count

    @staticmethod
    def of(config: UniFMoEConfig) -> RouterPolicies:
        """The policies that a layer's configuration names."""
        return RouterPolicies(
            adaptive_demand if config.shared_demand is None else FixedDemand(config.shared_demand),
            prefix_order if config.block_choice == "prefix" else prototype_order,
            cumulative_count if config.fixed_experts is None else FixedCount(config.fixed_experts),
        )
