"""Plots of a report: scores with error bars beside the paper's, accuracy against computation, and parameter studies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator  # noqa: E402

from unifmoe_dist.data.registry import TASKS, find_task  # noqa: E402
from unifmoe_dist.methods.registry import METHODS, STUDIES, Family, find_method  # noqa: E402
from unifmoe_dist.studies.paper_numbers import ABLATION, STANDARD_AVERAGE, STANDARD_BEST  # noqa: E402
from unifmoe_dist.studies.report.results import Result, average, cell  # noqa: E402
from unifmoe_dist.studies.report.tables import HERE, PAPER, Entry, Table, planned_methods, study_value  # noqa: E402
from unifmoe_dist.studies.tables import DOMAINBED, GLUE, TABLES  # noqa: E402

_COLOURS: dict[Family, str] = {
    "dense": "#222222",
    "static": "#0072b2",
    "dynamic": "#009e73",
    "algorithm": "#e69f00",
    "unif": "#d62728",
    "ablation": "#cc79a7",
    "study": "#8c6bb1",
}
_FAMILIES = {
    "dense": "dense",
    "static": "fixed number of experts",
    "dynamic": "dynamic number of experts",
    "algorithm": "training algorithm, dense",
    "unif": "UniF-MoE",
    "ablation": "UniF-MoE, ablated",
    "study": "UniF-MoE, other parameters",
}
_MARKERS = "osD^vP*X<>"


def plot_table(table: Table, results: Sequence[Result], path: Path) -> bool:
    """Draw a table's plot; whether there was anything to draw."""
    if not any(e.mean is not None for row in table.rows if row.source == HERE for e in row.entries):
        return False
    if table.name == "ablation":
        figure = _ablation(results)
    elif table.name in ("diversity", "blocks"):
        study = "lambda" if table.name == "diversity" else "blocks"
        figure = _studies(results, TABLES[table.name].tasks, study, table.title)
    elif table.name in TASKS:
        figure = _comparison(results, table.name)
        _panels(table).savefig(path.with_name(f"{path.stem}-scores.png"), dpi=150)
    else:
        figure = _panels(table)
    figure.savefig(path, dpi=150)
    plt.close("all")
    return True


# -- scores, one panel to a column ------------------------------------------------------------------------------------


