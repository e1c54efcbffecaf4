"""Plots of a scaling study and of cost-model predictions."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from unifmoe_dist.studies.figures.style import label, new_figure, save
from unifmoe_dist.studies.scaling.cost_model import Check
from unifmoe_dist.studies.scaling.measured_step import Point, Study
from unifmoe_dist.studies.scaling.simulator import PARTS as STEP_PARTS
from unifmoe_dist.studies.scaling.simulator import Step
from unifmoe_dist.studies.scaling.step_split import PARTS

_LOOKS = {
    "route": ("routing", "#7b3294"),
    "dispatch": ("dispatch", "#2166ac"),
    "shared_experts": ("shared expert", "#f4a582"),
    "residual_experts": ("residual experts", "#d6604d"),
    "combine": ("combine", "#92c5de"),
    "all_reduce": ("all-reduce", "#1b7837"),
    "optimizer": ("optimiser", "#a6dba0"),
    "other": ("rest of the model", "#bdbdbd"),
    "routing": (STEP_PARTS["routing"], "#7b3294"),
    "shared": (STEP_PARTS["shared"], "#f4a582"),
    "residual": (STEP_PARTS["residual"], "#d6604d"),
    "waiting": (STEP_PARTS["waiting"], "#fee08b"),
    "near": (STEP_PARTS["near"], "#92c5de"),
    "far": (STEP_PARTS["far"], "#2166ac"),
    "backward": (STEP_PARTS["backward"], "#8c2d04"),
    "rest": (STEP_PARTS["rest"], "#bdbdbd"),
}
"""Label and colour of every part of a step and term of the cost model."""
_RANK_COLOURS = ("#222222", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def plot_study(points: Sequence[Point], study: Study, folder: Path) -> list[Path]:
    """Write scaling.png: one figure for each batch, dispatcher, ZeRO stage, link and expert-parallel choice measured.

    A second and later figure is named for what sets it apart. Points where every rank holds all experts belong to
    the figures of every dispatcher. Of several expert-parallel sizes at the same K and ranks, the largest is drawn.
    """
    layouts = [p.layout for p in points]
    exchanging = sorted({x.dispatcher for x in layouts if x.dispatcher != "local"}) or ["local"]
    written: list[Path] = []
    varied = (sorted({getattr(x, name) for x in layouts}) for name in ("batch", "zero", "megabits"))
    for batch, zero, megabits, dispatcher in product(*varied, exchanging):
        widest = {
            (p.layout.ranks, p.layout.experts): p
            for p in sorted(points, key=lambda p: p.layout.expert_parallel)
            if (p.layout.batch, p.layout.zero, p.layout.megabits) == (batch, zero, megabits)
            and p.layout.dispatcher in (dispatcher, "local")
        }
        if widest:
            link = f"-megabits{megabits}" * (megabits > 0)
            name = f"scaling-batch{batch}-{dispatcher}-zero{zero}{link}.png" if written else "scaling.png"
            written.append(_figure([widest[key] for key in sorted(widest)], study, folder / name))
    return written


def _figure(points: list[Point], study: Study, path: Path) -> Path:
    figure = new_figure(12, 8.2)
    grid = figure.add_gridspec(2, 3, height_ratios=(1, 1.15))
    speed, volume, memory = (figure.add_subplot(grid[0, i]) for i in range(3))
    experts = sorted({p.layout.experts for p in points})
    ranks = sorted({p.layout.ranks for p in points})
    for i, n in enumerate(ranks):
        mine = [p.result for p in points if p.layout.ranks == n]
        k = [p.layout.experts for p in points if p.layout.ranks == n]
        style: dict[str, Any] = dict(color=_RANK_COLOURS[i % 7], marker=_MARKERS[i % 7], ms=5, lw=1.6)
        style["label"] = f"{n} rank{'s' if n > 1 else ''}"
        speed.plot(k, [r.tokens_per_second for r in mine], **style)
        memory.plot(k, [r.memory / 1e6 for r in mine], **style)
        if n > 1:
            tutel = volume.plot(k, [r.tutel_bytes / 1e3 for r in mine], ls="--", **{**style, "marker": None})
            sent = volume.plot(k, [r.sent_bytes / 1e3 for r in mine], **style)
            least = volume.plot(k, [r.minimum_bytes / 1e3 for r in mine], "x", color="black", ms=7, zorder=5)
    for axis, ylabel, title in (
        (speed, "tokens per second, all ranks", "Throughput"),
        (memory, "MB per rank", "Peak memory of training"),
        (volume, "KB per token and layer", "Bytes between ranks, forward + backward"),
    ):
        axis.set(xscale="log", yscale="log")
        axis.set_xticks(experts, [str(k) for k in experts])
        axis.xaxis.set_minor_locator(NullLocator())
        _log_ticks(axis.yaxis)
        label(axis, "residual experts K", ylabel, title)
    speed.legend(frameon=False)
    if ranks[-1] > 1:
        below: dict[str, Any] = dict(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, columnspacing=1.2)
        below |= dict(title="colours: ranks, as in Throughput", fontsize=9, title_fontsize=9, frameon=False)
        volume.legend([*sent, *least, *tutel], ["sent", "least possible", "Tutel, padded"], **below)
    _bars(figure.add_subplot(grid[1, :]), points, experts, ranks)
    busy = max(p.result.contention for p in points)
    note = f" (cores shared, up to {busy:.1f} times as slow)" if busy >= 1.1 else ""
    last = points[-1]  # the most ranks
    link = f", {last.layout.megabits} Mbit/s between two hosts" * (last.layout.megabits > 0)
    figure.suptitle(
        f"UniF-MoE training steps on {last.result.device.upper()} ranks{note}: {last.layout.dispatcher}, ZeRO "
        f"{last.layout.zero}, {last.result.tokens // last.layout.ranks} tokens per rank, width {study.width}, "
        f"{len(study.layers)} MoE layers, B = {study.blocks}, {study.precision}{link}",
        fontsize=11,
    )
    return save(figure, path)


def _log_ticks(axis: Axis) -> None:
    """Labelled ticks at 1, 2, 5 per decade, or evenly spaced ones where too few of these lie in the range."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.10g}"))


