"""The benchmark as pictures: bars for layers and models, lines for sweeps."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator, ScalarFormatter  # noqa: E402

from unifmoe_dist.studies.benchmark.timing import Result  # noqa: E402

COLOURS = {"forward": "tab:blue", "training": "tab:orange"}
LABELS = {"forward": "forward", "training": "forward + backward"}
TICKS = [1, 1.2, 1.5, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100]
SWEPT = {"N": "tokens N", "d": "model width d", "K": "residual experts K"}


def plot(results: list[Result], where: str, path: Path) -> Path:
    """One panel per layer or model; a black mark shows the arithmetic of each contender, its floor."""
    layers = results[0].shape is not None
    tallest = max(len(result.timings) for result in results)
    figure, axes = plt.subplots(
        1, len(results), figsize=(7.2 * len(results), 1.4 + 0.42 * tallest), squeeze=False, layout="constrained"
    )
    for axis, result in zip(axes[0], results, strict=True):
        _bars(axis, result)
        axis.set_xlabel("time, in dense FFNs" if layers else "time, in dense models")
    handles, labels = axes[0][0].get_legend_handles_labels()
    if not layers:
        labels = [{"forward": "inference", LABELS["training"]: "training step"}.get(label, label) for label in labels]
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=3, fontsize=9, markerscale=0.4)
    figure.suptitle(where, fontsize=11)
    return _save(figure, path)


def _bars(axis: Axes, result: Result) -> None:
    rows = np.arange(len(result.timings))[::-1]
    longest = 0.0
    for offset, kind in ((0.2, "forward"), (-0.2, "training")):
        ratios = [result.ratio(t, kind) for t in result.timings]
        longest = max(longest, *ratios)
        axis.barh(rows + offset, ratios, height=0.38, color=COLOURS[kind], label=LABELS[kind])
        for row, ratio in zip(rows, ratios, strict=True):
            axis.text(ratio, row + offset, f"  {ratio:.2f}", va="center", fontsize=8)
    floors = [(t.work, row) for t, row in zip(result.timings, rows, strict=True) if t.work is not None]
    works = [work for work, _ in floors]
    axis.plot(works, [row for _, row in floors], "k|", markersize=22, label="arithmetic (floor)")
    axis.set_yticks(rows, [t.contender for t in result.timings])
    axis.set_xlim(0, 1.15 * max(longest, *works))
    axis.set_title(f"{result.name}: {result.sizes}", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", alpha=0.25)


def plot_sweeps(sweeps: dict[str, list[Result]], where: str, path: Path) -> Path:
    """Time over the floor against the size that is swept: one column per sweep, forward above, training below.

    The dense contender, which is the floor, is a black line.
    """
    columns = [(swept, name) for swept, results in sweeps.items() for name in dict.fromkeys(r.name for r in results)]
    figure, axes = plt.subplots(
        2, len(columns), figsize=(4.6 * len(columns), 7), squeeze=False, layout="constrained", sharex="col"
    )
    names = list(dict.fromkeys(t.contender for rs in sweeps.values() for r in rs for t in r.timings[1:] if t.work))
    colours = {name: f"C{i}" for i, name in enumerate(names)}
    for column, (swept, name) in enumerate(columns):
        results = [r for r in sweeps[swept] if r.name == name]
        for axis, kind in zip(axes[:, column], ("forward", "training"), strict=True):
            for contender in names:
                _line(axis, swept, results, kind, contender, colours[contender])
            axis.axhline(1, color="black", linewidth=1)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(FixedLocator(TICKS))
            axis.yaxis.set_major_formatter(lambda tick, _: f"{tick:g}")
            axis.yaxis.set_minor_locator(NullLocator())
            axis.xaxis.set_major_formatter(ScalarFormatter())
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.tick_params(labelsize=8, which="both")
            axis.spines[["top", "right"]].set_visible(False)
            axis.grid(alpha=0.25)
        axes[0][column].set_title(f"{name}: {_fixed(swept, results[0])}", fontsize=9)
        axes[1][column].set_xlabel(SWEPT[swept])
    for axis, kind in zip(axes[:, 0], ("forward", "training"), strict=True):
        axis.set_ylabel(f"{LABELS[kind]}: time / floor")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=4, fontsize=9)
    figure.suptitle(where, fontsize=11)
    return _save(figure, path)


def _line(axis: Axes, swept: str, results: list[Result], kind: str, contender: str, colour: str) -> None:
    points = [
        (_size(swept, result), result.over_floor(t, kind))
        for result in results
        for t in result.timings
        if t.contender == contender
    ]
    axis.plot(*zip(*points, strict=True) if points else ([], []), "o-", color=colour, label=contender, markersize=4)


def _size(swept: str, result: Result) -> int:
    assert result.shape is not None
    return {"N": result.shape.tokens, "d": result.shape.dim, "K": result.shape.experts}[swept]


def _fixed(swept: str, result: Result) -> str:
    shape = result.shape
    assert shape is not None
    sizes = {"N": shape.tokens, "d": shape.dim, "K": shape.experts, "B": shape.blocks}
    return ", ".join(f"{name}={size}" for name, size in sizes.items() if name != swept)


def _save(figure: Figure, path: Path) -> Path:
    temporary = path.with_name(".writing-" + path.name)
    figure.savefig(temporary, dpi=130)
    plt.close(figure)
    temporary.replace(path)
    return path
