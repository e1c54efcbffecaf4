"""Results of the benchmark: Markdown tables, bars for layers and models, lines for sweeps."""

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator, ScalarFormatter

from unifmoe_dist.files import write_text
from unifmoe_dist.studies.benchmark.side_by_side import Result, Timing
from unifmoe_dist.studies.figures.style import label, new_figure, save
from unifmoe_dist.studies.records import markdown

COLOURS = {"forward": "tab:blue", "training": "tab:orange"}
LABELS = {"forward": "forward", "training": "forward + backward"}
TICKS = [1, 1.2, 1.5, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100]
SWEPT = {"N": "tokens N", "d": "model width d", "K": "residual experts K"}


def write(path: Path, where: str, rate: float, key: str, found: list[Result] | dict[str, list[Result]]) -> str:
    """Write tables, JSON and a plot as path.*; returns the last table.

    Layers, models and sweeps have files of their own: timing one of them leaves the others as they are.
    """
    if isinstance(found, dict):
        tables = [sweep_table(swept, results) for swept, results in found.items()]
        plot_sweeps(found, where, path.with_suffix(".png"))
    else:
        tables = [table(result) for result in found]
        plot(found, where, path.with_suffix(".png"))
    record = {"where": where, "machine": platform.machine(), "matmul_flop_per_s": rate, key: found}
    write_text(path.with_suffix(".md"), "\n\n".join([where, *tables]) + "\n")
    write_text(path.with_suffix(".json"), json.dumps(record, indent=1, default=asdict))
    return tables[-1]


def plot(results: list[Result], where: str, path: Path) -> Path:
    """One panel per layer or model; a black mark shows the arithmetic of each contender, its floor."""
    tallest = max(len(result.timings) for result in results)
    figure = new_figure(7.2 * len(results), 1.4 + 0.42 * tallest)
    axes = figure.subplots(1, len(results), squeeze=False)[0]
    for axis, result in zip(axes, results, strict=True):
        _bars(axis, result)
    handles, labels = axes[0].get_legend_handles_labels()
    if results[0].shape is None:
        labels = [{"forward": "inference", LABELS["training"]: "training step"}.get(name, name) for name in labels]
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=3, fontsize=9, markerscale=0.4)
    figure.suptitle(where, fontsize=11)
    return save(figure, path)


def _bars(axis: Axes, result: Result) -> None:
    rows = np.arange(len(result.timings))[::-1]
    for offset, kind in ((0.2, "forward"), (-0.2, "training")):
        ratios = [result.ratio(t, kind) for t in result.timings]
        bars = axis.barh(rows + offset, ratios, height=0.38, color=COLOURS[kind], label=LABELS[kind])
        axis.bar_label(bars, fmt="  {:.2f}", fontsize=8)
    floors = {row: t.work for t, row in zip(result.timings, rows, strict=True) if t.work is not None}
    axis.plot(list(floors.values()), list(floors), "k|", markersize=22, label="arithmetic (floor)")
    axis.set_yticks(rows, [t.contender for t in result.timings])
    longest = (result.ratio(t, kind) for t in result.timings for kind in COLOURS)
    axis.set_xlim(0, 1.15 * max(*longest, *floors.values()))
    label(
        axis, "time, in dense FFNs" if result.shape else "time, in dense models", "", f"{result.name}: {result.sizes}"
    )
    axis.grid(visible=False, axis="y")


def plot_sweeps(sweeps: dict[str, list[Result]], where: str, path: Path) -> Path:
    """Time over the floor against the size that is swept: one column per sweep, forward above, training below.

    The dense contender, which is the floor, is a black line.
    """
    columns = [(swept, name) for swept, results in sweeps.items() for name in dict.fromkeys(r.name for r in results)]
    figure = new_figure(4.6 * len(columns), 7)
    axes = figure.subplots(2, len(columns), squeeze=False, sharex="col")
    contenders = dict.fromkeys(t.contender for rs in sweeps.values() for r in rs for t in r.timings[1:] if t.work)
    for column, (swept, name) in enumerate(columns):
        results = [r for r in sweeps[swept] if r.name == name]
        for axis, kind in zip(axes[:, column], COLOURS, strict=True):
            for number, contender in enumerate(contenders):
                points = {
                    _sizes(r)[swept]: r.over_floor(t, kind)
                    for r in results
                    for t in r.timings
                    if t.contender == contender
                }
                axis.plot(list(points), list(points.values()), "o-", color=f"C{number}", label=contender, markersize=4)
            _log_axis(axis)
        fixed = ", ".join(f"{letter}={size}" for letter, size in _sizes(results[0]).items() if letter != swept)
        ylabels = [f"{LABELS[kind]}: time / floor" if column == 0 else "" for kind in COLOURS]
        label(axes[0][column], "", ylabels[0], f"{name}: {fixed}")
        label(axes[1][column], SWEPT[swept], ylabels[1])
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=4, fontsize=9)
    figure.suptitle(where, fontsize=11)
    return save(figure, path)


