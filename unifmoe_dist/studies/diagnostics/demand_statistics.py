"""Functional demand over pairs of experts, each pair weighing the same (observation 3)."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unifmoe_dist.studies.diagnostics.rankings import pearson

LOW, HIGH = "low", "high"


@dataclass(frozen=True)
class GroupDemand:
    """Pairs of low or high shared ratio."""

    pairs: list[int]  # their indices, in the order of `expert_pairs`
    cdf: Tensor  # (K,) F_eps(m) for m = 1..K: mean over pairs of the fraction of their tokens with k_eps <= m
    standard_error: Tensor  # (K,) of that mean, across pairs; NaN with one pair
    mean_demand: float  # mean over pairs of their mean k_eps

    def success(self, prefix: int = 2) -> float:
        """Pair-balanced success rate of a prefix."""
        return float(self.cdf[prefix - 1])


@dataclass(frozen=True)
class DemandStatistics:
    """k_eps at one tolerance."""

    epsilon: float
    tokens: Tensor  # (P,) int64, tokens of each pair
    mean_demand: Tensor  # (P,) mean k_eps of each pair's tokens; NaN for a pair that no token chose
    cdf: Tensor  # (P, K) fraction of each pair's tokens with k_eps <= m; NaN for a pair that no token chose
    groups: dict[str, GroupDemand]  # the pairs with the lowest and highest shared ratios; none where all are equal
    correlation: float  # Pearson's r of shared ratio and mean demand over the observed pairs
    interval: tuple[float, float]  # its bootstrap interval, low and high, pairs resampled
    confidence: float  # level of that interval


def demand_statistics(
    demand: Tensor,
    pair: Tensor,
    ratio: Tensor,
    num_experts: int,
    epsilon: float,
    group_size: int = 5,
    resamples: int = 9999,
    confidence: float = 0.95,
    seed: int = 0,
) -> DemandStatistics:
    """Summarise k_eps (N,), in 1..K + 1, of tokens of some pair (N,), by pairs of shared ratio (P,).

    Pairs that no token chose have no demand and are left out. Where fewer than 2 `group_size` pairs remain, the groups
    are the lower and upper half, so that they never overlap; equal ratios keep the order of the pairs. The interval is
    a percentile interval over `resamples` of the pairs.
    """
    num_pairs, ratio = len(ratio), ratio.cpu()
    cells = torch.bincount(pair * (num_experts + 1) + demand - 1, minlength=num_pairs * (num_experts + 1))
    counts = cells.view(num_pairs, num_experts + 1).double().cpu()
    tokens = counts.sum(1)
    cdf = (counts.cumsum(1) / tokens[:, None])[:, :num_experts]
    means = counts @ torch.arange(1, num_experts + 2, dtype=torch.float64) / tokens
    observed = tokens.nonzero().squeeze(1)
    ranked = observed[ratio[observed].argsort(stable=True)]
    size = min(group_size, len(ranked) // 2) if len(ratio[observed].unique()) > 1 else 0
    groups = {}
    for name, members in ((LOW, ranked[:size]), (HIGH, ranked[len(ranked) - size :])):
        if size:
            error = cdf[members].std(0) / size**0.5 if size > 1 else cdf[0] * float("nan")
            mean = float(means[members].mean())
            groups[name] = GroupDemand(members.tolist(), cdf[members].mean(0), error, mean)
    x, y = ratio[observed], means[observed]
    correlation, interval = pearson(x, y).r, (float("nan"), float("nan"))
    if np.isfinite(correlation) and len(observed) >= 3:
        interval = _bootstrap(x.numpy(), y.numpy(), resamples, confidence, seed)
    return DemandStatistics(epsilon, tokens.long(), means, cdf, groups, correlation, interval, confidence)


def _bootstrap(x: np.ndarray, y: np.ndarray, resamples: int, confidence: float, seed: int) -> tuple[float, float]:
    """Percentile interval of Pearson's r; resamples that are constant, and have no r, are left out."""
    rows = np.random.default_rng(seed).integers(0, len(x), (resamples, len(x)))
    a, b = (values[rows] - values[rows].mean(1, keepdims=True) for values in (x, y))
    with np.errstate(invalid="ignore", divide="ignore"):
        r = (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))
    low, high = np.nanquantile(r.clip(-1, 1), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
