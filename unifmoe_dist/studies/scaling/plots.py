"""Plots of a scaling study and of cost-model predictions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator  # noqa: E402

from unifmoe_dist.studies.scaling.cost_model import PARTS_OF_TERM, Check, Cluster, Prediction, workload_of  # noqa: E402
from unifmoe_dist.studies.scaling.grid import Point  # noqa: E402
from unifmoe_dist.studies.scaling.point import Study  # noqa: E402
from unifmoe_dist.studies.scaling.step_split import PARTS  # noqa: E402

_LABELS = {
    "route": "routing",
    "dispatch": "dispatch",
    "shared_experts": "shared expert",
    "residual_experts": "residual experts",
    "combine": "combine",
    "all_reduce": "all-reduce",
    "optimizer": "optimiser",
    "other": "rest of the model",
    "experts": "experts",
    "dense": "dense part",
    "exchange": "exchange",
}
_COLOURS = {
    "route": "#7b3294",
    "dispatch": "#2166ac",
    "shared_experts": "#f4a582",
    "residual_experts": "#d6604d",
    "combine": "#92c5de",
    "all_reduce": "#1b7837",
    "optimizer": "#a6dba0",
    "other": "#bdbdbd",
    "experts": "#d6604d",
    "dense": "#bdbdbd",
    "exchange": "#2166ac",
}
_RANK_COLOURS = ("#222222", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def plot_study(points: Sequence[Point], study: Study, folder: Path) -> list[Path]:
    """Write scaling.png: one figure for each batch, dispatcher, ZeRO stage and expert-parallel choice measured.

    A second and later figure is named for what sets it apart. Points where every rank holds all experts belong to
    the figures of every dispatcher.
    """
    written = []
    for number, (words, chosen) in enumerate(_series(points)):
        name = "scaling.png" if number == 0 else f"scaling-{'-'.join(words)}.png"
        written.append(_figure(chosen, study, folder / name))
    return written


def _series(points: Sequence[Point]) -> list[tuple[list[str], list[Point]]]:
    """Points that differ in K and ranks alone, with words that name the series."""
    exchanging = sorted({p.layout.dispatcher for p in points if p.layout.dispatcher != "local"}) or ["local"]
    result = []
    for batch in sorted({p.layout.batch for p in points}):
        for zero in sorted({p.layout.zero for p in points}):
            for dispatcher in exchanging:
                chosen = [
                    p
                    for p in points
                    if (p.layout.batch, p.layout.zero) == (batch, zero) and p.layout.dispatcher in (dispatcher, "local")
                ]
                if chosen:
                    result.append(([f"batch{batch}", dispatcher, f"zero{zero}"], _widest(chosen)))
    return result


def _widest(points: list[Point]) -> list[Point]:
    """Of several expert-parallel sizes at the same K and ranks, the largest."""
    best: dict[tuple[int, int], Point] = {}
    for p in sorted(points, key=lambda p: p.layout.expert_parallel):
        best[p.layout.ranks, p.layout.experts] = p
    return [best[key] for key in sorted(best)]


def _figure(points: list[Point], study: Study, path: Path) -> Path:
    figure = plt.figure(figsize=(12, 8.2), layout="constrained")
    grid = figure.add_gridspec(2, 3, height_ratios=(1, 1.15))
    speed, volume, memory = (figure.add_subplot(grid[0, i]) for i in range(3))
    experts = sorted({p.layout.experts for p in points})
    ranks = sorted({p.layout.ranks for p in points})
    style: dict[int, dict[str, Any]] = {
        n: dict(color=_RANK_COLOURS[i % 7], marker=_MARKERS[i % 7], ms=5, lw=1.6) for i, n in enumerate(ranks)
    }

    for n in ranks:
        mine = [p for p in points if p.layout.ranks == n]
        k = [p.layout.experts for p in mine]
        label = f"{n} rank{'s' if n > 1 else ''}"
        speed.plot(k, [p.result.tokens_per_second for p in mine], label=label, **style[n])
        memory.plot(k, [p.result.memory / 1e6 for p in mine], label=label, **style[n])
        if n > 1:
            volume.plot(k, [p.result.tutel_bytes / 1e3 for p in mine], ls="--", **{**style[n], "marker": None})
            volume.plot(k, [p.result.sent_bytes / 1e3 for p in mine], **style[n])
            volume.plot(k, [p.result.minimum_bytes / 1e3 for p in mine], "x", color="black", ms=7, zorder=5)
    _axes(speed, experts, "tokens per second, all ranks", "Throughput")
    _axes(memory, experts, "MB per rank", "Peak memory of training")
    _axes(volume, experts, "KB per token and layer", "Bytes between ranks, forward + backward")
    speed.legend(frameon=False)
    several = [n for n in ranks if n > 1]
    if several:
        _volume_legend(volume, {n: style[n] for n in several})
    _bars(figure.add_subplot(grid[1, :]), points, experts, ranks)
    busy = max(p.result.contention for p in points)
    note = f" (up to {busy:g} CPU threads per core)" if busy > 1 else ""
    last = points[-1]  # the most ranks
    figure.suptitle(
        f"UniF-MoE training steps on {last.result.device.upper()} ranks{note}: {last.layout.dispatcher}, ZeRO "
        f"{last.layout.zero}, {last.result.tokens // last.layout.ranks} tokens per rank, width {study.width}, "
        f"{len(study.layers)} MoE layers, B = {study.blocks}, {study.precision}",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _volume_legend(axis: Any, style: dict[int, dict[str, Any]]) -> None:
    """What each line style counts, below the axes; drawn in the curves' own colour where there is one."""
    only = next(iter(style.values())) if len(style) == 1 else None
    colour, marker = (only["color"], only["marker"]) if only else ("grey", "o")
    handles = [
        Line2D([], [], color=colour, marker=marker, ms=5, label="sent"),
        Line2D([], [], color="black", marker="x", ls="", ms=7, label="least possible"),
        Line2D([], [], color=colour, ls="--", label="Tutel, padded"),
    ]
    title = f"{next(iter(style))} ranks" if only else "line style (colours: ranks, as in Throughput)"
    axis.legend(
        handles=handles,
        title=title,
        ncols=3,
        frameon=False,
        fontsize=9,
        title_fontsize=9,
        columnspacing=1.2,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.15),
    )