def _stack(axis: Axes, places: Sequence[float], values: dict[str, list[float]], width: float) -> np.ndarray:
    """Bars of milliseconds made of seconds by part; returns their tops."""
    tops = np.zeros(len(places))
    for part, seconds in values.items():
        name, colour = _LOOKS[part]
        axis.bar(places, 1e3 * np.array(seconds), width, bottom=tops, color=colour, label=name)
        tops += 1e3 * np.array(seconds)
    return tops


def _bars(axis: Axes, points: list[Point], experts: list[int], ranks: list[int]) -> None:
    width = 0.8 / len(ranks)
    shown = sorted(points, key=lambda p: (p.layout.experts, p.layout.ranks))
    places = [
        experts.index(p.layout.experts) + (ranks.index(p.layout.ranks) - (len(ranks) - 1) / 2) * width for p in shown
    ]
    tops = _stack(axis, places, {part: [getattr(p.result, part) for p in shown] for part in PARTS}, 0.9 * width)
    for x, top in zip(places, tops, strict=True):
        axis.text(x, top, f"{top:,.0f}", ha="center", va="bottom", fontsize=7)
    axis.set_xticks(places, [str(p.layout.ranks) for p in shown], fontsize=8)
    title = "Where a step goes (mean over ranks; dispatch and all-reduce include waiting)"
    label(axis, "", "ms per step", title)
    axis.grid(visible=False, axis="x")
    below: dict[str, Any] = dict(textcoords="offset points", va="top")
    for i, k in enumerate(experts):
        axis.annotate(f"K = {k}", (i, 0), (0, -20), xycoords=("data", "axes fraction"), ha="center", **below)
    axis.annotate("ranks", (0, 0), (-8, -5), xycoords="axes fraction", ha="right", fontsize=8, **below)
    axis.set_xlim(-0.6, len(experts) - 0.4)
    place: dict[str, Any] = dict(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=len(PARTS))
    axis.legend(frameon=False, fontsize=9.5, columnspacing=1.2, **place)


def plot_check(result: Check, path: Path) -> Path:
    """Predicted against measured steps, fitted and held-out points apart."""
    figure = new_figure(5.2, 4.6)
    axis = figure.subplots()
    limits = []
    colours = "#2166ac", "#d55e00", "#009e73"
    for (name, points), colour, marker in zip(result.points.items(), colours, "oD^", strict=False):
        measured = [1e3 * p.result.step for p in points]
        predicted = [1e3 * seconds for seconds in result.predicted[name]]
        axis.scatter(measured, predicted, color=colour, marker=marker, s=28, label=name, zorder=3)
        limits += measured + predicted
    ends = 0.8 * min(limits), 1.25 * max(limits)
    axis.plot(ends, ends, color="grey", lw=1)
    least, most = ([factor * end for end in ends] for factor in (0.8, 1.2))
    axis.fill_between(ends, least, most, color="grey", alpha=0.12, lw=0, label="within 20 %")
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for ax in (axis.xaxis, axis.yaxis):
        _log_ticks(ax)
    label(axis, "measured step (ms)", "predicted step (ms)", "Cost model")
    axis.legend(frameon=False)
    return save(figure, path)