def _panels(table: Table) -> Any:
    rows = [row for row in table.rows if row.source == HERE]
    paper = {row.method: row for row in table.rows if row.source == PAPER}
    columns = table.columns[: table.scores]
    wide = min(len(columns), 4)
    high = -(-len(columns) // wide)
    figure, axes = plt.subplots(
        high,
        wide,
        figsize=(1.6 + 2.7 * wide, 0.8 + high * (0.8 + max(1.0, 0.23 * len(rows)))),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for number, axis in enumerate(axes.flat):
        if number >= len(columns):
            axis.set_visible(False)
            continue
        for y, row in enumerate(reversed(rows)):
            colour = _colour(row.method)
            mine = row.entries[number]
            if mine.mean is not None:
                axis.errorbar(mine.mean, y, xerr=mine.deviation, fmt="o", color=colour, ms=5, capsize=3, lw=1.3)
            else:
                axis.text(
                    0.02,
                    y,
                    _why_empty(mine),
                    transform=axis.get_yaxis_transform(),
                    fontsize=7,
                    color="grey",
                    va="center",
                )
            if row.method in paper and (theirs := paper[row.method].entries[number]).mean is not None:
                axis.errorbar(
                    theirs.mean,
                    y - 0.28,
                    xerr=theirs.deviation,
                    fmt="D",
                    color="grey",
                    ms=4,
                    mfc="white",
                    capsize=2,
                    lw=1,
                )
        axis.set_yticks(range(len(rows)), [row.label for row in reversed(rows)], fontsize=8)
        axis.set_ylim(-0.7, len(rows) - 0.4)
        axis.set_title(columns[number], fontsize=10)
        axis.set_xlabel("score (%)", fontsize=8)
        axis.tick_params(axis="x", labelsize=8)
        _tidy(axis)
    several = any(entry.deviation is not None for row in rows for entry in row.entries)
    label = "here: mean and deviation over seeds" if several else "here: 1 seed"
    handles = [Line2D([], [], marker="o", ls="", color="black", ms=5, label=label)]
    if paper:
        handles.append(Line2D([], [], marker="D", ls="", color="grey", mfc="white", ms=4, label="the paper"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.suptitle(table.title, fontsize=11)
    return figure


def _why_empty(entry: Entry) -> str:
    return f"{entry.done} of {entry.wanted} runs finished" if entry.wanted else "not planned"


# -- accuracy against computation -------------------------------------------------------------------------------------


def _comparison(results: Sequence[Result], task: str) -> Any:
    """Accuracy against computation over methods, and a panel for each ablation and parameter study."""
    planned = planned_methods(results, [task])
    main = [name for name in planned if name in METHODS and find_method(name).family != "ablation"]
    studies = [name for name in STUDIES if any(method.startswith(f"unif-{name}-") for method in planned)]
    ablated = any(find_method(method).family == "ablation" for method in planned)
    small = len(studies) + ablated
    figure = plt.figure(figsize=(13 if small else 8, 7.4 if small > 2 else 5.4), layout="constrained")
    grid = figure.add_gridspec(-(-small // 2) or 1, 4 if small > 1 else 3 if small else 2)
    _scatter(figure.add_subplot(grid[:, :2]), results, task, main)
    panels = [figure.add_subplot(grid[number // 2, 2 + number % 2]) for number in range(small)]
    if ablated:
        methods = [m for m in planned if find_method(m).family in ("unif", "ablation")]
        _decisions(panels[0], results, task, methods)
    for axis, name in zip(panels[int(ablated) :], studies, strict=True):
        _study(axis, results, task, name)
        axis.set_title(f"UniF-MoE: {STUDIES[name].symbol}", fontsize=10)
    limits = [axis.get_ylim() for axis in panels]
    for axis in panels:  # one scale, so that effects can be compared
        axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    seeds = _seeds(results, [task])
    figure.suptitle(
        f"{find_task(task).title}: {f'mean and standard deviation over {seeds} seeds' if seeds > 1 else '1 seed'}"
        + (", small print: $C_B / B$, dense FFNs per token" if small else ""),
        fontsize=11,
    )
    return figure


def _scatter(axis: Any, results: Sequence[Result], task: str, methods: Sequence[str]) -> None:
    points: list[tuple[str, float, float, str]] = []
    entries: dict[str, tuple[float, float, float | None]] = {}  # computation, mean and deviation
    used: dict[str, int] = {}
    for method in methods:
        entry = cell(results, task, method)
        if entry.mean is not None and entry.ffns is not None:
            entries[method] = entry.ffns, entry.mean, entry.deviation
    for method, (ffns, score, spread) in entries.items():
        equals = [m for m, (other, *_) in entries.items() if abs(other / ffns - 1) < 0.01]
        x = ffns * 1.06 ** (equals.index(method) - (len(equals) - 1) / 2)  # side by side, so that all bars are seen
        family = find_method(method).family
        marker = _MARKERS[used.get(family, 0) % len(_MARKERS)]
        used[family] = used.get(family, 0) + 1
        axis.errorbar(x, score, yerr=spread, fmt=marker, color=_colour(method), ms=7, capsize=3, lw=1.2, zorder=3)
        points.append((find_method(method).label, x, score, _colour(method)))
    _log_axis(axis, [x for _, x, _, _ in points])
    axis.set(xlabel="computation per token, in dense FFNs: $C_B / B$ (equal ones side by side)", ylabel="score (%)")
    axis.set_title("Accuracy and computation", fontsize=10)
    _label_at_margin(axis, points)
    families = dict.fromkeys(find_method(method).family for method in methods)
    axis.legend(
        handles=[Line2D([], [], marker="o", ls="", color=_COLOURS[f], label=_FAMILIES[f]) for f in families],
        fontsize=8,
        frameon=False,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.1),
        ncols=3,
    )
    _tidy(axis)


def _label_at_margin(axis: Any, points: Sequence[tuple[str, float, float, str]]) -> None:
    """Names in a column right of the axes, in the order of their heights and apart, with a line to each point."""
    low, high = axis.get_ylim()
    ordered = sorted(points, key=lambda point: (point[2], -point[1]))
    gap = min((high - low) * 0.045, (high - low) / max(len(ordered), 1))
    heights: list[float] = []
    for _, _, y, _ in ordered:
        heights.append(max(y, heights[-1] + gap) if heights else max(y, low))
    excess = max(0.0, heights[-1] - high) if heights else 0.0
    for i in reversed(range(len(heights))):  # push the column down where it left the axes at the top
        top = high if i == len(heights) - 1 else heights[i + 1] - gap
        heights[i] = min(heights[i], top) if excess else heights[i]
    right = axis.get_xlim()[1]
    for (label, x, y, colour), height in zip(ordered, heights, strict=True):
        axis.annotate(
            label,
            (x, y),
            xytext=(1.03, height),
            textcoords=axis.get_yaxis_transform(),
            va="center",
            fontsize=8.5,
            color=colour,
            annotation_clip=False,
            arrowprops=dict(arrowstyle="-", color=colour, alpha=0.35, lw=0.7, shrinkA=0, shrinkB=4, relpos=(0, 0.5)),
        )
    axis.set_xlim(right=right)
    axis.set_ylim(low, high)


def _decisions(axis: Any, results: Sequence[Result], task: str, methods: Sequence[str]) -> None:
    """UniF-MoE and its ablations side by side."""
    names = {
        "unif": "full",
        "unif-fixed-alpha": "fixed α",
        "unif-top2": "top-2\nexperts",
        "unif-prefix": "prefix\nblocks",
    }
    for x, method in enumerate(methods):
        _point(axis, x, results, task, method)
    axis.set_xticks(range(len(methods)), [names[method] for method in methods], fontsize=8)
    axis.set_xlim(-0.6, len(methods) - 0.4)
    axis.set_title("UniF-MoE: one decision fixed", fontsize=10)
    axis.set_ylabel("score (%)")
    _tidy(axis)


def _study(axis: Any, results: Sequence[Result], task: str, study: str) -> None:
    """Score over one parameter of UniF-MoE."""
    option = STUDIES[study].option
    planned = planned_methods(results, [task])
    methods = [m for m in planned if find_method(m).family == "unif" or m.startswith(f"unif-{study}-")]
    values = {m: v for m in methods if (v := study_value(results, m, option, [task])) is not None}
    line = []
    numbers = sorted(values.values())
    for method, value in sorted(values.items(), key=lambda item: item[1]):
        x = numbers.index(value)
        y = _point(axis, x, results, task, method)
        if y is not None:
            line.append((x, y))
    axis.plot(*zip(*line, strict=True), color=_COLOURS["study"], lw=1.2, zorder=1) if line else None
    axis.set_xticks(range(len(numbers)), [f"{number:g}" for number in numbers], fontsize=8)
    axis.set_xlim(-0.6, len(numbers) - 0.4)
    axis.set(xlabel=STUDIES[study].symbol, ylabel="score (%)")
    _tidy(axis)


def _point(axis: Any, x: float, results: Sequence[Result], task: str, method: str) -> float | None:
    """One method's score with its error bar and its computation in small print; the score."""
    entry = cell(results, task, method)
    if entry.mean is None:
        return None
    axis.errorbar(x, entry.mean, yerr=entry.deviation, fmt="o", color=_colour(method), ms=6, capsize=3, lw=1.2)
    axis.annotate(
        f"{entry.ffns:.2f}",
        (x, entry.mean),
        xytext=(6, 0),
        textcoords="offset points",
        fontsize=7.5,
        color="#555555",
        va="center",
    )
    return entry.mean


def _studies(results: Sequence[Result], tasks: Sequence[str], study: str, title: str) -> Any:
    """A parameter study, one panel to a data set."""
    present = [task for task in tasks if any(r.task == task for r in results)]
    figure, axes = plt.subplots(
        1, len(present), figsize=(1 + 2.6 * len(present), 3.3), squeeze=False, layout="constrained"
    )
    for axis, task in zip(axes.flat, present, strict=True):
        _study(axis, results, task, study)
        axis.set_title(find_task(task).title, fontsize=10)
    figure.suptitle(f"{title} (small print: $C_B / B$, dense FFNs per token)", fontsize=11)
    return figure


def _ablation(results: Sequence[Result]) -> Any:
    """Accuracy against C_B of the ablations, here and in the paper, for both benchmarks."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for axis, name, title, tasks in zip(
        axes, ("domainbed", "glue"), ("DomainBed", "GLUE"), (DOMAINBED, GLUE), strict=True
    ):
        points = []
        for method, numbers in ABLATION.items():
            label, colour = find_method(method).label, _colour(method)
            axis.plot(numbers[f"{name} C_B"], numbers[name], "D", color="grey", mfc="white", ms=6)
            points.append((f"{label} (paper)", numbers[f"{name} C_B"], numbers[name], "#777777"))
            total = average([cell(results, task, method) for task in tasks])
            if total.mean is not None and total.block_compute is not None:
                axis.errorbar(total.block_compute, total.mean, yerr=total.deviation, fmt="o", color=colour, capsize=3)
                points.append((label, total.block_compute, total.mean, colour))
        axis.margins(0.12)
        axis.set(xlabel="mean blocks per token $C_B$", ylabel="mean score (%)", title=title)
        _label_at_margin(axis, points)
        _tidy(axis)
    return figure


# -- shared -----------------------------------------------------------------------------------------------------------


def _colour(method: str) -> str:
    over_standard = method in (STANDARD_AVERAGE, STANDARD_BEST)
    return _COLOURS["static" if over_standard else find_method(method).family]


def _seeds(results: Sequence[Result], tasks: Sequence[str]) -> int:
    return len({r.seed for r in results if r.task in tasks})


def _log_axis(axis: Any, values: Sequence[float]) -> None:
    """A logarithmic axis; a linear one where the values are so close that few powers of 2 lie among them."""
    if values and max(values) < 3 * min(values):
        margin = max(0.25 * (max(values) - min(values)), 0.05 * max(values))
        axis.set_xlim(min(values) - margin, max(values) + margin)
        axis.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        return
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axis.xaxis.set_minor_locator(NullLocator())
    if values:
        axis.set_xlim(min(values) / 1.25, max(values) * 1.25)


def _tidy(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.set_axisbelow(True)
