"""Everything that is computed about one run; the modules of sections show it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unifmoe_dist.data.registry import find_task
from unifmoe_dist.data.task import logits_of
from unifmoe_dist.errors import UserError
from unifmoe_dist.layer import UniFMoELayer
from unifmoe_dist.methods.topk import TopKConfig
from unifmoe_dist.runtime import heartbeat
from unifmoe_dist.studies.diagnostics.channels import FrozenExperts, shared_sets
from unifmoe_dist.studies.diagnostics.files import as_record
from unifmoe_dist.studies.diagnostics.routers import RouterTraining, train_router_on_task
from unifmoe_dist.studies.diagnostics.study import Diagnosis, Settings, diagnose
from unifmoe_dist.studies.records import plain
from unifmoe_dist.studies.run_report.costs import CostColumn, method_costs, own_cost
from unifmoe_dist.studies.run_report.loading import LoadedRun, layer_names
from unifmoe_dist.studies.run_report.sample import MOST_TOKENS, Sample, draw_sample, token_strings
from unifmoe_dist.studies.run_report.segments import ElementStudy, Masks, ink_masks, read_masks, study_elements
from unifmoe_dist.studies.usage.capture import Capture, capture, expert_scores
from unifmoe_dist.studies.usage.maps import TextCompute, text_compute, token_means
from unifmoe_dist.studies.usage.study import LayerUsage, study_layer, usage_record
from unifmoe_dist.train.batches import TrainBatches
from unifmoe_dist.train.evaluate import collect_usage, to_device
from unifmoe_dist.upcycling import moe_layers
from unifmoe_dist.usage import UsageSummary


@dataclass(frozen=True)
class StudyOptions:
    """How much is computed.

    Args:
        most_tokens: Tokens that are looked at.
        most_items: Items (images, sentences) that are looked at, in place of a number of tokens.
        router_steps: Training steps of the residual router and of its control.
        delta: Least alignment of a channel that two experts share.
        measure: Whether seconds and memory are measured.
        methods: Whether every method of the paper's tables is built, and its cost counted and measured, too.
        masks: Folder of label images for the test images.
    """

    most_tokens: int = MOST_TOKENS
    most_items: int | None = None
    router_steps: int = 400
    delta: float = Settings.delta
    measure: bool = False
    methods: bool = False
    masks: Path | None = None


@dataclass(frozen=True)
class RunStudy:
    """What was found about a run.

    Args:
        run: The run.
        sample: The test data that were looked at.
        captured: Routing of every MoE layer on them; empty for a dense run.
        executed: What its MoE layers executed on them.
        usage: Of its UniF-MoE layers.
        texts: C_B token by token in every UniF-MoE layer of a run on text; empty for images.
        elements: Use by semantic element, of a run on images with masks.
        diagnoses: Of its layers that send tokens to a fixed number of experts, at least two.
        costs: Of its own model, and of the paper's methods if they were asked for.
        costs_missing: By method's label, what stands against building it here.
    """

    run: LoadedRun
    sample: Sample
    captured: Mapping[str, Capture]
    executed: Mapping[str, UsageSummary]
    usage: Mapping[str, LayerUsage]
    texts: Mapping[str, list[TextCompute]]
    elements: ElementStudy | None
    diagnoses: Mapping[str, Diagnosis]
    costs: list[CostColumn]
    costs_missing: Mapping[str, str]

    def record(self) -> dict[str, Any]:
        """Every number, as JSON can hold it."""
        run = self.run
        return plain(
            {
                "name": run.name,
                "folder": str(run.folder),
                "checkpoint": run.checkpoint.name,
                "step": run.step,
                "options": asdict(run.config),
                "summary": run.summary,
                "modules": {name: module for module, name in layer_names(list(moe_layers(run.model))).items()},
                "sample": {
                    "items": len(self.sample.places),
                    "tokens": {name: len(c.item) for name, c in self.captured.items()},
                },
                "executed": {name: asdict(usage) for name, usage in self.executed.items()},
                "usage": {name: usage_record(usage) for name, usage in self.usage.items()},
                "tokens": {name: token_means(texts).to_dict("records") for name, texts in self.texts.items()},
                "elements": self.elements and self.elements.record(),
                "diagnoses": {name: as_record(diagnosis) for name, diagnosis in self.diagnoses.items()},
                "costs": [column.record() for column in self.costs],
                "costs_missing": self.costs_missing,
            }
        )


def find_masks(runs: Sequence[LoadedRun], options: StudyOptions) -> list[Masks | None]:
    """The masks of each run's test images from the folder of the options; None for a run that has no use for them.

    Raises:
        UserError: No run has UniF-MoE layers, or the masks do not fit.
    """
    if options.masks is None:
        return [None] * len(runs)
    unif = [any(isinstance(layer, UniFMoELayer) for layer in run.layers.values()) for run in runs]
    if not any(unif):
        names = " and ".join(run.name for run in runs)
        raise UserError(f"--masks shows what UniF-MoE layers use, but {names} has none; leave it out.")
    return [
        read_masks(run, options.masks, options.most_tokens, options.most_items) if has_unif else None
        for run, has_unif in zip(runs, unif, strict=True)
    ]


def study(run: LoadedRun, options: StudyOptions, masks: Masks | None = None) -> RunStudy:
    """Look at a run's layers on some of its test data, diagnose them, and count what its model costs.

    `masks`, if given, are of its test images (`find_masks`).
    """
    sample = draw_sample(run, options.most_tokens, options.most_items)
    layers = run.layers
    diagnosed = {name: layer for name, layer in layers.items() if can_be_diagnosed(layer)}
    captured: dict[str, Capture] = {}
    for layer in layers.values():
        layer.usage.reset()
    if layers:
        captured = capture(run.model, layers, sample.batches(f"{run.name}: layers"), keep_tokens=bool(diagnosed))
    counted = collect_usage(run.model, run.ranks)
    executed = {name: counted[module] for module, name in layer_names(list(counted)).items()}
    usage = {
        name: study_layer(captured[name].routing, layer.router)
        for name, layer in layers.items()
        if isinstance(layer, UniFMoELayer)
    }
    texts: dict[str, list[TextCompute]] = {}
    if usage and run.is_text:
        strings = token_strings(run, sample.items(0, len(sample.places)))
        texts = {name: text_compute(captured[name], strings) for name in usage}
    elements = None
    if usage and masks is not None:
        elements = study_elements(run, masks, {})
    elif usage and find_task(run.config.data.task).stroke_above is not None:
        elements = study_elements(run, ink_masks(run, sample), captured)
    diagnoses = {name: diagnose_layer(run, name, layer, captured[name], options) for name, layer in diagnosed.items()}
    heartbeat.doing(f"{run.name}: cost of the model")
    own = own_cost(run, sample, counted, options.measure)
    costs, missing = method_costs(run, sample, own, options.measure) if options.methods else ([own], {})
    return RunStudy(run, sample, captured, executed, usage, texts, elements, diagnoses, costs, missing)


def can_be_diagnosed(layer: Any) -> bool:
    """Whether the three observations can be made of a layer: several experts, a fixed number of them per token."""
    return isinstance(layer.config, TopKConfig) and layer.config.num_experts >= 2


def diagnose_layer(run: LoadedRun, name: str, layer: Any, captured: Capture, options: StudyOptions) -> Diagnosis:
    """The three observations on one layer, with the residual router and its control trained on the task."""
    assert captured.tokens is not None
    experts = FrozenExperts.of(layer)
    settings = Settings(delta=options.delta, router=RouterTraining(steps=options.router_steps))
    sets = shared_sets(experts, settings.delta)
    logits = []
    for extracted, what in ((sets, "residual router"), (sets.none_shared(), "its control")):
        batches = _training_batches(run, options.router_steps, f"{run.name}: {name}, {what}")
        weight = train_router_on_task(run.model, layer, extracted, batches, _task_loss, settings.router)
        logits.append(captured.tokens.float() @ weight.cpu().T)
    return diagnose(experts, captured.tokens, expert_scores(captured.routing), settings, *logits)


def _training_batches(run: LoadedRun, steps: int, progress: str) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """The batches that a training run of one rank would see."""
    data = run.config.data
    batches = TrainBatches(
        run.task, data.batch_size, run.config.seed, 0, 1, 1, data.workers, data.sampling == "replacement"
    )
    try:
        for step in heartbeat.followed(range(steps), progress):
            for inputs, labels in batches.step(step):
                yield to_device(inputs, run.device, torch.float32), labels.to(run.device)
    finally:
        batches.close()


def _task_loss(output: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(output), labels)
