"""Runs of a sweep as numbers: collected from their folders, and aggregated as the paper does.

A data set's score for one seed is the mean over its held-out environments; a table's entry is the mean and the standard
deviation (over n - 1) of these scores over the seeds. Where learning rates were tried, the one with the best validation
score counts, for each data set, seed and environment.

All methods of a data set are held to the same runs: the environments, seeds and learning rates that were planned for
any of them. Where one of those has not finished, an entry has no value.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import pandas as pd
import yaml

from unifmoe_dist.data.registry import TASKS, find_task
from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.registry import find_method
from unifmoe_dist.studies.records import read_summary
from unifmoe_dist.studies.sweep.planned_runs import RunIdentity
from unifmoe_dist.studies.sweep.run_folder import saved_options

_OPTIONS = ("model.num_blocks", "model.num_experts", "optim.lambda_div", "optim.lr")


@dataclass(frozen=True)
class Result(RunIdentity):
    """One planned run, and, once it has finished, what came of it."""

    folder: Path
    score: float | None = None  # test score, as readers see it (%)
    validation: float | None = None  # validation score of the checkpoint that was tested
    block_compute: float | None = None  # mean blocks per token and layer, C_B
    expert_count: float | None = None  # mean (residual) experts per token and layer, k
    options: dict[str, Any] | None = None  # those that tables need, by dotted name

    @property
    def finished(self) -> bool:
        return self.score is not None

    @property
    def ffns(self) -> float:
        """C_B / B: computation per token and layer in dense FFNs."""
        assert self.block_compute is not None and self.options is not None
        return self.block_compute / self.options["model.num_blocks"]


def collect(folder: Path) -> list[Result]:
    """Every run that a sweep planned in a folder, finished or not.

    Raises:
        UserError: the folder holds no runs of a sweep, something unreadable, or the same run twice.
    """
    found = sorted(folder.rglob("run.json"))
    if not found:
        raise UserError(f"{folder} holds no runs of a sweep; give the --output folder of launch/sweep.py.")
    results: dict[tuple[Any, ...], Result] = {}
    for result in (_read(path.parent) for path in found):
        if (other := results.setdefault(tuple(result.identity.values()), result)) is not result:
            raise UserError(
                f"{other.folder} and {result.folder} both hold {result.name}; give the --output folder of one sweep."
            )
    return list(results.values())


def _read(folder: Path) -> Result:
    try:
        planned = Result(**json.loads((folder / "run.json").read_text()), folder=folder)
        find_method(planned.method)
        known = planned.task in TASKS and planned.held_out in (find_task(planned.task).environments or (None,))
        if not known or not isinstance(planned.seed, int) or not isinstance(planned.lr, float | int | None):
            raise ValueError(f"run.json names {planned.task!r}, {planned.held_out!r}, {planned.seed!r}, {planned.lr!r}")
        if not (folder / "summary.json").is_file():
            return planned
        if (summary := read_summary(folder)) is None:
            raise ValueError("summary.json is no summary")
        options, metric = saved_options(folder), find_task(planned.task).metric
        return replace(
            planned,
            score=metric.scale * float(summary.get("score", summary["test_accuracy"])),
            validation=metric.scale * float(summary.get("validation_score", summary["validation_accuracy"])),
            block_compute=float(summary["mean_block_compute"]),
            expert_count=float(summary["mean_expert_count"]),
            options={name: options[name] for name in _OPTIONS},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError, UserError) as error:
        raise UserError(f"{folder} does not hold a readable run ({error}); delete it or run it again.") from error


@dataclass(frozen=True)
class Entry:
    """What stands in one place of a table."""

    mean: float | None  # for a score the mean over seeds; None unless every run is there
    deviation: float | None = None  # over seeds; None for a single one
    done: int = 0  # runs that are there, and
    wanted: int = 0  # that are needed; both 0 where no number of runs says what lacks
    block_compute: float | None = None  # mean C_B of the runs that count
    ffns: float | None = None  # the same in dense FFNs, C_B / B
    expert_count: float | None = None  # mean k of the runs that count
    by_seed: tuple[float, ...] = ()  # score of each seed
    decimals: int = 1  # that are shown
    best: bool = False  # of its column

    def text(self, plus_minus: str, missing: str) -> str:
        if self.mean is None:
            return f"{missing} ({self.done}/{self.wanted})" if self.wanted else missing
        spread = "" if self.deviation is None else f"{plus_minus}{self.deviation:.{self.decimals}f}"
        return f"{self.mean:.{self.decimals}f}{spread}"


COSTS = {"C_B": "block_compute", "C_B / B": "ffns", "k": "expert_count"}
"""Fields of an entry that say what its runs computed, by the heads of a table's last columns."""


class Grid(NamedTuple):
    """The runs that every method of one data set needs."""

    environments: tuple[str | None, ...]
    seeds: tuple[int, ...]
    learning_rates: tuple[float | None, ...]

    @property
    def size(self) -> int:
        return len(self.environments) * len(self.seeds) * len(self.learning_rates)


