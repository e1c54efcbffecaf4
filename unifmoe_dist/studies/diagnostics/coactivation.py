"""How often top-2 routing asks two experts to work together, and whether such pairs align (observation 1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor


@dataclass(frozen=True)
class Correlation:
    """Pearson's r over pairs with its two-sided p-value; both NaN where a variable is constant or pairs are too few."""

    r: float
    p_value: float


def coactivation_frequency(pair: Tensor, num_pairs: int) -> Tensor:
    """(P,) float64 on the CPU: fraction of tokens routed to each pair, given those of N tokens (`top_pair`)."""
    return torch.bincount(pair, minlength=num_pairs).double().cpu() / max(len(pair), 1)


def pearson(first: Tensor, second: Tensor) -> Correlation:
    """Correlation of two vectors of equal length."""
    a, b = first.double().numpy(), second.double().numpy()
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return Correlation(float("nan"), float("nan"))
    result = stats.pearsonr(a, b)
    return Correlation(float(result.statistic), float(result.pvalue))
