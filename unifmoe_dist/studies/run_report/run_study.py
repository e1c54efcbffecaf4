"""Everything that is computed about one run; page_data.py and templates/ show it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unifmoe_dist.data.task import logits_of
from unifmoe_dist.errors import UserError
from unifmoe_dist.layer import UniFMoELayer
from unifmoe_dist.methods.topk import TopKConfig
from unifmoe_dist.runtime import heartbeat
from unifmoe_dist.studies.diagnostics.diagnosis import Diagnosis, Settings, as_record, diagnose
from unifmoe_dist.studies.diagnostics.residual_router import RouterTraining, train_router_on_task
from unifmoe_dist.studies.diagnostics.shared_channels import FrozenExperts, shared_sets
from unifmoe_dist.studies.records import plain
from unifmoe_dist.studies.run_report.loaded_run import LoadedRun, layer_names
from unifmoe_dist.studies.run_report.method_costs import CostColumn, method_costs, own_cost
from unifmoe_dist.studies.run_report.sample import (
    IMAGES,
    MOST_TOKENS,
    Masks,
    Sample,
    draw_sample,
    ink_masks,
    places_of,
    read_masks,
)
from unifmoe_dist.studies.usage import layer_usage
from unifmoe_dist.studies.usage.capture import Capture, capture, expert_scores
from unifmoe_dist.studies.usage.token_strings import token_strings
from unifmoe_dist.train.batches import TrainBatches
from unifmoe_dist.train.evaluate import collect_usage
from unifmoe_dist.train.nested import to_device
from unifmoe_dist.upcycling import moe_layers
from unifmoe_dist.usage import UsageSummary


@dataclass(frozen=True)
class StudyOptions:
    """How much is computed."""

    most_tokens: int = MOST_TOKENS  # that are looked at
    most_items: int | None = None  # images or sentences that are looked at, in place of a number of tokens
    router_steps: int = 400  # training steps of the residual router and of its control
    delta: float = Settings.delta  # least alignment of a channel that two experts share
    measure: bool = False  # seconds and memory
    methods: bool = False  # build every method of the paper's tables, and count and measure its cost too
    masks: Path | None = None  # folder of label images for the test images
    of_class: str | None = None  # name or number of the class whose images are shown; None shows any
    images: int | None = None  # that are shown with the C_B of their patches
    threshold: int | None = None  # C_B from which on patches are outlined; None outlines the highest tenth


@dataclass(frozen=True)
class ElementStudy:
    """Usage by element, layer by layer."""

    masks: Masks
    usage: Mapping[str, layer_usage.ElementUsage]

    def record(self) -> dict[str, Any]:
        """Every number."""
        return {
            "images": len(self.masks.sample.places),
            "from_files": self.masks.folder is not None,
            "names": {number: self.masks.name(number) for usage in self.usage.values() for number in usage.elements},
            "layers": self.usage,
        }


@dataclass(frozen=True)
class RunStudy:
    """What was found about a run."""

    run: LoadedRun
    sample: Sample  # the test data that were looked at
    captured: Mapping[str, Capture]  # routing of every MoE layer on them; empty for a dense run
    shown: Sample  # the test data that are shown one by one
    shown_captured: Mapping[str, Capture]  # routing on them
    executed: Mapping[str, UsageSummary]  # what its MoE layers executed on the sample
    usage: Mapping[str, layer_usage.LayerUsage]  # of its UniF-MoE layers
    texts: Mapping[str, list[layer_usage.TextCompute]]  # C_B token by token there, of a run on text
    elements: ElementStudy | None  # use by semantic element, of a run on images with masks
    diagnoses: Mapping[str, Diagnosis]  # of its layers that send tokens to a fixed number of experts, at least two
    costs: list[CostColumn]  # of its own model, and of the paper's methods if they were asked for
    costs_missing: Mapping[str, str]  # by method's label, what stands against building it here

    def record(self) -> dict[str, Any]:
        """Every number, as JSON can hold it."""
        run, usage, texts = self.run, self.usage.items(), self.texts.items()
        return plain(
            {
                "name": run.name,
                "folder": str(run.folder),
                "checkpoint": run.checkpoint.name,
                "step": run.step,
                "options": run.config,
                "summary": run.summary,
                "modules": {name: module for module, name in layer_names(list(moe_layers(run.model))).items()},
                "sample": {
                    "items": len(self.sample.places),
                    "tokens": {name: len(c.item) for name, c in self.captured.items()},
                },
                "executed": self.executed,
                "usage": {name: layer_usage.usage_record(layer) for name, layer in usage},
                "tokens": {name: layer_usage.token_means(layer).to_dict("records") for name, layer in texts},
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
    folder, unif = options.masks, [any(map(_is_unif, run.layers.values())) for run in runs]
    if folder is None:
        return [None] * len(runs)
    if not any(unif):
        names = " and ".join(run.name for run in runs)
        raise UserError(f"--masks shows what UniF-MoE layers use, but {names} has none; leave it out.")
    several = zip(runs, unif, strict=True)
    return [read_masks(run, folder, options.most_tokens, options.most_items) if use else None for run, use in several]


def _is_unif(layer: Any) -> bool:
    return isinstance(layer, UniFMoELayer)


def shows_patches(run: LoadedRun) -> bool:
    """Whether there is a C_B of patches to show: UniF-MoE layers on images."""
    return not run.is_text and any(map(_is_unif, run.layers.values()))


def study(run: LoadedRun, options: StudyOptions, masks: Masks | None = None) -> RunStudy:
    """Look at a run's layers on some of its test data, diagnose them, and count what its model costs.

    `masks`, if given, are of its test images (`find_masks`).
    """
    sample, layers = draw_sample(run, options.most_tokens, options.most_items), run.layers
    diagnosed = {name: layer for name, layer in layers.items() if can_be_diagnosed(layer)}
    captured: dict[str, Capture] = {}
    for layer in layers.values():
        layer.usage.reset()
    if layers:
        captured = capture(run.model, layers, sample.batches(f"{run.name}: layers"), keep_tokens=bool(diagnosed))
    counted = collect_usage(run.model, run.ranks)
    executed = {name: counted[module] for module, name in layer_names(list(counted)).items()}
    unif = {name: layer for name, layer in layers.items() if _is_unif(layer)}
    usage = {
        name: layer_usage.study_layer(captured[name].routing, layer.router, layer.experts)
        for name, layer in unif.items()
    }
    texts: dict[str, list[layer_usage.TextCompute]] = {}
    if usage and run.is_text:
        tokenizer = run.facts.tokenizer(run.config)
        strings = [token_strings(tokenizer, item[0]) for item in sample.items(0, len(sample.places))]
        texts = {name: layer_usage.text_compute(captured[name], strings) for name in usage}
    elements = None
    if usage and masks is not None:
        seen = capture(run.model, layers, masks.sample.batches(f"{run.name}: elements"))
        elements = _study_elements(run, masks, seen)
    elif usage and run.facts.stroke_above is not None:
        elements = _study_elements(run, ink_masks(run, sample), captured)
    shown, seen_shown = sample, captured
    if usage and (options.of_class is not None or options.images is not None):
        shown = draw_sample(run, most_items=options.images or IMAGES, among=places_of(run, options.of_class))
        seen_shown = capture(run.model, layers, shown.batches(f"{run.name}: images"))
    diagnoses = {name: diagnose_layer(run, name, layer, captured[name], options) for name, layer in diagnosed.items()}
    heartbeat.doing(f"{run.name}: cost of the model")
    own = own_cost(run, sample, counted, options.measure)
    costs, missing = method_costs(run, sample, own, options.measure) if options.methods else ([own], {})
    found = usage, texts, elements, diagnoses, costs, missing
    return RunStudy(run, sample, captured, shown, seen_shown, executed, *found)


def _study_elements(run: LoadedRun, masks: Masks, captured: Mapping[str, Capture]) -> ElementStudy:
    """Group what UniF-MoE layers decided on the images of the masks by element."""
    grid = layer_usage.PatchGrid.of(run.model)
    by_element = {name: layer_usage.element_usage(one, grid, masks.elements) for name, one in captured.items()}
    return ElementStudy(masks, by_element)


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
    data, seed = run.config.data, run.config.seed
    anew = data.sampling == "replacement"
    batches = TrainBatches(run.task, data.batch_size, seed, 0, 1, 1, data.workers, anew)
    try:
        for step in heartbeat.followed(range(steps), progress):
            for inputs, labels in batches.step(step):
                yield to_device(inputs, run.device, torch.float32), labels.to(run.device)
    finally:
        batches.close()


def _task_loss(output: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits_of(output), labels)
