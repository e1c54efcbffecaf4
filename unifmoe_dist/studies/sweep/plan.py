"""From data sets, held-out environments, seeds, learning rates and methods to runs with a folder each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.config.named import made_of
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.registry import find_method
from unifmoe_dist.studies.tables import SEEDS
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
class Run:
    """One training run of a sweep.

    Args:
        task: Data set.
        held_out: Environment held out; None for language.
        method: Method, by name.
        seed: Seed.
        lr: Peak learning rate, if the sweep chooses one; None is the base configuration's.
        config: The resolved configuration, with the run's folder as output.
    """

    task: str
    held_out: str | None
    method: str
    seed: int
    lr: float | None
    config: TrainConfig = field(compare=False, repr=False)

    @property
    def folder(self) -> Path:
        assert self.config.output is not None
        return Path(self.config.output)

    @property
    def name(self) -> str:
        """A run in a few words."""
        return _in_words(self.task, self.held_out, self.method, self.seed, self.lr)


def _in_words(task: str, held_out: str | None, method: str, seed: int, lr: float | None) -> str:
    place = task if held_out is None else f"{task} {held_out}"
    return f"{place} {method} seed {seed}" + ("" if lr is None else f" lr {lr:g}")


@dataclass(frozen=True)
class Selection:
    """What to run; empty lists of environments and learning rates take each data set's own.

    Args:
        tasks: Data sets.
        methods: Methods, by name.
        held_out: Environments to hold out in turn.
        seeds: Seeds.
        learning_rates: Peak learning rates.
        settings: Options of every run as KEY=VALUE, in place of the base configuration's; a method's own come last.
        config: Base configuration of every data set; None takes each data set's own.
    """

    tasks: Sequence[str]
    methods: Sequence[str]
    held_out: Sequence[str] = ()
    seeds: Sequence[int] = SEEDS
    learning_rates: Sequence[float] = ()
    settings: Sequence[str] = ()
    config: Path | None = None


def expand(selection: Selection, output: Path, configs: Path) -> list[Run]:
    """Every run of a selection, seed by seed, so that a sweep that is stopped leaves whole seeds.

    Args:
        selection: What to run.
        output: Folder that holds the runs' folders.
        configs: Folder of the data sets' base configurations.

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
        for held_out, method, lr in product(environments, selection.methods, rates):
            runs.append(_run(task, held_out, method, seed, lr, base, output))
    if selection.held_out:
        known = {name for task in selection.tasks for name in find_task(task).environments}
        if unknown := [name for name in selection.held_out if name not in known]:
            raise UserError(
                f"--held-out {unknown[0]!r} is no environment of {', '.join(selection.tasks)}; "
                f"choose from {', '.join(sorted(known)) or 'other data sets: these have none'}."
            )
    return runs


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


@cache
def _base(path: Path, settings: tuple[str, ...]) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"base configuration {path} does not exist; give another with --config.")
    return parse_options(["--config", str(path), *(f"--{word}" for word in settings)], prog="sweep.py")


def _run(
    task: str, held_out: str | None, method: str, seed: int, lr: float | None, base: Mapping[str, Any], output: Path
) -> Run:
    leaf = f"seed{seed}" if lr is None else f"seed{seed}-lr{lr:g}"
    folder = output.joinpath(task, *([] if held_out is None else [folder_name(held_out)]), method, leaf)
    own = {**find_method(method).options, **find_task(task).method_options.get(method, {})}
    options = {"data.task": task, "data.held_out": held_out, "seed": seed, "output": str(folder), "optim.lr": lr}
    options = {name: value for name, value in options.items() if value is not None}
    try:
        config = made_of(TrainConfig, {**base, **own, **options, "resume": False, "progress": False})
        config.validate(world_size=1)
    except UserError as error:
        raise UserError(f"{_in_words(task, held_out, method, seed, lr)} cannot run: {error}") from error
    return Run(task, held_out, method, seed, lr, config)


def folder_name(text: str) -> str:
    """A name as part of a path: "Real World" -> "real-world"."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
