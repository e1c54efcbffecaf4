"""The paper's cost table for a run's own model, and for every method of the paper's tables at the run's backbone."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unifmoe_dist.algorithms import Algorithm
from unifmoe_dist.config import TrainConfig
from unifmoe_dist.config.named import with_options
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.data.task import Batch
from unifmoe_dist.data.text import MAX_LENGTH
from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.registry import METHODS, method_of
from unifmoe_dist.runtime.heartbeat import followed
from unifmoe_dist.runtime.ranks import seed_everything
from unifmoe_dist.studies.cost.cost_table import Cost, MeasuredCost, count_cost, measure_cost, statistics_of
from unifmoe_dist.studies.paper_numbers import published_cost
from unifmoe_dist.studies.run_report.loaded_run import NEUTRAL, LoadedRun
from unifmoe_dist.studies.run_report.sample import Sample
from unifmoe_dist.studies.usage.layer_usage import PatchGrid
from unifmoe_dist.train import build
from unifmoe_dist.train.batches import TrainBatches
from unifmoe_dist.train.evaluate import collect_usage
from unifmoe_dist.upcycling import moe_layers
from unifmoe_dist.usage import UsageSummary

EVAL_ITEMS = 64
"""Items of an inference step, as in the paper; counting takes fewer where COUNTED_TOKENS are reached before."""

COUNTED_TOKENS = 4096


@dataclass(frozen=True)
class CostColumn:
    """A model of the table."""

    label: str  # name for readers
    method: str | None  # of the paper's tables
    trained: bool  # whether the counts are at the routing of a trained run; otherwise at that of new layers
    cost: Cost
    measured: MeasuredCost | None  # seconds and memory, if they were measured

    @property
    def family(self) -> str | None:
        return METHODS[self.method].family if self.method else None

    @property
    def statistics(self) -> dict[str, float]:
        """In the table's units."""
        return statistics_of(self.cost, self.measured)

    @property
    def published(self) -> dict[str, float]:
        """The paper's numbers."""
        return published_cost(self.method or "")

    def record(self) -> dict[str, Any]:
        """For numbers.json."""
        return {
            "label": self.label,
            "method": self.method,
            "trained": self.trained,
            **self.statistics,
            "device": self.measured and self.measured.device,
            "memory_kind": self.measured and self.measured.memory_kind,
        }


def own_cost(run: LoadedRun, sample: Sample, usage: Mapping[str, UsageSummary], measure: bool) -> CostColumn:
    """The run's model as it was trained."""
    cost = count_cost(run.model, _counted(run, sample)[0], usage)

    def deploy() -> nn.Module:
        return copy.deepcopy(run.model).cpu()

    def prepare() -> nn.Module:
        algorithm = build.build_algorithm(run.config, run.task)
        algorithm.model = deploy()
        return algorithm

    measured = _measure(run, sample, deploy, prepare) if measure else None
    return CostColumn(f"{run.method} ({run.name})", run.paper_method, True, cost, measured)


def method_costs(
    run: LoadedRun, sample: Sample, own: CostColumn, measure: bool
) -> tuple[list[CostColumn], dict[str, str]]:
    """Every method with a cost of its own at the run's backbone, data and layers, the run's own in its place; and, by
    method's label, what stands against building it here."""
    columns = [] if own.method in METHODS else [own]
    missing = {}
    names = [name for name, row in METHODS.items() if row.family != "combined"]
    for name in followed(names, "cost of methods"):
        try:
            columns.append(own if own.method == name else _fresh(run, sample, name, measure))
        except UserError as error:
            missing[METHODS[name].label] = str(error).rstrip(".")
    return columns, missing


def _fresh(run: LoadedRun, sample: Sample, name: str, measure: bool) -> CostColumn:
    """A method in new layers: upcycled from the backbone, not trained.

    Raises:
        UserError: It does not fit the run's backbone, number of experts or data.
    """
    config = method_config(run.config, name)

    def prepare() -> Algorithm:
        seed_everything(config.seed)
        return build.build_algorithm(config, run.task)

    def deploy() -> nn.Module:
        return prepare().model

    model = deploy().to(run.device).eval()
    inputs, _ = _counted(run, sample)
    with torch.no_grad():
        model(**inputs)
    cost = count_cost(model, inputs, collect_usage(model, run.ranks))
    del model
    measured = _measure(run, sample, deploy, prepare) if measure else None
    return CostColumn(METHODS[name].label, name, False, cost, measured)


def method_config(config: TrainConfig, name: str) -> TrainConfig:
    """A run's configuration with a method of the paper's tables in place of its own.

    Raises:
        UserError: It sends tokens to more experts than there are.
    """
    options = {**NEUTRAL, "model.capacity_factor": None, "optim.auxiliary_weight": None}
    if method_of(config.model.moe).slices:  # of a dense FFN: their number means nothing elsewhere
        options["model.num_experts"] = TrainConfig().model.num_experts
    own = find_task(config.data.task).method_options.get(name, {})
    options |= {**METHODS[name].options, **own}
    experts = options.get("model.num_experts", config.model.num_experts)
    if max(options.get("model.top_k") or 1, options["model.fixed_experts"] or 1) > experts:
        raise UserError(f"there are {experts} experts")
    return with_options(config, options)


def _counted(run: LoadedRun, sample: Sample) -> Batch:
    """Items that are counted on. Images of a run are all of one size, and texts at most MAX_LENGTH long."""
    length = MAX_LENGTH if run.is_text else PatchGrid.of(run.model).tokens
    return sample.batch(max(1, min(EVAL_ITEMS, COUNTED_TOKENS // length)))


def _measure(
    run: LoadedRun, sample: Sample, deploy: Callable[[], nn.Module], prepare: Callable[[], nn.Module]
) -> MeasuredCost:
    (train,) = TrainBatches(run.task, run.config.data.batch_size, run.config.seed, 0, 1, 1).step(0)
    return measure_cost(deploy, prepare, training_loss, train, sample.batch(EVAL_ITEMS)[0], run.device)


def training_loss(algorithm: nn.Module, inputs: Mapping[str, Tensor], labels: Tensor) -> Tensor:
    """What the trainer minimises: the algorithm's loss and the layers' own."""
    loss, _ = algorithm(inputs, labels, 0)
    for layer in moe_layers(algorithm).values():
        loss = loss + layer.auxiliary_weight * layer.auxiliary_loss()
    return loss
