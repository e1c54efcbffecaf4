"""How runs went: loss, score and computation over steps, expert and block usage; as the plots of one run too."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from unifmoe_dist.data.metrics import ACCURACY, Metric, metric_named
from unifmoe_dist.studies.figures.style import EXPERT_COLOUR, SHARED_COLOUR, bars, label, panels, plain, save
from unifmoe_dist.studies.records import read_metrics

Records = Sequence[Mapping[str, Any]]
"""Lines of a metrics.jsonl."""

_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red")


def of_kind(records: Records, kind: str) -> list[Mapping[str, Any]]:
    """Training or validation records."""
    return [record for record in records if record["kind"] == kind]


def curves_figure(runs: Mapping[str, Records]) -> Figure:
    """Training losses, each on an axis of its own, and training and validation scores.

    An auxiliary loss is of another size and falls by orders of magnitude: on one axis with it the task loss would be a
    flat line. A run named "" is not named in legends.
    """
    auxiliary = any(record["div_loss"] for records in runs.values() for record in of_kind(records, "train"))
    figure, ((left, *middle, right),) = panels(1, 3 if auxiliary else 2, 12 if auxiliary else 9, 3.4)
    metrics: set[Metric] = set()
    for number, (name, records) in enumerate(runs.items()):
        train, validation = of_kind(records, "train"), of_kind(records, "validation")
        colour, second = _COLOURS[2 * number % 4], _COLOURS[(2 * number + 1) % 4]
        where = f"{plain(name)}: " if name else ""
        steps = [r["step"] for r in train]
        left.plot(steps, [r["task_loss"] for r in train], color=colour, label=f"{where}task loss")
        if any(r["div_loss"] for r in train):
            middle[0].plot(steps, [r["div_loss"] for r in train], color=colour, label=f"{where}auxiliary loss")
        chosen = metric_named(validation[-1]["metric"]) if validation else ACCURACY
        scores = {ACCURACY: f"{where}validation"} if chosen.unit else {}  # one axis for what is counted in per cent
        if scores:
            batches = [ACCURACY.scale * r["accuracy"] for r in train]
            right.plot(steps, batches, color=colour, alpha=0.5, label=f"{where}training batches")
        scores.setdefault(chosen, f"{where}validation, {chosen.title}")
        steps = [r["step"] for r in validation]
        for style, (metric, text) in zip(("o-", "s--"), scores.items(), strict=False):
            values = [metric.scale * r[metric.name] for r in validation]
            right.plot(steps, values, style, color=second, markersize=4, label=text)
        metrics |= scores.keys()
    for axis in (left, *middle):
        if axis.get_lines():
            axis.set_yscale("log")
    what = next(iter(metrics)).title if len(metrics) == 1 else "score"
    units = {metric.unit for metric in metrics if metric.unit}
    label(left, "step", "loss (log scale)", "Training loss")
    label(right, "step", f"{what} ({units.pop()})" if units else what, what.capitalize())
    for axis in middle:
        label(axis, "step", "loss, unweighted (log scale)", "Auxiliary loss of the layers")
    for axis in (left, *middle, right):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(axis.get_lines()) > 1 or any(runs):
            axis.legend(frameon=False, fontsize=8)
    return figure


def compute_figure(runs: Mapping[str, Records]) -> Figure | None:
    """Mean C_B, k and alpha of every MoE layer over training; None where it never changes, or no run has a layer.

    A fixed number of experts per token is left out: it is what the options say. Runs differ by line style, layers by
    colour. Where no block is ever shared there is no alpha to draw.
    """
    trained = {name: train for name, records in runs.items() if _varies(train := of_kind(records, "train"))}
    if not trained:
        return None
    quantities = [("block_compute", "blocks per token", "$C_B$"), ("expert_count", "experts per token", "$k$")]
    if any(layer["shared_demand"] for train in trained.values() for layer in train[-1]["layers"].values()):
        quantities.append(("shared_demand", "shared demand", r"$\alpha$"))
    figure, (axes,) = panels(1, len(quantities), 1.4 + 3.2 * len(quantities), 3.4)
    for axis, (key, text, title) in zip(axes, quantities, strict=True):
        for style, (name, train) in zip(("-", "--", ":", "-."), trained.items(), strict=False):
            for colour, layer in zip(_COLOURS * len(train[-1]["layers"]), train[-1]["layers"], strict=False):
                shown = [(r["step"], r["layers"][layer][key]) for r in train if layer in r["layers"]]
                known = f"{plain(name)}: {layer}" if name else layer
                axis.plot(*zip(*shown, strict=True), style, color=colour, label=known)
        label(axis, "step", f"mean {text}", title)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def _varies(train: Records) -> bool:
    """Whether the mean C_B differs between steps or layers; means over a batch carry rounding errors."""
    means = [layer["block_compute"] for record in train for layer in record["layers"].values()]
    return bool(means) and max(means) - min(means) > 1e-6 * max(means)


def usage_figure(record: Mapping[str, Any]) -> Figure:
    """Loads of experts and, where blocks are shared, of shared blocks of every layer, in one record."""
    layers = record["layers"]
    kinds = [("expert_load", "expert", EXPERT_COLOUR)]
    if any(any(layer["block_load"]) for layer in layers.values()):
        kinds = [("expert_load", "residual expert", EXPERT_COLOUR), ("block_load", "shared block", SHARED_COLOUR)]
    figure, axes = panels(len(layers), len(kinds), 4.5 * len(kinds), 2.6 * len(layers))
    for row, (name, layer) in zip(axes, layers.items(), strict=True):
        for axis, (key, text, colour) in zip(row, kinds, strict=True):
            bars(axis, layer[key], text, f"{name}: {text} usage, step {record['step']}", colour)
    return figure


def plot_run(folder: Path) -> list[Path]:
    """Write curves.png into folder/plots; with MoE layers usage.png and, where computation varies, compute.png too."""
    records = read_metrics(folder)
    validation = of_kind(records, "validation")
    figures = {"curves": curves_figure({"": records}), "compute": compute_figure({"": records})}
    if validation and validation[-1]["layers"]:
        figures["usage"] = usage_figure(validation[-1])
    (folder / "plots").mkdir(exist_ok=True)
    return [save(figure, folder / "plots" / f"{name}.png") for name, figure in figures.items() if figure is not None]


def draw_finished(folder: Path) -> None:
    """`plot_run` of a run that has just finished, which does not fail for want of its plots."""
    try:
        plot_run(folder)
    except Exception as error:  # a backend of matplotlib, fonts, the disk
        why = " ".join(str(error).split())
        print(f"warning: the plots could not be drawn ({why}); everything else is saved", file=sys.stderr)
