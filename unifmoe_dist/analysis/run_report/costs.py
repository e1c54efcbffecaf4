"""The paper's cost table for a run's own model, and for every method of that table at the run's backbone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from unifmoe_dist.analysis.cost import Cost, count_cost
from unifmoe_dist.analysis.cost_measure import MeasuredCost, measure_cost
from unifmoe_dist.analysis.cost_paper import DERIVED
from unifmoe_dist.analysis.run_report.loading import NEUTRAL, LoadedRun
from unifmoe_dist.analysis.run_report.sample import Sample
from unifmoe_dist.baselines.methods import METHODS, with_options
from unifmoe_dist.baselines.tables import BENCHMARKS
from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.base import logits_of
from unifmoe_dist.engine import build
from unifmoe_dist.engine.batches import TrainBatches
from unifmoe_dist.engine.evaluate import collect_usage
from unifmoe_dist.engine.ranks import seed_everything
from unifmoe_dist.upcycling import moe_layers
from unifmoe_dist.usage import UsageSummary

EVAL_ITEMS = 64
"""Items of an inference step, as in the paper."""


@dataclass(frozen=True)
class CostColumn:
    """A model of the table.

    Args:
        label: Name for readers.
        method: Method of the paper's table, or None.
        trained: Whether the counts are at the routing of a trained run; otherwise at that of new layers.
        cost: What was counted.
        measured: Seconds and memory, if they were measured.
    """

    label: str
    method: str | None
    trained: bool
    cost: Cost
    measured: MeasuredCost | None


def own_cost(run: LoadedRun, sample: Sample, usage: Mapping[str, UsageSummary], measure: bool) -> CostColumn:
    """The run's model as it was trained."""
    cost = count_cost(run.model, sample.batch(EVAL_ITEMS)[0], usage)
    measured = _measure(run, sample, lambda: copy.deepcopy(run.model).cpu()) if measure else None
    return CostColumn(f"{run.method} ({run.name})", run.paper_method, True, cost, measured)


def method_costs(run: LoadedRun, sample: Sample, own: CostColumn) -> list[CostColumn]:
    """Every method of the paper's table at the run's backbone, data and layers, the run's own in its place."""
    columns = [] if own.method in DERIVED else [own]
    for name in tqdm(DERIVED, desc="cost of methods", disable=None, leave=False):
        columns.append(own if own.method == name else _fresh(run, sample, name))
    return columns


def _fresh(run: LoadedRun, sample: Sample, name: str) -> CostColumn:
    """A method in new layers: upcycled from the backbone, not trained."""
    config = method_config(run.config, name)

    def make() -> nn.Module:
        seed_everything(run.config.seed)
        return build.build_model(config, run.task)

    model = make().to(run.device).eval()
    inputs, _ = sample.batch(EVAL_ITEMS)
    with torch.no_grad():
        model(**inputs)
    cost = count_cost(model, inputs, collect_usage(model, run.ranks))
    del model
    return CostColumn(METHODS[name].label, name, False, cost, _measure(run, sample, make))


def method_config(config: TrainConfig, name: str) -> TrainConfig:
    """A run's configuration with a method of the paper's table in place of its own."""
    options = {**NEUTRAL, "model.capacity_factor": None}
    if config.model.moe in ("emoe", "emoe_learn"):  # its experts are slices: their number means nothing elsewhere
        options["model.num_experts"] = TrainConfig().model.num_experts
    own = BENCHMARKS[config.data.task].method_options.get(name, {})
    return with_options(config, {**options, **METHODS[name].options, **own})


def _measure(run: LoadedRun, sample: Sample, make: Callable[[], nn.Module]) -> MeasuredCost:
    batches = TrainBatches(run.task, run.config.data.batch_size, run.config.seed, 0, 1, 1)
    (train,) = batches.step(0)
    return measure_cost(make, loss_of, train, sample.batch(EVAL_ITEMS)[0], run.device)


def loss_of(model: nn.Module, inputs: Mapping[str, Tensor], labels: Tensor) -> Tensor:
    """What the trainer minimises under plain risk minimisation: the task loss and the layers' own."""
    loss = F.cross_entropy(logits_of(model(**inputs)), labels)
    for layer in moe_layers(model).values():
        loss = loss + layer.auxiliary_weight * layer.auxiliary_loss()
    return loss
