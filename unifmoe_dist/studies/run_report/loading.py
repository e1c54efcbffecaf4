"""A run's folder as what an analysis needs: its options, data, trained model and records."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.data.task import TaskData
from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.registry import METHODS
from unifmoe_dist.runtime import heartbeat
from unifmoe_dist.runtime.ranks import Ranks, seed_everything
from unifmoe_dist.studies.records import read_metrics, read_summary
from unifmoe_dist.train import checkpoint
from unifmoe_dist.train.cli import load_train_config
from unifmoe_dist.train.own_model import own_model, own_task
from unifmoe_dist.upcycling import moe_layers


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """A run with the weights of one of its checkpoints.

    Args:
        name: Word for figures and headings; two runs of a comparison have different ones.
        folder: Where it is.
        config: Its options.
        checkpoint: Folder of the weights.
        step: Step that they are of.
        task: Its data.
        model: In evaluation mode, on `device`, all experts here.
        records: Lines of metrics.jsonl.
        summary: summary.json; None while the run has not finished.
        device: Where the analysis computes.
    """

    name: str
    folder: Path
    config: TrainConfig
    checkpoint: Path
    step: int
    task: TaskData
    model: nn.Module
    records: list[dict[str, Any]]
    summary: dict[str, Any] | None
    device: torch.device

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
    def is_text(self) -> bool:
        return find_task(self.config.data.task).language

    @property
    def method(self) -> str:
        """Name for readers of what was trained."""
        return METHODS[found].label if (found := self.paper_method) else self.config.model.moe

    @property
    def paper_method(self) -> str | None:
        """Name (methods/registry.py) of the method if its options are those of one with a fixed name."""
        config = self.config
        for method in METHODS.values():
            here = find_task(config.data.task).method_options.get(method.name, {})
            options = {**NEUTRAL, **method.options, **here}
            slots = ("model.num_experts", "model.max_experts")  # as many as the run has
            if all(attrgetter(name)(config) == value for name, value in options.items() if name not in slots):
                return method.name
        return None


def layer_names(modules: Sequence[str]) -> dict[str, str]:
    """Names for readers by module name: "layer 3" for blocks.3.mlp, unless two modules would share it."""
    numbers = [re.search(r"(?:^|\.)(\d+)(?=\.|$)", module) for module in modules]
    short = [f"layer {number[1]}" if number else module for number, module in zip(numbers, modules, strict=True)]
    return dict(zip(modules, short if len(set(short)) == len(short) else modules, strict=True))


NEUTRAL: dict[str, Any] = {
    "algorithm.name": "erm",
    "model.shared_demand": None,
    "model.fixed_experts": None,
    "model.block_choice": "prototype",
}
"""Options that methods change, as they are where a method does not."""


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
    with _quiet_transformers():
        model = own_model(folder, config)
    checkpoint.load_weights(saved, model)
    return LoadedRun(
        name=label or folder.resolve().name,
        folder=folder,
        config=config,
        checkpoint=saved,
        step=int(checkpoint.load_progress(saved)["step"]),
        task=task,
        model=model.to(device).eval(),
        records=read_metrics(folder) if (folder / "metrics.jsonl").is_file() else [],
        summary=summary,
        device=device,
    )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No report of pretrained weights and no bar while a model is built: the checkpoint replaces those weights."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
