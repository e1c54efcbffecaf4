"""Experts ranked by a router, and pairs of them: how often top-2 routing asks for a pair, how a quantity of pairs goes
with another (observation 1), and how differently two routers rank the experts (observation 2).

Pairs i < j are in one order, P = K (K - 1) / 2 of them: (0, 1), (0, 2), ..., (K - 2, K - 1).
"""

from dataclasses import dataclass
from math import comb

import numpy as np
import torch
from scipy import stats
from torch import Tensor


def expert_pairs(num_experts: int) -> Tensor:
    """(P, 2) int64."""
    return torch.triu_indices(num_experts, num_experts, offset=1).T.contiguous()


def expert_order(scores: Tensor) -> Tensor:
    """(N, K) int64: experts by falling score, q_1 first; ties go to the lower expert."""
    return scores.argsort(dim=1, descending=True, stable=True)


def top_pair(scores: Tensor) -> Tensor:
    """(N,) int64: the pair of each token's two largest scores (N, K), as its index; ties go to the lower expert."""
    num_experts = scores.shape[1]
    best = expert_order(scores)[:, :2]
    low, high = best.amin(1), best.amax(1)
    return low * num_experts - low * (low + 1) // 2 + high - low - 1


def as_matrix(values: Tensor, num_experts: int, diagonal: float = float("nan")) -> Tensor:
    """Values (P,) of pairs as a symmetric (K, K) matrix."""
    matrix = torch.full((num_experts, num_experts), diagonal, dtype=torch.float64)
    first, second = expert_pairs(num_experts).T
    matrix[first, second] = matrix[second, first] = values.double()
    return matrix


def coactivation_frequency(pair: Tensor, num_pairs: int) -> Tensor:
    """(P,) float64 on the CPU: fraction of tokens routed to each pair, given those of N tokens (`top_pair`)."""
    return torch.bincount(pair, minlength=num_pairs).double().cpu() / max(len(pair), 1)


@dataclass(frozen=True)
class Correlation:
    """Pearson's r over pairs with its two-sided p-value; both NaN where a variable is constant or pairs are too few."""

    r: float
    p_value: float


def pearson(first: Tensor, second: Tensor) -> Correlation:
    """Correlation of two vectors of equal length."""
    a, b = first.double().numpy(), second.double().numpy()
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return Correlation(float("nan"), float("nan"))
    result = stats.pearsonr(a, b)
    return Correlation(float(result.statistic), float(result.pvalue))


@dataclass(frozen=True)
class RankTransition:
    """Original against residual ranking over N tokens."""

    matrix: Tensor  # (K, K) float64; (a, b): fraction of tokens whose expert of original rank a has residual rank b
    same_pair: float  # fraction of tokens whose top-2 set stays the same
    diagonal: float  # mean diagonal mass of the matrix
    chance_same_pair: float  # of two unrelated rankings, 1 / (K choose 2), to read `same_pair` against
    chance_diagonal: float  # of two unrelated rankings, 1 / K


def rank_transition(original: Tensor, residual: Tensor) -> RankTransition:
    """Compare the experts' rankings by two scores (N, K); ties go to the lower expert."""
    num_tokens, num_experts = original.shape
    before, after = expert_order(original), expert_order(residual).argsort(1)  # experts by rank, ranks by expert
    cell = torch.arange(num_experts, device=original.device) * num_experts + after.gather(1, before)
    counts = torch.bincount(cell.flatten(), minlength=num_experts**2).view(num_experts, num_experts)
    matrix = (counts.double() / max(num_tokens, 1)).cpu()
    same = float((top_pair(original) == top_pair(residual)).double().mean())
    return RankTransition(matrix, same, float(matrix.diagonal().mean()), 1 / comb(num_experts, 2), 1 / num_experts)