def plot_clusters(
    found: dict[str, list[Step]], speeds: dict[float, dict[str, list[Step]]], title: str, path: Path
) -> Path:
    """Predicted speed and efficiency over ranks, where the exchanges cross, and what the largest steps consist of.

    Args:
        found: Steps by routing, of both exchanges for every number of ranks.
        speeds: By Gbit/s between nodes, steps of both exchanges at one number of ranks, by routing.
        title: What is predicted.
        path: Where the figure goes.
    """
    figure = new_figure(12.5, 9)
    grid = figure.add_gridspec(2, 3, height_ratios=(1, 1.15))
    speed, efficiency, crossing = (figure.add_subplot(grid[0, i]) for i in range(3))
    for i, (name, steps) in enumerate(found.items()):
        style: dict[str, Any] = dict(color=_RANK_COLOURS[i % 7], marker=_MARKERS[i % 7], ms=4, lw=1.5)
        for exchange, line in (("two_level", "-"), ("alltoall", "--")):
            mine = [x for x in steps if x.exchange == exchange]
            named: dict[str, Any] = {"label": name if line == "-" else None, "ls": line}
            speed.plot([x.ranks for x in mine], [x.tokens_per_second for x in mine], **style, **named)
            least = max(mine[0].tokens_per_second / mine[0].ranks, 1e-9)
            share = [100 * x.tokens_per_second / x.ranks / least for x in mine]
            efficiency.plot([x.ranks for x in mine], share, **style, **named)
        ratios = []
        for other in speeds.values():
            flat, levels = (next(x for x in other[name] if x.exchange == kind) for kind in ("alltoall", "two_level"))
            ratios.append(levels.total / flat.total)
        crossing.plot(list(speeds), ratios, **style)
    ranks = sorted({x.ranks for steps in found.values() for x in steps})
    for axis, ylabel, heading in (
        (speed, "tokens per second, all ranks", "Throughput"),
        (efficiency, f"% of a rank's speed among {ranks[0]}", "Efficiency"),
    ):
        axis.set_xscale("log")
        axis.set_xticks(ranks, [str(n) for n in ranks], fontsize=8)
        axis.xaxis.set_minor_locator(NullLocator())
        label(axis, "ranks", ylabel, f"{heading} (dashed: flat)")
    speed.set_yscale("log")
    efficiency.set_ylim(0, None)
    crossing.axhline(1, color="black", lw=1)
    crossing.set(xscale="log")
    largest = max(x.ranks for steps in next(iter(speeds.values())).values() for x in steps)
    label(
        crossing, "Gbit/s per rank between nodes", "step, two-level / flat", f"Below 1 two levels win ({largest} ranks)"
    )
    speed.legend(frameon=False, fontsize=8)
    bars = figure.add_subplot(grid[1, :])
    shown = [(name, x) for name, steps in found.items() for x in steps if x.ranks in (ranks[0], largest, ranks[-1])]
    tops = _stack(
        bars, range(len(shown)), {part: [x.seconds[part] / x.total / 10 for _, x in shown] for part in STEP_PARTS}, 0.8
    )
    for place, (top, (_, x)) in enumerate(zip(tops, shown, strict=True)):
        bars.text(place, top, f"{1e3 * x.total:,.0f}", ha="center", va="bottom", fontsize=6.5)
    names = {"alltoall": "flat", "two_level": "2-lev"}
    bars.set_xticks(range(len(shown)), [f"{x.ranks}\n{names[x.exchange]}" for _, x in shown], fontsize=6.5)
    label(bars, "", "% of the step", "What limits each (above: ms per step; below: ranks and exchange)")
    bars.grid(visible=False, axis="x")
    each = len(shown) / len(found)
    for i, name in enumerate(found):
        bars.annotate(
            name,
            ((i + 0.5) * each - 0.5, 0),
            (0, -26),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=8,
        )
    bars.set_xlim(-0.6, len(shown) - 0.4)
    bars.legend(frameon=False, fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=5)
    figure.suptitle(title, fontsize=11)
    return save(figure, path)
