"""Runs of a sweep as numbers: collected from their folders, and aggregated as the paper does.

A data set's score for one seed is the mean over its held-out environments; a table's entry is the mean and the standard
deviation (over n - 1) of these scores over the seeds. Where learning rates were tried, the one with the best validation
score counts, for each data set, seed and environment.

All methods of a data set are held to the same runs: the environments, seeds and learning rates that were planned for
any of them. Where one of those has not finished, an entry has no value.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import yaml

from unifmoe_dist.data.registry import TASKS, find_task
from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.registry import find_method
from unifmoe_dist.studies.sweep.run_folder import last_words


@dataclass(frozen=True)
class Result:
    """One planned run.

    Args:
        task, held_out, method, seed, lr: Which run it is.
        folder: Its folder.
        score: Test score (%); None until the run has finished.
        validation: Validation score (%) of the checkpoint that was tested.
        block_compute: Mean blocks per token and layer, C_B.
        expert_count: Mean (residual) experts per token and layer, k.
        options: Options of the run, by dotted name.
    """

    task: str
    held_out: str | None
    method: str
    seed: int
    lr: float | None
    folder: Path
    score: float | None = None
    validation: float | None = None
    block_compute: float | None = None
    expert_count: float | None = None
    options: dict[str, Any] | None = None

    @property
    def finished(self) -> bool:
        return self.score is not None

    @property
    def ffns(self) -> float:
        """C_B / B: computation per token and layer in dense FFNs."""
        assert self.block_compute is not None and self.options is not None
        return self.block_compute / self.options["model.num_blocks"]

    @property
    def name(self) -> str:
        words = [self.task, self.held_out, self.method, f"seed {self.seed}", self.lr and f"lr {self.lr:g}"]
        return " ".join(str(word) for word in words if word)

    @property
    def last_words(self) -> str:
        """The last line of its log, or nothing if it never began."""
        return last_words(self.folder)


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
        identity = result.task, result.held_out, result.method, result.seed, result.lr
        if (other := results.setdefault(identity, result)) is not result:
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
        path = folder / "summary.json"
        if not path.is_file():
            return planned
        summary = json.loads(path.read_text())
        options = yaml.load((folder / "config.yaml").read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
        model, optim = options["model"], options["optim"]
        return Result(
            planned.task,
            planned.held_out,
            planned.method,
            planned.seed,
            planned.lr,
            folder,
            score=100 * float(summary.get("score", summary["test_accuracy"])),
            validation=100 * float(summary.get("validation_score", summary["validation_accuracy"])),
            block_compute=float(summary["mean_block_compute"]),
            expert_count=float(summary["mean_expert_count"]),
            options={
                "model.num_blocks": model["num_blocks"],
                "model.num_experts": model["num_experts"],
                "optim.lambda_div": optim["lambda_div"],
            },
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError, UserError) as error:
        raise UserError(f"{folder} does not hold a readable run ({error}); delete it or run it again.") from error


@dataclass(frozen=True)
class Cell:
    """One entry of a table.

    Args:
        mean: Mean score over seeds; None unless every run is there.
        deviation: Standard deviation over seeds; None for a single one.
        done: Runs that are there.
        wanted: Runs that are needed.
        block_compute: Mean C_B of the runs that count.
        ffns: The same in dense FFNs, C_B / B.
        expert_count: Mean k of the runs that count.
        by_seed: Score of each seed.
    """

    mean: float | None
    deviation: float | None
    done: int
    wanted: int
    block_compute: float | None = None
    ffns: float | None = None
    expert_count: float | None = None
    by_seed: tuple[float, ...] = ()


@dataclass(frozen=True)
class Grid:
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


def cell(results: Sequence[Result], task: str, method: str, held_out: str | None = None) -> Cell:
    """A method's entry for a data set, or for one of its environments.

    Args:
        results: All runs.
        task: Data set.
        method: Method.
        held_out: Only this environment, if given.
    """
    grid = grid_of(results, task)
    environments = grid.environments if held_out is None else (held_out,)
    mine = {
        (r.held_out, r.seed, r.lr): r
        for r in results
        if r.task == task and r.method == method and r.held_out in environments and r.finished
    }
    wanted = len(environments) * len(grid.seeds) * len(grid.learning_rates)
    if len(mine) < wanted or not wanted:
        return Cell(None, None, len(mine), wanted)
    chosen = {
        (seed, environment): max(
            (mine[environment, seed, lr] for lr in grid.learning_rates), key=lambda r: _number(r.validation)
        )
        for seed in grid.seeds
        for environment in environments
    }
    by_seed = [mean([_number(chosen[seed, e].score) for e in environments]) for seed in grid.seeds]
    runs = list(chosen.values())
    return Cell(
        mean(by_seed),
        deviation(by_seed),
        len(mine),
        wanted,
        mean([_number(r.block_compute) for r in runs]),
        mean([r.ffns for r in runs]),
        mean([_number(r.expert_count) for r in runs]),
        tuple(by_seed),
    )


def average(cells: Sequence[Cell]) -> Cell:
    """Mean over data sets, seed by seed; no value unless every entry has one, with as many seeds each."""
    if not cells or any(c.mean is None for c in cells) or len({len(c.by_seed) for c in cells}) > 1:
        return lacking(cells)
    done, wanted = sum(c.done for c in cells), sum(c.wanted for c in cells)
    by_seed = [mean(scores) for scores in zip(*(c.by_seed for c in cells), strict=True)]
    return Cell(
        mean(by_seed),
        deviation(by_seed),
        done,
        wanted,
        mean([_number(c.block_compute) for c in cells]),
        mean([_number(c.ffns) for c in cells]),
        mean([_number(c.expert_count) for c in cells]),
        tuple(by_seed),
    )


def lacking(cells: Sequence[Cell]) -> Cell:
    """What stands for several entries that do not all have a value: how many of their runs are there.

    Where all that were planned are there, and it is the plan that leaves something out, no number of runs says so.
    """
    done, wanted = sum(c.done for c in cells), sum(c.wanted for c in cells)
    whole = done == wanted or any(c.wanted == 0 for c in cells)
    return Cell(None, None, 0, 0) if whole else Cell(None, None, done, wanted)


def mean_over_methods(cells: Sequence[Cell]) -> Cell:
    """ "Standard MoE, average": mean and deviation of several methods' means, as in the paper's GLUE table."""
    means = [c.mean for c in cells if c.mean is not None]
    if not cells or len(means) < len(cells):
        return lacking(cells)
    done, wanted = sum(c.done for c in cells), sum(c.wanted for c in cells)
    return Cell(mean(means), deviation(means), done, wanted)


def best_of_methods(cells: Sequence[Cell]) -> Cell:
    """ "Standard MoE, best": the entry with the highest mean; it needs all of them."""
    if not cells or any(c.mean is None for c in cells):
        return lacking(cells)
    return max(cells, key=lambda c: _number(c.mean))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def deviation(values: Sequence[float]) -> float | None:
    """Standard deviation of a sample, over n - 1; None for a single value."""
    if len(values) < 2:
        return None
    centre = mean(values)
    return sqrt(sum((value - centre) ** 2 for value in values) / (len(values) - 1))


def _number(value: float | None) -> float:
    assert value is not None
    return value
