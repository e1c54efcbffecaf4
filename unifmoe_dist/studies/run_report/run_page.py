"""The report of one run, or of several: templates/run_report.html, and what it asks for besides studies."""

import importlib.metadata
import json
import math
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from unifmoe_dist import __version__
from unifmoe_dist.config import TrainConfig
from unifmoe_dist.config.named import as_word, by_dotted_name
from unifmoe_dist.files import write_text
from unifmoe_dist.runtime import heartbeat
from unifmoe_dist.studies import training_plots
from unifmoe_dist.studies.figures import run_figures as figures
from unifmoe_dist.studies.figures import style
from unifmoe_dist.studies.page import write_page
from unifmoe_dist.studies.records import plain
from unifmoe_dist.studies.run_report import several_runs
from unifmoe_dist.studies.run_report.loaded_run import LoadedRun, layer_names
from unifmoe_dist.studies.run_report.run_study import ElementStudy, RunStudy, StudyOptions, find_masks, study
from unifmoe_dist.studies.run_report.sample import IMAGES, label_names, pixels, places_of
from unifmoe_dist.studies.usage import layer_usage
from unifmoe_dist.train.cli import dump_train_config
from unifmoe_dist.train.options import writing_to
from unifmoe_dist.upcycling import moe_layers

SENTENCES = 6
OFTEN, TOKENS_SHOWN = 5, 8
"""How often a token is seen that a table shows, and how many of the highest and of the lowest C_B it shows."""
MOST_ALONE = 4
"""Runs that are each shown by themselves too; of more, what they show together."""
MOST_DRAWN = 12
"""Elements of a figure; the table has all."""
HIGH_SHARE = 0.1
"""Share of the patches that is outlined at most, where their C_B are not all equal."""
_PACKAGES = ("torch", "deepspeed", "timm", "transformers", "numpy", "scipy", "matplotlib")


def report_runs(runs: Sequence[LoadedRun], output: Path, options: StudyOptions, command: str) -> Path:
    """Study runs and write the report; returns the page's path.

    Args:
        runs: The run, and perhaps others to show beside it; their names differ.
        output: Folder of the page and of what belongs to it. Files of an older report there are replaced.
        options: How much is computed.
        command: What to type for the same report, for its reader.

    Raises:
        UserError: the folder cannot be written.
    """
    with writing_to(output):  # before the work, not after
        first, *others = zip(runs, find_masks(runs, options), strict=True)
        alone = replace(options, methods=False)  # one set of methods will do
        found = [study(first[0], options, first[1]), *(study(run, alone, masks) for run, masks in others)]
        heartbeat.doing("writing the page and its figures")
        record: dict[str, Any] = {"runs": [one.record() for one in found]}
        if others:
            record["together"] = several_runs.record(found)
        if len(found) == 2:
            record["comparison"] = comparison_record(found)
        write_text(output / "numbers.json", json.dumps(plain(record), indent=1))
        modules = {"figures": figures, "curves": training_plots, "several": several_runs}
        asked = {"data": sys.modules[__name__], "options": options, **modules}
        return write_page(output, "run_report.html", found=found, runs=runs, command=command, **asked)


# -- what the template asks for ---------------------------------------------------------------------------------------


def records_by_name(runs: Sequence[LoadedRun]) -> dict[str, list[dict[str, Any]]]:
    """Lines of metrics.jsonl of runs that have any, layers by their names for readers; one run has the name ""."""

    def named(record: dict[str, Any]) -> dict[str, Any]:
        layers = record.get("layers") or {}
        return {**record, "layers": {name: layers[module] for module, name in layer_names(list(layers)).items()}}

    return {run.name if len(runs) > 1 else "": list(map(named, run.records)) for run in runs if run.records}


def changed_options(run: LoadedRun) -> list[tuple[str, str, str]]:
    """Options that differ from the defaults: name, value, default."""
    own, default = (by_dotted_name(asdict(config)) for config in (run.config, TrainConfig()))
    return [(name, as_word(value), as_word(default[name])) for name, value in own.items() if value != default[name]]


