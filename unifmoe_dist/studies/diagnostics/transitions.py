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
    """

    matrix: Tensor
    same_pair: float
    diagonal: float

    @property
    def chance_same_pair(self) -> float:
        """Same-set fraction of two unrelated rankings, 1 / (K choose 2): what `same_pair` has to be read against."""
        return 1 / comb(len(self.matrix), 2)

    @property
    def chance_diagonal(self) -> float:
        """Mean diagonal mass of two unrelated rankings, 1 / K."""
        return 1 / len(self.matrix)


def rank_transition(original: Tensor, residual: Tensor) -> RankTransition:
    """Compare the experts' rankings by two scores (N, K); ties go to the lower expert."""
    num_tokens, num_experts = original.shape
    before = expert_order(original)
    ranks = torch.arange(num_experts, device=original.device).expand_as(before)
    after = torch.empty_like(before).scatter_(1, expert_order(residual), ranks)
    cell = ranks * num_experts + after.gather(1, before)
    counts = torch.bincount(cell.flatten(), minlength=num_experts**2).view(num_experts, num_experts)
    matrix = counts.double() / max(num_tokens, 1)
    same = (top_pair(original) == top_pair(residual)).double().mean()
    return RankTransition(matrix.cpu(), float(same), float(matrix.diagonal().mean()))