def _log_axis(axis: Axes) -> None:
    axis.axhline(1, color="black", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(FixedLocator(TICKS))
    axis.yaxis.set_major_formatter(lambda tick, _: f"{tick:g}")
    axis.yaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.tick_params(labelsize=8, which="both")


def _sizes(result: Result) -> dict[str, int]:
    shape = result.shape
    assert shape is not None
    return {"N": shape.tokens, "d": shape.dim, "K": shape.experts, "B": shape.blocks}


def table(result: Result) -> str:
    """Times, ratios to the dense contender and to the floor, share of a large matrix product's rate, and memory.

    Below it stand the memory against top-2 mixtures and every contender that was left out, with the reason.
    """
    layer = result.shape is not None
    names = ("forward", "forward + backward") if layer else ("inference", "training step")
    on_gpu = any(t.peak is not None for t in result.timings)
    rows = []
    for t in result.timings:
        row = {"": t.contender, "work / dense": _number(t.work)}
        for kind, title in zip(("forward", "training"), names, strict=True):
            row[f"{title} (ms)"] = f"{1e3 * t.median(kind):.2f} ± {1e3 * t.spread(kind):.2f}"
            row[f"{title} / dense"] = f"{result.ratio(t, kind):.2f}"
            row[f"{title} / floor"] = _number(result.over_floor(t, kind))
        share = None if t.work is None else 100 * t.work * result.flops / t.median("forward") / result.rate
        row["of matmul rate"] = "" if share is None else f"{share:.0f} %"
        row["kept for backward (MB)"] = _megabytes(t.kept)
        if not layer:
            row["weights, gradients, optimiser (MB)"] = _megabytes(t.held)
        if on_gpu:
            row["peak memory (MB)"] = _megabytes(t.peak)
        rows.append(row)
    head = f"**{result.name}**: {result.sizes}"
    return "\n".join([head, "", markdown(rows), *_leanest(result.timings), *_left_out(result.skipped)])


def sweep_table(swept: str, results: Iterable[Result]) -> str:
    """Time over the floor, forward and training, one line per shape and one column per contender."""
    results = list(results)
    names = dict.fromkeys(t.contender for result in results for t in result.timings if t.work is not None)
    rows = []
    for result in results:
        row = {"layer": f"{result.name}: {result.sizes}", **dict.fromkeys(names, "")}
        for t in result.timings:
            if t.contender in names:
                row[t.contender] = " / ".join(_number(result.over_floor(t, kind)) for kind in ("forward", "training"))
        rows.append(row)
    head = f"**sweep of {swept}**: time over the floor, forward / forward + backward"
    skipped = {name: why for result in results for name, why in result.skipped.items()}
    return "\n".join([head, "", markdown(rows), *_left_out(skipped)])


def _leanest(timings: list[Timing]) -> list[str]:
    """What is kept for the backward pass, beside the top-2 mixture that keeps least."""
    ours = next((t for t in timings if t.contender == "UniF-MoE"), None)
    mixtures = [t for t in timings if t.contender.endswith("top-2")]
    if not ours or not mixtures:
        return []
    least = min(mixtures, key=lambda t: t.kept)
    return [
        "",
        f"UniF-MoE keeps {_megabytes(ours.kept)} MB for the backward pass, the leanest top-2 mixture, "
        f"{least.contender}, {_megabytes(least.kept)} MB: {ours.kept / least.kept:.2f} times.",
    ]


def _left_out(skipped: dict[str, str]) -> list[str]:
    names: dict[str, list[str]] = {}
    for name, why in skipped.items():
        names.setdefault(why, []).append(name)
    lines = [f"- {', '.join(those)}: {why}" for why, those in names.items()]
    return ["", "Left out:", "", *lines] if lines else []


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.1f}"