def all_options(run: LoadedRun) -> str:
    """As in config.yaml."""
    return dump_train_config(run.config).strip()


def environment(runs: Sequence[LoadedRun]) -> dict[str, str]:
    """Versions and devices of this analysis, and seed, ranks and modules of the training."""
    device = runs[0].device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    facts = {"unifmoe_dist": __version__, "Python": platform.python_version()}
    facts |= {package: importlib.metadata.version(package) for package in _PACKAGES}
    facts["analysed on"] = f"{device.type} ({name}), threads: {torch.get_num_threads()}"
    for run in runs:
        facts[f"{run.name}: seed"] = str(run.config.seed)
        facts[f"{run.name}: trained on"] = run.ranks_in_words or "unknown: not finished"
        facts[f"{run.name}: checkpoint"] = f"{run.checkpoint.name} (step {run.step})"
        modules = layer_names(list(moe_layers(run.model)))
        facts |= {f"{run.name}: {layer}": module for module, layer in modules.items()}
    return facts


def train_commands(runs: Sequence[LoadedRun]) -> str:
    """Commands that train runs anew, in folders of another name."""

    def command(run: LoadedRun) -> str:
        ranks = run.summary["world_size"] if run.summary else 1
        start = ["python"] if ranks == 1 else ["torchrun", "--nproc-per-node", str(ranks)]
        config, output = str(run.folder / "config.yaml"), f"{run.folder}-again"
        return shlex.join([*start, "launch/train.py", "--config", config, "--resume", "false", "--output", output])

    return "\n".join(map(command, runs))


def demand_threshold(compute: Tensor) -> int:
    """Least C_B that at most `HIGH_SHARE` of the patches reach; the largest there is where more reach even that.

    Beyond all values where they are all equal: then no patch stands out.
    """
    values = compute.unique().tolist()
    if len(values) == 1:
        return int(values[0]) + 1
    few = [v for v in values if layer_usage.high_demand(compute, v).double().mean() <= HIGH_SHARE]
    return int(min(few, default=values[-1]))


def patch_maps(found: RunStudy, wanted: int | None) -> Iterator[dict[str, Any]]:
    """Of every layer, some images with the C_B of their patches, outlined from the wanted C_B on, or the highest."""
    grid, (images, titles) = layer_usage.PatchGrid.of(found.run.model), _shown(found)
    for layer, captured in found.captured.items():
        compute = layer_usage.patch_compute(captured, grid)
        threshold = demand_threshold(compute) if wanted is None else wanted
        shown = layer_usage.patch_compute(found.shown_captured[layer], grid)[: len(images)]
        figure = figures.patch_figure(images, shown, threshold, titles)
        share = float(layer_usage.high_demand(compute, threshold).double().mean())
        yield {"layer": layer, "figure": figure, "grid": grid, "threshold": threshold, "share": share}


def patch_maps_of_all(found: Sequence[RunStudy], wanted: int | None) -> Iterator[dict[str, Any]]:
    """Of every layer that several UniF-MoE runs on images have, as many images of each, on one scale."""
    able = {one.run.name: one for one in found if one.usage and not one.run.is_text}
    grids = {name: layer_usage.PatchGrid.of(one.run.model) for name, one in able.items()}
    images, titles = {}, {}
    for name, one in able.items():
        images[name], titles[name] = _shown(one)
    if len(able) < 2 or len({(grids[name], images[name].shape[1:]) for name in able}) > 1:
        return
    count, grid = min(map(len, images.values())), next(iter(grids.values()))
    for layer in dict.fromkeys(layer for one in able.values() for layer in one.usage):
        here = {name: one for name, one in able.items() if layer in one.usage}
        if len(here) < 2:
            continue
        compute = torch.cat([layer_usage.patch_compute(one.captured[layer], grid) for one in here.values()])
        threshold = demand_threshold(compute) if wanted is None else wanted
        maps = [layer_usage.patch_compute(one.shown_captured[layer], grid)[:count] for one in here.values()]
        words = [f"{style.plain(name)}\n{title}" for name in here for title in titles[name][:count]]
        pictures = torch.cat([images[name][:count] for name in here])
        figure = figures.patch_figure(pictures, torch.cat(maps), threshold, words, min(count, 4))
        share = float(layer_usage.high_demand(compute, threshold).double().mean())
        yield {"layer": layer, "figure": figure, "threshold": threshold, "share": share, "count": count}