def _axes(axis: Any, experts: list[int], ylabel: str, title: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(experts, [str(k) for k in experts])
    axis.xaxis.set_minor_locator(NullLocator())
    _log_ticks(axis.yaxis, *axis.get_ylim())
    axis.set(xlabel="residual experts K", ylabel=ylabel, title=title)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25, which="both")


def _log_ticks(axis: Any, low: float, high: float) -> None:
    """Labelled ticks at 1, 2, 5 per decade, or evenly spaced ones where too few of these lie in the range."""
    ticks = [t for e in range(-6, 13) for m in (1, 2, 5) if low <= (t := m * 10.0**e) <= high]
    if len(ticks) < 3:
        ticks = [t for t in MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high) if low <= t <= high]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.10g}"))


def _bars(axis: Any, points: list[Point], experts: list[int], ranks: list[int]) -> None:
    width = 0.8 / len(ranks)
    ticks, names = [], []
    for i, k in enumerate(experts):
        for j, n in enumerate(ranks):
            match = [p for p in points if (p.layout.experts, p.layout.ranks) == (k, n)]
            if not match:
                continue
            x, bottom = i + (j - (len(ranks) - 1) / 2) * width, 0.0
            ticks.append(x)
            names.append(str(n))
            for part in PARTS:
                value = 1e3 * getattr(match[0].result, part)
                axis.bar(x, value, 0.9 * width, bottom=bottom, color=_COLOURS[part])
                bottom += value
            axis.text(x, bottom, f"{bottom:,.0f}", ha="center", va="bottom", fontsize=7)
    axis.set_xticks(ticks, names, fontsize=8)
    for i, k in enumerate(experts):
        axis.annotate(
            f"K = {k}",
            (i, 0),
            xycoords=("data", "axes fraction"),
            xytext=(0, -20),
            textcoords="offset points",
            ha="center",
            va="top",
        )
    axis.annotate(
        "ranks",
        (0, 0),
        xycoords="axes fraction",
        xytext=(-8, -5),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=8,
    )
    axis.set_xlim(-0.6, len(experts) - 0.4)
    axis.set(ylabel="ms per step", title="Where a step goes (mean over ranks; dispatch and all-reduce include waiting)")
    axis.legend(
        handles=[plt.Rectangle((0, 0), 1, 1, color=_COLOURS[p], label=_LABELS[p]) for p in PARTS],
        frameon=False,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        ncols=len(PARTS),
        fontsize=9.5,
        columnspacing=1.2,
    )
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25, axis="y")
    axis.set_axisbelow(True)


def plot_check(result: Check, study: Study, path: Path) -> Path:
    """Predicted against measured steps, fitted and held-out points apart."""
    figure, axis = plt.subplots(figsize=(5.2, 4.6), layout="constrained")
    groups = (("fitted", result.fitted, "#2166ac", "o"), ("held out", result.held_out, "#d55e00", "D"))
    limits = []
    for name, points, colour, marker in groups:
        measured = [1e3 * p.result.step for p in points]
        predicted = [1e3 * sum(result.model.predict(workload_of(p, study)).values()) for p in points]
        axis.scatter(measured, predicted, color=colour, marker=marker, s=28, label=name, zorder=3)
        limits += measured + predicted
    low, high = 0.8 * min(limits), 1.25 * max(limits)
    axis.plot((low, high), (low, high), color="grey", lw=1)
    axis.fill_between(
        (low, high),
        (0.8 * low, 0.8 * high),
        (1.2 * low, 1.2 * high),
        color="grey",
        alpha=0.12,
        lw=0,
        label="within 20 %",
    )
    axis.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        ylim=(low, high),
        xlabel="measured step (ms)",
        ylabel="predicted step (ms)",
        title="Cost model",
    )
    for ax in (axis.xaxis, axis.yaxis):
        _log_ticks(ax, low, high)
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def plot_predictions(predictions: Sequence[Prediction], cluster: Cluster, device: str, path: Path) -> Path:
    """Predicted step split on a cluster, by K and expert-parallel size."""
    figure, axis = plt.subplots(figsize=(max(6.0, 0.75 * len(predictions) + 2.5), 4.4), layout="constrained")
    bottom = np.zeros(len(predictions))
    for term in PARTS_OF_TERM:
        values = np.array([1e3 * p.seconds[term] for p in predictions])
        axis.bar(np.arange(len(predictions)), values, 0.75, bottom=bottom, color=_COLOURS[term], label=_LABELS[term])
        bottom += values
    axis.set_xticks(
        np.arange(len(predictions)), [f"K = {p.experts}\nep {p.expert_parallel}" for p in predictions], fontsize=8
    )
    axis.set(
        ylabel="predicted ms per step",
        title=f"{cluster.nodes} nodes x {cluster.gpus_per_node}, {cluster.node_gbps:g} / {cluster.link_gbps:g} Gbit/s "
        f"inside / between nodes\ncompute as fitted on: {device}",
    )
    axis.title.set_fontsize(10)
    axis.legend(frameon=False, fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25, axis="y")
    axis.set_axisbelow(True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