def grid_of(results: Iterable[Result], task: str) -> Grid:
    """What was planned for a data set, over all methods."""
    mine = [r for r in results if r.task == task]
    return Grid(
        tuple(dict.fromkeys(r.held_out for r in mine)),
        tuple(sorted({r.seed for r in mine})),
        tuple(sorted({r.lr for r in mine}, key=lambda lr: lr or 0.0)),
    )


def best_rates(results: Sequence[Result], seeds: Collection[int]) -> dict[tuple[str, str], float]:
    """For each data set and method of which every run is there, the learning rate with the best mean validation score.

    Args:
        results: Runs at several learning rates, the same of every method.
        seeds: Those of the runs that the rates are for, none of which may have been used to choose them.

    Raises:
        UserError: the runs have a seed that is not free.
    """
    rates = {}
    for task, method in dict.fromkeys((r.task, r.method) for r in results):
        mine, grid = [r for r in results if (r.task, r.method) == (task, method)], grid_of(results, task)
        if sum(r.finished for r in mine) < grid.size or None in grid.learning_rates:
            continue
        if used := set(grid.seeds) & set(seeds):
            raise UserError(
                f"--lr-from was chosen on seed {min(used)}, which is to be run; choose it on other --seeds."
            )
        by_rate = pd.DataFrame(map(vars, mine)).groupby("lr")["validation"].mean()
        rates[task, method] = float(by_rate.idxmin() if find_task(task).metric.lower_is_better else by_rate.idxmax())
    return rates


def chosen_runs(results: Sequence[Result]) -> pd.DataFrame:
    """Of finished runs of one data set and method, those of the learning rate that validation chooses: one to a seed
    and environment, with the fields of a result and `ffns`."""
    runs = pd.DataFrame([vars(r) | {"ffns": r.ffns, "held_out": str(r.held_out)} for r in results])
    scores = runs.groupby(["seed", "held_out"])["validation"]
    return runs.loc[scores.idxmin() if find_task(results[0].task).metric.lower_is_better else scores.idxmax()]


def cell(results: Sequence[Result], task: str, method: str, held_out: str | None = None) -> Entry:
    """A method's entry for a data set, or for one of its environments if that is given."""
    grid = grid_of(results, task)
    grid = grid if held_out is None else grid._replace(environments=(held_out,))
    mine = [r for r in results if (r.task, r.method) == (task, method) and r.held_out in grid.environments]
    mine = sorted((r for r in mine if r.finished), key=lambda r: r.lr or 0.0)
    if len(mine) < grid.size or not grid.size:
        return Entry(None, done=len(mine), wanted=grid.size)
    chosen = chosen_runs(mine)
    by_seed = chosen.groupby("seed")["score"].mean().tolist()
    costs = chosen[list(COSTS.values())].mean()
    return Entry(fmean(by_seed), deviation(by_seed), len(mine), grid.size, **costs, by_seed=tuple(by_seed))


def average(cells: Sequence[Entry]) -> Entry:
    """Mean over data sets, seed by seed; no value unless every entry has one, with as many seeds each."""
    if not _whole(cells) or len({len(c.by_seed) for c in cells}) > 1:
        return lacking(cells)
    columns = pd.DataFrame(cells)
    by_seed = [fmean(scores) for scores in zip(*columns["by_seed"], strict=True)]
    costs = columns[list(COSTS.values())].mean()
    done, wanted = int(columns["done"].sum()), int(columns["wanted"].sum())
    return Entry(fmean(by_seed), deviation(by_seed), done, wanted, **costs, by_seed=tuple(by_seed))


def mean_over_methods(cells: Sequence[Entry]) -> Entry:
    """ "Standard MoE, average": mean and deviation of several methods' means, as in the paper's GLUE table."""
    means = [c.mean for c in cells if c.mean is not None]
    counts = sum(c.done for c in cells), sum(c.wanted for c in cells)
    return Entry(fmean(means), deviation(means), *counts) if _whole(cells) else lacking(cells)


def best_of_methods(cells: Sequence[Entry]) -> Entry:
    """ "Standard MoE, best": the entry with the highest mean; it needs all of them."""
    return max(cells, key=lambda c: c.mean or 0.0) if _whole(cells) else lacking(cells)


def _whole(cells: Sequence[Entry]) -> bool:
    return bool(cells) and all(c.mean is not None for c in cells)


def lacking(cells: Sequence[Entry]) -> Entry:
    """What stands for several entries that do not all have a value: how many of their runs are there.

    Where all that were planned are there, and it is the plan that leaves something out, no number of runs says so.
    """
    done, wanted = sum(c.done for c in cells), sum(c.wanted for c in cells)
    planned = done < wanted and all(c.wanted for c in cells)
    return Entry(None, done=done, wanted=wanted) if planned else Entry(None)


def deviation(values: Sequence[float]) -> float | None:
    """Standard deviation of a sample, over n - 1; None for a single value."""
    return stdev(values) if len(values) > 1 else None
