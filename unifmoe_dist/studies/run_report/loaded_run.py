"""A run's folder as what an analysis needs: its options, data, trained model and records."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.pretrained import quiet
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.data.task import Task, TaskData
from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.registry import METHODS
from unifmoe_dist.runtime import heartbeat
from unifmoe_dist.runtime.ranks import Ranks, seed_everything
from unifmoe_dist.studies.records import read_metrics, read_summary
from unifmoe_dist.train import checkpoint
from unifmoe_dist.train.cli import load_train_config
from unifmoe_dist.train.own_model import own_model, own_task
from unifmoe_dist.upcycling import moe_layers

NEUTRAL: dict[str, Any] = {
    "algorithm.name": "erm",
    "model.shared_demand": None,
    "model.fixed_experts": None,
    "model.block_choice": "prototype",
}
"""Options that methods change, as they are where a method does not."""


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """A run with the weights of one of its checkpoints."""

    name: str  # word for figures and headings; two runs of a comparison have different ones
    folder: Path
    config: TrainConfig
    checkpoint: Path  # folder of the weights
    step: int  # that they are of
    task: TaskData
    model: nn.Module  # in evaluation mode, on `device`, all experts here
    records: list[dict[str, Any]]  # lines of metrics.jsonl
    summary: dict[str, Any] | None  # summary.json; None while the run has not finished
    device: torch.device  # where the analysis computes

    @property
    def layers(self) -> dict[str, Any]:
        """MoE layers by their names for readers."""
        modules = moe_layers(self.model)
        return dict(zip(layer_names(list(modules)).values(), modules.values(), strict=True))

    @property
    def ranks(self) -> Ranks:
        """The one rank that analyses."""
        return Ranks(0, 1, self.device)

    @property
    def ranks_in_words(self) -> str:
        """Those that trained; nothing while the run has not finished."""
        count = self.summary["world_size"] if self.summary else 0
        return f"{count} rank{'s' if count > 1 else ''}" if count else ""

    @property
    def facts(self) -> Task:
        """What is known of its data set without data."""
        return find_task(self.config.data.task)

    @property
    def is_text(self) -> bool:
        return self.facts.language

    @property
    def method(self) -> str:
        """Name for readers of what was trained."""
        return METHODS[found].label if (found := self.paper_method) else self.config.model.moe

    @property
    def paper_method(self) -> str | None:
        """Name (methods/registry.py) of the method if its options are those of one with a fixed name."""
        as_many = ("model.num_experts", "model.max_experts")  # as the run has
        for method in METHODS.values():
            options = {**NEUTRAL, **method.options, **self.facts.method_options.get(method.name, {})}
            if all(attrgetter(name)(self.config) == value for name, value in options.items() if name not in as_many):
                return method.name
        return None


def layer_names(modules: Sequence[str]) -> dict[str, str]:
    """Names for readers by module name: "layer 3" for blocks.3.mlp, unless two modules would share it."""
    numbers = [re.search(r"(?:^|\.)(\d+)(?=\.|$)", module) for module in modules]
    short = [f"layer {number[1]}" if number else module for number, module in zip(numbers, modules, strict=True)]
    return dict(zip(modules, short if len(set(short)) == len(short) else modules, strict=True))


def load_run(folder: Path, name: str = "best", label: str | None = None, data_root: Path | None = None) -> LoadedRun:
    """Load a run's checkpoint on the device at hand. Weights come from the checkpoint alone: no others are fetched.

    Args:
        folder: The run's folder.
        name: "best", "latest" or "step-N".
        label: Its name in the report; None takes the folder's.
        data_root: Folder of the data set's files; None takes the run's own.

    Raises:
        UserError: the folder is no run, has no such checkpoint, or its data are not there.
    """
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder} is not a run; give the folder that a training run wrote.")
    config = load_train_config(str(folder / "config.yaml"))
    if not checkpoint.complete(folder / "checkpoints"):
        raise UserError(
            f"{folder} holds no checkpoint yet, so there are no trained weights to look into; if the run is going on, "
            f"wait for its first evaluation (every {config.eval_every} steps), otherwise train it anew."
        )
    saved, summary = checkpoint.latest(folder, name), read_summary(folder)
    if summary is None and (path := folder / "summary.json").is_file():
        raise UserError(f"{path} cannot be read; test the run again with launch/evaluate.py.")
    config.parallel.gradient_checkpointing = False
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seed_everything(config.seed)
    heartbeat.doing(f"reading the data of {config.data.task} and the weights of {folder}")
    task = own_task(folder, config, data_root)
    with quiet():  # the checkpoint replaces the weights that it would report
        model = own_model(folder, config)
    checkpoint.load_weights(saved, model)
    step = int(checkpoint.load_progress(saved)["step"])
    records = read_metrics(folder) if (folder / "metrics.jsonl").is_file() else []
    label = label or folder.resolve().name
    return LoadedRun(label, folder, config, saved, step, task, model.to(device).eval(), records, summary, device)
