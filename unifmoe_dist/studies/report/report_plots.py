"""Plots of a report: scores with error bars beside the paper's, accuracy against computation, and parameter studies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from unifmoe_dist.data.registry import TASKS, find_task
from unifmoe_dist.methods.registry import METHODS, STUDIES, Family, find_method
from unifmoe_dist.studies.figures.style import label, new_figure, panels, save
from unifmoe_dist.studies.paper_numbers import ABLATION, STANDARD_AVERAGE, STANDARD_BEST
from unifmoe_dist.studies.paper_tables import DOMAINBED, GLUE, TABLES
from unifmoe_dist.studies.report.entries import Entry, Result, average, cell
from unifmoe_dist.studies.report.report_tables import HERE, PAPER, STUDIED, Table, planned_methods, study_value

_FAMILIES: dict[Family, tuple[str, str]] = {
    "dense": ("#222222", "dense"),
    "static": ("#0072b2", "fixed number of experts"),
    "dynamic": ("#009e73", "dynamic number of experts"),
    "algorithm": ("#e69f00", "training algorithm, dense"),
    "unif": ("#d62728", "UniF-MoE"),
    "ablation": ("#cc79a7", "UniF-MoE, ablated"),
    "combined": ("#a6761d", "UniF-MoE by a training algorithm"),
    "study": ("#8c6bb1", "UniF-MoE, other parameters"),
}
"""Colour and name of each family of methods."""

_DECISIONS = {
    "unif": "full",
    "unif-fixed-alpha": "fixed α",
    "unif-top2": "top-2\nexperts",
    "unif-prefix": "prefix\nblocks",
}


def plot_table(table: Table, results: Sequence[Result], folder: Path) -> list[str]:
    """Draw a table's plots into a folder; returns them as Markdown, nothing where there is nothing to draw."""
    if not any(e.mean is not None for row in table.rows if row.source == HERE for e in row.entries):
        return []
    if table.name == "ablation":
        figures = [_ablation(results)]
    elif table.name in STUDIED:
        figures = [_studies(results, table)]
    else:
        figures = [*([_comparison(results, table.name)] if table.name in TASKS else []), _scores(table)]
    drawn = []
    for figure, (part, more) in zip(figures, (("", ""), ("-scores", ": scores")), strict=False):
        path = save(figure, folder / f"{table.name}{part}.png", dpi=150)
        drawn.append(f"![{table.title}{more}]({path.name})")
    return drawn


# -- scores, one panel to a column ------------------------------------------------------------------------------------


