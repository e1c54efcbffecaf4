"""From data sets, held-out environments, seeds, learning rates and methods to runs with a folder each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.config.named import made_of
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.registry import find_method
from unifmoe_dist.studies.paper_tables import SEEDS
from unifmoe_dist.train.cli import parse_options

# What a sweep sets for each run, and how to say it instead.
_COORDINATES = {
    "data.task": "--tasks",
    "data.held_out": "--held-out",
    "seed": "--seeds",
    "output": "--output",
    "resume": "nothing: a sweep resumes what is half done",
    "model.moe": "--methods",
    "algorithm.name": "--methods",
}


@dataclass(frozen=True)
class RunIdentity:
    """Which training run of a sweep: what run.json says."""

    task: str
    held_out: str | None  # environment; None for language
    method: str
    seed: int
    lr: float | None  # peak learning rate, if the sweep chooses one; None is the base configuration's

    @property
    def identity(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(RunIdentity)}

    @property
    def name(self) -> str:
        """A run in a few words."""
        words = [self.task, self.held_out, self.method, f"seed {self.seed}"]
        return " ".join(word for word in words if word) + ("" if self.lr is None else f" lr {self.lr:g}")


@dataclass(frozen=True)
class Run(RunIdentity):
    """A planned run with its resolved configuration, which has the run's folder as output."""

    config: TrainConfig = field(compare=False, repr=False)

    @property
    def folder(self) -> Path:
        assert self.config.output is not None
        return Path(self.config.output)


@dataclass(frozen=True)
class Selection:
    """What to run; empty lists of environments and learning rates take each data set's own."""

    tasks: Sequence[str]
    methods: Sequence[str]
    held_out: Sequence[str] = ()  # environments to hold out in turn
    seeds: Sequence[int] = SEEDS
    learning_rates: Sequence[float] = ()  # peak
    settings: Sequence[str] = ()  # options of every run as KEY=VALUE; a method's own come last
    config: Path | None = None  # base configuration of every data set; None takes each data set's own
    chosen_rates: Mapping[tuple[str, str], float] = field(default_factory=dict)  # of each data set and method


def expand(selection: Selection, output: Path, configs: Path) -> list[Run]:
    """Every run of a selection, seed by seed, so that a sweep that is stopped leaves whole seeds.

    `output` will hold the runs' folders; `configs` has the data sets' base configurations.

    Raises:
        UserError: a name, option or value does not exist or does not fit.
    """
    for name in ("tasks", "methods", "seeds"):
        if not getattr(selection, name):
            raise UserError(f"a sweep needs at least one of --{name}.")
    _refuse_repeats(selection)
    runs = []
    for seed, task in product(selection.seeds, selection.tasks):
        data_set = find_task(task)
        path = selection.config or configs / data_set.base_config
        base = _base(path, tuple(selection.settings))
        wanted = selection.held_out or data_set.environments  # names that belong to other data sets are theirs
        environments: list[str | None] = [name for name in data_set.environments if name in wanted]
        environments = environments if data_set.environments else [None]
        rates: list[float | None] = [*(selection.learning_rates or data_set.learning_rates)] or [None]
        facts = len(data_set.environments), data_set.language
        methods = [m for m in selection.methods if find_method(m).fits(*facts)]
        for held_out, method, lr in product(environments, methods, rates):
            chosen = _chosen_rate(selection, task, method)
            runs.append(_run(RunIdentity(task, held_out, method, seed, lr), {**base, **chosen}, output))
    if selection.held_out:
        known = {name for task in selection.tasks for name in find_task(task).environments}
        if unknown := [name for name in selection.held_out if name not in known]:
            raise UserError(
                f"--held-out {unknown[0]!r} is no environment of {', '.join(selection.tasks)}; "
                f"choose from {', '.join(sorted(known)) or 'other data sets: these have none'}."
            )
    if not runs:
        raise UserError(
            f"{', '.join(selection.methods)} compares environments or reads features of images, which "
            f"{', '.join(selection.tasks)} lacks; take other --methods or --tasks."
        )
    return runs


def _chosen_rate(selection: Selection, task: str, method: str) -> dict[str, float]:
    if not selection.chosen_rates:
        return {}
    if (task, method) not in selection.chosen_rates:
        raise UserError(f"--lr-from lacks runs of {method} on {task} at every learning rate; finish that sweep first.")
    return {"optim.lr": selection.chosen_rates[task, method]}


def _refuse_repeats(selection: Selection) -> None:
    for name in ("tasks", "methods", "held_out", "seeds", "learning_rates"):
        values = list(getattr(selection, name))
        if repeated := [value for value in values if values.count(value) > 1]:
            raise UserError(f"--{name.replace('_', '-')} names {repeated[0]} more than once.")
    for word in selection.settings:
        key = word.partition("=")[0]
        if "=" not in word:
            raise UserError(f"--set {word!r} has no value; write it as KEY=VALUE, such as optim.lr=0.001.")
        if key in _COORDINATES:
            raise UserError(f"--set {key} is what a sweep varies; use {_COORDINATES[key]}.")
        if key == "optim.lr" and selection.learning_rates:
            raise UserError("--set optim.lr and --lr were both given; use one of them.")
    if selection.chosen_rates and selection.learning_rates:
        raise UserError("--lr-from and --lr were both given; use one of them.")


@cache
def _base(path: Path, settings: tuple[str, ...]) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"base configuration {path} does not exist; give another with --config.")
    return parse_options(["--config", str(path), *(f"--{word}" for word in settings)], prog="sweep.py")


def _run(run: RunIdentity, base: Mapping[str, Any], output: Path) -> Run:
    leaf = f"seed{run.seed}" if run.lr is None else f"seed{run.seed}-lr{run.lr:g}"
    places = [] if run.held_out is None else [folder_name(run.held_out)]
    folder = output.joinpath(run.task, *places, run.method, leaf)
    own = {**find_method(run.method).options, **find_task(run.task).method_options.get(run.method, {})}
    options = {"data.task": run.task, "data.held_out": run.held_out, "seed": run.seed, "optim.lr": run.lr}
    options = {name: value for name, value in options.items() if value is not None}
    fixed = {"output": str(folder), "resume": False, "progress": False}
    try:
        config = made_of(TrainConfig, {**base, **own, **options, **fixed})
        config.validate(world_size=1)
    except UserError as error:
        raise UserError(f"{run.name} cannot run: {error}") from error
    return Run(**run.identity, config=config)


def folder_name(text: str) -> str:
    """A name as part of a path: "Real World" -> "real-world"."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
