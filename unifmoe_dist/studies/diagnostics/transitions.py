"""How far two routers rank the experts differently (observation 2)."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import torch
from torch import Tensor

from unifmoe_dist.studies.diagnostics.pairs import expert_order, top_pair


@dataclass(frozen=True)
class RankTransition:
    """Original against residual ranking over N tokens.

    Args:
        matrix: (K, K) float64; entry (a, b) is the fraction of tokens whose expert of original rank a has residual rank
            b. Rows sum to 1.
        same_pair: Fraction of tokens whose top-2 set stays the same.
        diagonal: Mean diagonal mass of the matrix.
        chance_same_pair: Same-set fraction of two unrelated rankings, 1 / (K choose 2), to read `same_pair` against.
        chance_diagonal: Mean diagonal mass of two unrelated rankings, 1 / K.
    """

    matrix: Tensor
    same_pair: float
    diagonal: float
    chance_same_pair: float
    chance_diagonal: float


def rank_transition(original: Tensor, residual: Tensor) -> RankTransition:
    """Compare the experts' rankings by two scores (N, K); ties go to the lower expert."""
    num_tokens, num_experts = original.shape
    before, after = expert_order(original), expert_order(residual).argsort(1)  # experts by rank, ranks by expert
    cell = torch.arange(num_experts, device=original.device) * num_experts + after.gather(1, before)
    counts = torch.bincount(cell.flatten(), minlength=num_experts**2).view(num_experts, num_experts)
    matrix = (counts.double() / max(num_tokens, 1)).cpu()
    same = (top_pair(original) == top_pair(residual)).double().mean()
    return RankTransition(
        matrix, float(same), float(matrix.diagonal().mean()), 1 / comb(num_experts, 2), 1 / num_experts
    )