def _shown(found: RunStudy) -> tuple[Tensor, list[str]]:
    """The images that are shown, and the names of their classes."""
    count = IMAGES if found.shown is found.sample else len(found.shown.places)
    inputs, labels = found.shown.batch(count)
    names = label_names(found.run)
    return pixels(found.run, inputs["x"]), [style.plain(names[int(label)]) for label in labels]


def text_maps(found: RunStudy) -> Iterator[dict[str, Any]]:
    """Of every layer, some sentences token by token; and the tokens with the highest and lowest mean C_B."""
    titles = found.sample.titles(SENTENCES)
    for layer, texts in found.texts.items():
        means = layer_usage.token_means(texts).query("count >= @OFTEN")
        ends = means if len(means) <= 2 * TOKENS_SHOWN else means.iloc[[*range(TOKENS_SHOWN), *range(-TOKENS_SHOWN, 0)]]
        figure = figures.text_figure(texts[: len(titles)], titles)
        yield {"layer": layer, "figure": figure, "tokens": ends.to_dict("records")}


def element_map(run: LoadedRun, study: ElementStudy, usage: layer_usage.ElementUsage, of_class: str | None) -> Figure:
    """An image that shows many elements, of the class if one of those with a mask is, and what its most common elements
    use."""
    masks = study.masks
    wanted = set(places_of(run, of_class))
    items = [item for item, place in enumerate(masks.sample.places) if place in wanted] or range(len(masks.elements))
    shown = max(items, key=lambda item: len(masks.elements[item].unique()))
    image = pixels(run, run.task.collate(masks.sample.items(shown, 1))[0]["x"])[0]
    drawn = usage.most_common(MOST_DRAWN)
    return figures.element_figure(image, masks.elements[shown], drawn, list(map(masks.name, drawn.elements)))


def nothing_shared(found: RunStudy) -> tuple[list[str], float]:
    """Layers in which residual and complete responses are the same, and where a tenth of all channels is shared."""
    layers = {layer: d.sets for layer, d in found.diagnoses.items() if not d.sets.shared.any()}
    tenth = min((float(sets.alignment.flatten().quantile(0.9)) for sets in layers.values()), default=0.0)
    return list(layers), math.floor(100 * tenth) / 100


def by_gram_loss(found: Sequence[RunStudy]) -> list[RunStudy]:
    """The run with the smaller weight of the Gram loss, then the other; as given where the weights are equal."""
    return sorted(found, key=lambda one: one.run.config.optim.lambda_div)


def comparison_record(found: Sequence[RunStudy]) -> dict[str, Any]:
    """Change of the mean pair co-activation, by UniF-MoE layers that both runs have."""
    before, after = by_gram_loss(found)
    both = [layer for layer in found[0].usage if layer in found[1].usage]
    change = {layer: layer_usage.coactivation_change(before.usage[layer], after.usage[layer]) for layer in both}
    return {"from": before.run.name, "to": after.run.name, "coactivation_change": change}


def usage_of_both(ordered: Sequence[RunStudy], layers: Iterable[str]) -> dict[str, layer_usage.LayerUsage]:
    """Usage of these layers, each in both runs."""
    return {f"{one.run.name}, {layer}": one.usage[layer] for layer in layers for one in ordered}


def by_run(ordered: Sequence[RunStudy], layer: str) -> dict[str, layer_usage.LayerUsage]:
    """Usage of a layer by its run."""
    return {one.run.name: one.usage[layer] for one in ordered}


def with_weight(one: RunStudy) -> str:
    """A run's name with its weight of the Gram loss."""
    return f"{one.run.name} (λ = {one.run.config.optim.lambda_div:g})"
