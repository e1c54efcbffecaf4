"""Two methods compared run by run: the mean difference, its interval, and how many seeds a difference needs.

Differences are an array (S, D): of S seeds, in each of D domains held out in turn. Runs of one seed and domain share
their data splits, order of batches and initial backbone, so what is left between them is the method's and chance.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm, t

CONFIDENCE, POWER = 0.95, 0.8
RESAMPLES = 10_000
FEWEST = 3
"""Seeds for an interval: that of two seeds in three domains would hold the truth 80 times in 100."""
POINT = 0.5
"""The difference that `Paired.seeds_needed` is about."""


@dataclass(frozen=True)
class Paired:
    """What the runs of two methods say about their difference.

    Args:
        mean: Over domains and seeds.
        interval: Its bootstrap interval; None below FEWEST seeds.
        by_domain: Mean over seeds, of every domain.
        above: Runs in which the first method scored higher, and those in which the second did.
        seeds_needed: With so many seeds a test at 1 - CONFIDENCE finds a difference of POINT with a chance of POWER,
            if runs vary as these do; None below FEWEST seeds.
    """

    mean: float
    interval: tuple[float, float] | None
    by_domain: tuple[float, ...]
    above: tuple[int, int]
    seeds_needed: int | None


def compare(differences: np.ndarray) -> Paired:
    """Summarise differences (S, D), the first method's score minus the second's."""
    several = len(differences) >= FEWEST
    return Paired(
        mean=float(differences.mean()),
        interval=bootstrap(differences) if several else None,
        by_domain=tuple(differences.mean(0).tolist()),
        above=(int((differences > 0).sum()), int((differences < 0).sum())),
        seeds_needed=seeds_needed(differences) if several else None,
    )


def bootstrap(differences: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Interval of the mean: seeds are drawn with replacement in each domain apart, as domains are no sample of any.

    So few seeds make a plain percentile interval too narrow. Its percentiles are taken further out, such that it is as
    wide as Student's interval where differences are normal (Hesterberg, "What Teachers Should Know About the
    Bootstrap", The American Statistician 69, 2015, section 4.3).
    """
    seeds, domains = differences.shape
    drawn = np.random.default_rng(seed).integers(seeds, size=(RESAMPLES, seeds, domains))
    means = np.take_along_axis(differences[None], drawn, axis=1).mean((1, 2))
    student = t.ppf((1 - CONFIDENCE) / 2, domains * (seeds - 1))
    tail = norm.cdf(math.sqrt(seeds / (seeds - 1)) * student)
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def seeds_needed(differences: np.ndarray) -> int:
    """Seeds for a difference of POINT in the mean over the domains, from the spread over seeds in each of them."""
    variance = differences.var(0, ddof=1).sum() / differences.shape[1] ** 2
    factor = norm.ppf((1 + CONFIDENCE) / 2) + norm.ppf(POWER)
    return max(2, math.ceil(factor**2 * variance / POINT**2))
