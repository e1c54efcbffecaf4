"""What several runs show together: observation 3, and co-activation by weight of the Gram loss, over all of them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unifmoe_dist.studies.diagnostics.demand_statistics import HIGH, LOW, DemandStatistics
from unifmoe_dist.studies.records import plain
from unifmoe_dist.studies.run_report.run_study import RunStudy


@dataclass(frozen=True)
class DemandOverRuns:
    """Functional demand at one tolerance in one layer of several runs, by run."""

    layer: str
    epsilon: float
    by_run: dict[str, DemandStatistics]  # shared responses merged by the gates
    uniform: dict[str, DemandStatistics]  # merged by one half each

    @property
    def falling(self) -> int:
        """Runs in which demand falls with the shared ratio."""
        return sum(found.correlation < 0 for found in self.by_run.values())

    @property
    def decided(self) -> int:
        """Runs of these whose interval lies below 0."""
        return sum(found.interval[1] < 0 for found in self.by_run.values())

    def group(self, name: str) -> tuple[Tensor, Tensor] | None:
        """CDF (K,) of the pairs of "low" or "high" shared ratio, mean over runs, and its standard error over runs; None
        where no run has such groups."""
        cdfs = [found.groups[name].cdf for found in self.by_run.values() if name in found.groups]
        if not cdfs:
            return None
        stacked = torch.stack(cdfs)
        error = stacked.std(0) / len(cdfs) ** 0.5 if len(cdfs) > 1 else torch.zeros_like(cdfs[0])
        return stacked.mean(0), error

    def lines(self) -> Iterator[tuple[str, dict[str, float | None]]]:
        """Numbers of every run, and their means over the runs that have them, by run; an interval has no mean."""
        rows = {run: _numbers(found, self.uniform[run]) for run, found in self.by_run.items()}
        yield from rows.items()
        means = {name: mean_of(row[name] for row in rows.values()) for name in _NAMES}
        yield f"mean of {len(rows)}", {**means, "from": None, "to": None}


_NAMES = ("r", "from", "to", "r, uniform", "mean k_ε", "low", "high", "success at 2, low", "success, high")


def _numbers(found: DemandStatistics, uniform: DemandStatistics) -> dict[str, float | None]:
    low, high = found.groups.get(LOW), found.groups.get(HIGH)
    means = [group.mean_demand if group else None for group in (low, high)]
    success = [group.success(2) if group else None for group in (low, high)]
    correlations = found.correlation, *found.interval, uniform.correlation
    return dict(zip(_NAMES, (*correlations, float(found.mean_demand.nanmean()), *means, *success), strict=True))


def mean_of(values: Iterable[float | None]) -> float | None:
    """Mean of the values that there are."""
    there = [value for value in values if value is not None and np.isfinite(value)]
    return float(np.mean(there)) if there else None


def demand_over_runs(found: Sequence[RunStudy]) -> list[DemandOverRuns]:
    """Of every layer that is diagnosed in two runs or more, at every tolerance."""
    result = []
    for layer in dict.fromkeys(layer for one in found for layer in one.diagnoses):
        diagnoses = {one.run.name: one.diagnoses[layer] for one in found if layer in one.diagnoses}
        if len(diagnoses) < 2:
            continue
        for index, first in enumerate(next(iter(diagnoses.values())).demand):
            by_run, uniform = (
                {run: getattr(diagnosis, kind)[index] for run, diagnosis in diagnoses.items()}
                for kind in ("demand", "demand_uniform")
            )
            result.append(DemandOverRuns(layer, first.epsilon, by_run, uniform))
    return result


def coactivation_by_weight(found: Sequence[RunStudy]) -> list[dict[str, Any]]:
    """Mean pair co-activation and Gram distance over the runs of each weight of the Gram loss, by rising weight, each
    also as a change from the first; nothing where all runs have the same weight."""
    groups: dict[float, list[RunStudy]] = {}
    for one in sorted((one for one in found if one.usage), key=lambda one: one.run.config.optim.lambda_div):
        groups.setdefault(one.run.config.optim.lambda_div, []).append(one)
    if len(groups) < 2:
        return []
    rows: list[dict[str, Any]] = []
    for weight, several in groups.items():
        layers = [layer for one in several for layer in one.usage.values()]
        value = float(np.mean([layer.mean_pair_coactivation for layer in layers]))
        first = rows[0]["coactivation"] if rows else value
        distance = float(np.mean([layer.gram_distance for layer in layers]))
        change = value / first - 1 if first else float("nan")
        rows.append(
            {"weight": weight, "runs": len(several), "coactivation": value, "change": change, "distance": distance}
        )
    return rows


def record(found: Sequence[RunStudy]) -> dict[str, Any]:
    """Every number, as JSON can hold it."""
    demand = [
        {"layer": one.layer, "epsilon": one.epsilon, "runs": dict(one.lines())} for one in demand_over_runs(found)
    ]
    return plain({"demand": demand, "coactivation_by_weight": coactivation_by_weight(found)})
