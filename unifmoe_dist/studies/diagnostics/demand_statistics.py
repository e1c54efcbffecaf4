"""Functional demand over pairs of experts, each pair weighing the same (observation 3)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from unifmoe_dist.studies.diagnostics.coactivation import pearson

LOW, HIGH = "low", "high"


@dataclass(frozen=True)
class GroupDemand:
    """Pairs of low or high shared ratio.

    Args:
        pairs: Their indices, in the order of `expert_pairs`.
        cdf: (K,) F_eps(m) for m = 1..K: mean over pairs of the fraction of their tokens with k_eps <= m.
        standard_error: (K,) of that mean, across pairs; NaN with one pair.
        mean_demand: Mean over pairs of their mean k_eps.
    """

    pairs: list[int]
    cdf: Tensor
    standard_error: Tensor
    mean_demand: float

    def success(self, prefix: int = 2) -> float:
        """Pair-balanced success rate of a prefix."""
        return float(self.cdf[prefix - 1])


@dataclass(frozen=True)
class DemandStatistics:
    """k_eps at one tolerance.

    Args:
        epsilon: Tolerance.
        tokens: (P,) int64, tokens of each pair.
        mean_demand: (P,) mean k_eps of each pair's tokens; NaN for a pair that no token chose.
        cdf: (P, K) fraction of each pair's tokens with k_eps <= m; NaN for a pair that no token chose.
        groups: The pairs with the lowest and highest shared ratios; none where all ratios are equal.
        correlation: Pearson's r of shared ratio and mean demand over the observed pairs.
        interval: Its bootstrap interval, low and high, pairs resampled.
        confidence: Level of that interval.
    """

    epsilon: float
    tokens: Tensor
    mean_demand: Tensor
    cdf: Tensor
    groups: dict[str, GroupDemand]
    correlation: float
    interval: tuple[float, float]
    confidence: float


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
    """Summarise k_eps (N,) by pair.

    Pairs that no token chose have no demand and are left out. Where fewer than 2 `group_size` pairs remain, the groups
    are the lower and upper half, so that they never overlap; equal ratios keep the order of the pairs.

    Args:
        demand: (N,) k_eps of every token, in 1..K + 1.
        pair: (N,) its original pair.
        ratio: (P,) shared ratio of every pair.
        num_experts: K.
        epsilon: Tolerance of `demand`, for the record.
        group_size: Pairs in the low and in the high group.
        resamples: Bootstrap resamples of pairs.
        confidence: Level of the percentile interval.
        seed: Of the bootstrap.
    """
    num_pairs = len(ratio)
    cells = torch.bincount(pair * (num_experts + 1) + demand - 1, minlength=num_pairs * (num_experts + 1))
    counts = cells.view(num_pairs, num_experts + 1).double().cpu()
    tokens = counts.sum(1)
    cdf = counts.cumsum(1) / tokens[:, None]
    means = counts @ torch.arange(1, num_experts + 2, dtype=torch.float64) / tokens
    observed = tokens.nonzero().squeeze(1)
    ratio = ratio.cpu()
    ranked = observed[ratio[observed].argsort(stable=True)]
    size = min(group_size, len(ranked) // 2) if len(ratio[observed].unique()) > 1 else 0
    groups = {LOW: ranked[:size], HIGH: ranked[len(ranked) - size :]}
    correlation, interval = _bootstrap(ratio[observed], means[observed], resamples, confidence, seed)
    return DemandStatistics(
        epsilon=epsilon,
        tokens=tokens.long(),
        mean_demand=means,
        cdf=cdf[:, :num_experts],
        groups={name: _group(members, cdf[:, :num_experts], means) for name, members in groups.items() if size},
        correlation=correlation,
        interval=interval,
        confidence=confidence,
    )


def _group(members: Tensor, cdf: Tensor, means: Tensor) -> GroupDemand:
    error = cdf[members].std(0, correction=1) / len(members) ** 0.5 if len(members) > 1 else cdf[0] * float("nan")
    return GroupDemand(members.tolist(), cdf[members].mean(0), error, float(means[members].mean()))


def _bootstrap(
    ratio: Tensor, means: Tensor, resamples: int, confidence: float, seed: int
) -> tuple[float, tuple[float, float]]:
    """Pearson's r and its percentile interval; resamples that are constant, and have no r, are left out."""
    correlation = pearson(ratio, means).r
    if not np.isfinite(correlation) or len(ratio) < 3:
        return correlation, (float("nan"), float("nan"))
    with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        result = stats.bootstrap(
            (ratio.numpy(), means.numpy()),
            _pearson_rows,
            paired=True,
            vectorized=True,
            n_resamples=resamples,
            confidence_level=confidence,
            method="percentile",
            random_state=np.random.default_rng(seed),
        )
    tail = (1 - confidence) / 2
    low, high = np.nanquantile(result.bootstrap_distribution, [tail, 1 - tail])
    return correlation, (float(low), float(high))


def _pearson_rows(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
    a = a - a.mean(axis, keepdims=True)
    b = b - b.mean(axis, keepdims=True)
    return np.clip((a * b).sum(axis) / np.sqrt((a * a).sum(axis) * (b * b).sum(axis)), -1, 1)