def _scores(table: Table) -> Figure:
    rows = [row for row in reversed(table.rows) if row.source == HERE]
    paper = {row.method: row for row in table.rows if row.source == PAPER}
    columns = table.columns[: table.scores]
    wide = min(len(columns), 4)
    high = -(-len(columns) // wide)
    height = 0.8 + high * (0.8 + max(1.0, 0.23 * len(rows)))
    figure, axes = panels(high, wide, 1.6 + 2.7 * wide, height, sharey=True)
    for axis in axes.flat[len(columns) :]:
        axis.set_visible(False)
    for number, (axis, column) in enumerate(zip(axes.flat, columns, strict=False)):
        for y, row in enumerate(rows):
            mine = row.entries[number]
            if mine.mean is not None:
                _bar(axis, mine.mean, y, row.method, xerr=mine.deviation, ms=5)
            else:
                place = axis.get_yaxis_transform()
                axis.text(0.02, y, _why_empty(mine), transform=place, fontsize=7, color="grey", va="center")
            if row.method in paper and (theirs := paper[row.method].entries[number]).mean is not None:
                style = {"color": "grey", "ms": 4, "mfc": "white", "capsize": 2, "lw": 1}
                axis.errorbar(theirs.mean, y - 0.28, xerr=theirs.deviation, fmt="D", **style)
        axis.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
        axis.set_ylim(-0.7, len(rows) - 0.4)
        label(axis, table.metric.axis, "", column)
        axis.tick_params(axis="x", labelsize=8)
    several = any(entry.deviation is not None for row in rows for entry in row.entries)
    name = "here: mean and deviation over seeds" if several else "here: 1 seed"
    handles = [Line2D([], [], marker="o", ls="", color="black", ms=5, label=name)]
    if paper:
        handles.append(Line2D([], [], marker="D", ls="", color="grey", mfc="white", ms=4, label="the paper"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.suptitle(table.title, fontsize=11)
    return figure


def _why_empty(entry: Entry) -> str:
    return f"{entry.done} of {entry.wanted} runs finished" if entry.wanted else "not planned"


# -- accuracy against computation -------------------------------------------------------------------------------------


def _comparison(results: Sequence[Result], task: str) -> Figure:
    """Accuracy against computation over methods, and a panel for each ablation and parameter study."""
    planned = planned_methods(results, [task])
    ablated = {method: _DECISIONS[method] for method in planned if method in _DECISIONS}
    ablated = ablated if any(find_method(method).family == "ablation" for method in ablated) else {}
    studies = [name for name in STUDIES if any(method.startswith(f"unif-{name}-") for method in planned)]
    small = len(studies) + bool(ablated)
    figure = new_figure(13 if small else 8, 7.4 if small > 2 else 5.4)
    grid = figure.add_gridspec(-(-small // 2) or 1, 4 if small > 1 else 3 if small else 2)
    main = [method for method in planned if method in METHODS and find_method(method).family != "ablation"]
    _accuracy_and_computation(figure.add_subplot(grid[:, :2]), results, task, main)
    axes = [figure.add_subplot(grid[number // 2, 2 + number % 2]) for number in range(small)]
    if ablated:
        _side_by_side(axes[0], results, task, ablated)
        label(axes[0], "", find_task(task).metric.axis, "UniF-MoE: one decision fixed")
    for axis, name in zip(axes[bool(ablated) :], studies, strict=True):
        _study(axis, results, task, name, f"UniF-MoE: {STUDIES[name].symbol}")
    limits = [limit for axis in axes for limit in axis.get_ylim()]
    for axis in axes:  # one scale, so that effects can be compared
        axis.set_ylim(min(limits), max(limits))
    seeds = len({r.seed for r in results if r.task == task})
    spread = f"mean and standard deviation over {seeds} seeds" if seeds > 1 else "1 seed"
    spread += ", small print: $C_B / B$, dense FFNs per token" if small else ""
    figure.suptitle(f"{find_task(task).title}: {spread}", fontsize=11)
    return figure


class _Point(NamedTuple):
    """A name with the place that it belongs to."""

    name: str
    x: float
    y: float
    colour: str


def _accuracy_and_computation(axis: Axes, results: Sequence[Result], task: str, methods: Sequence[str]) -> None:
    cells = {method: cell(results, task, method) for method in methods}
    entries = {m: (e.ffns, e.mean, e.deviation) for m, e in cells.items() if e.mean is not None and e.ffns is not None}
    points: list[_Point] = []
    markers = {family: iter("osD^vP*X<>" * len(methods)) for family in _FAMILIES}
    for method, (ffns, score, spread) in entries.items():
        equals = [m for m, (other, *_) in entries.items() if abs(other / ffns - 1) < 0.01]
        x = ffns * 1.06 ** (equals.index(method) - (len(equals) - 1) / 2)  # side by side, so that all bars are seen
        marker = next(markers[find_method(method).family])
        _bar(axis, x, score, method, yerr=spread, fmt=marker, ms=7, lw=1.2, zorder=3)
        points.append(_Point(find_method(method).label, x, score, _colour(method)))
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(LogLocator(2, subs=(1, 1.5)))
    axis.xaxis.set_major_formatter("{x:.2g}")
    axis.tick_params(axis="x", labelsize=8)
    axis.margins(x=0.1)
    what = "computation per token, in dense FFNs: $C_B / B$ (equal ones side by side)"
    metric = find_task(task).metric
    label(axis, what, metric.axis, f"{'Accuracy' if metric.unit else metric.title.capitalize()} and computation")
    _label_at_margin(axis, points)
    known = (_FAMILIES[family] for family in dict.fromkeys(find_method(method).family for method in methods))
    handles = [Line2D([], [], marker="o", ls="", color=colour, label=name) for colour, name in known]
    axis.legend(handles=handles, fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3)


def _label_at_margin(axis: Axes, points: Sequence[_Point]) -> None:
    """Names in a column right of the axes, in the order of their heights, with a line to each point."""
    for number, point in enumerate(sorted(points, key=lambda point: (point.y, -point.x))):
        line = dict(arrowstyle="-", color=point.colour, alpha=0.35, lw=0.7, shrinkA=0, shrinkB=4, relpos=(0, 0.5))
        axis.annotate(
            point.name,
            (point.x, point.y),
            xytext=(1.03, (number + 0.5) / len(points)),
            textcoords="axes fraction",
            va="center",
            fontsize=8.5,
            color=point.colour,
            annotation_clip=False,
            arrowprops=line,
        )


def _study(axis: Axes, results: Sequence[Result], task: str, study: str, title: str) -> None:
    """Score over one parameter of UniF-MoE."""
    planned = planned_methods(results, [task])
    methods = [m for m in planned if find_method(m).family == "unif" or m.startswith(f"unif-{study}-")]
    values = {m: v for m in methods if (v := study_value(results, m, STUDIES[study].option, [task])) is not None}
    ordered = sorted(values.items(), key=lambda item: item[1])
    line = _side_by_side(axis, results, task, {method: f"{value:g}" for method, value in ordered})
    if line:
        axis.plot(*zip(*line, strict=True), color=_FAMILIES["study"][0], lw=1.2, zorder=1)
    label(axis, STUDIES[study].symbol, find_task(task).metric.axis, title)


def _side_by_side(
    axis: Axes, results: Sequence[Result], task: str, names: Mapping[str, str]
) -> list[tuple[int, float]]:
    """Methods' scores with error bars, and with their computation in small print; the points."""
    points = []
    for x, entry in enumerate(cell(results, task, method) for method in names):
        if entry.mean is not None:
            points.append((x, entry.mean))
            _bar(axis, x, entry.mean, list(names)[x], yerr=entry.deviation, ms=6, lw=1.2)
            style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7.5, "color": "#555555", "va": "center"}
            axis.annotate(f"{entry.ffns:.2f}", points[-1], xytext=(6, 0), **style)
    axis.set_xticks(range(len(names)), list(names.values()), fontsize=8)
    axis.set_xlim(-0.6, len(names) - 0.4)
    return points


def _studies(results: Sequence[Result], table: Table) -> Figure:
    """A parameter study, one panel to a data set."""
    present = [task for task in TABLES[table.name].tasks if any(r.task == task for r in results)]
    figure, axes = panels(1, len(present), 1 + 2.6 * len(present), 3.3)
    for axis, task in zip(axes.flat, present, strict=True):
        _study(axis, results, task, STUDIED[table.name], find_task(task).title)
    figure.suptitle(f"{table.title} (small print: $C_B / B$, dense FFNs per token)", fontsize=11)
    return figure


def _ablation(results: Sequence[Result]) -> Figure:
    """Accuracy against C_B of the ablations, here and in the paper, for both benchmarks."""
    figure, (axes,) = panels(1, 2, 11, 4.4)
    for axis, title, tasks in zip(axes, ("DomainBed", "GLUE"), (DOMAINBED, GLUE), strict=True):
        points = []
        for method, numbers in ABLATION.items():
            name, x, y = find_method(method).label, numbers[f"{title.lower()} C_B"], numbers[title.lower()]
            axis.plot(x, y, "D", color="grey", mfc="white", ms=6)
            points.append(_Point(f"{name} (paper)", x, y, "#777777"))
            total = average([cell(results, task, method) for task in tasks])
            if total.mean is not None and total.block_compute is not None:
                _bar(axis, total.block_compute, total.mean, method, yerr=total.deviation)
                points.append(_Point(name, total.block_compute, total.mean, _colour(method)))
        axis.margins(0.12)
        label(axis, "mean blocks per token $C_B$", "mean score (%)", title)
        _label_at_margin(axis, points)
    return figure


def family_colour(method: str) -> str:
    """The colour of a method's family."""
    return _FAMILIES[find_method(method).family][0]


def _colour(method: str) -> str:
    return _FAMILIES["static"][0] if method in (STANDARD_AVERAGE, STANDARD_BEST) else family_colour(method)


def _bar(axis: Axes, x: float, y: float, method: str, fmt: str = "o", **style: Any) -> None:
    """A score with its deviation as an error bar."""
    axis.errorbar(x, y, fmt=fmt, color=_colour(method), capsize=3, **{"lw": 1.3, **style})
