"""The figure of the page: times over the floor, shape by shape."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from unifmoe_dist.studies.benchmark.side_by_side import Result, Timing
from unifmoe_dist.studies.figures.style import label, new_figure
from unifmoe_dist.studies.gpu_check.timing import GOALS, KINDS, over_floor

COLOURS = {"forward": "tab:blue", "training": "tab:orange"}


def over_floor_figure(results: dict[str, Any]) -> Figure | None:
    """Bars of every contender with a floor, one panel per shape of the benchmark and of the peers; None without any."""
    shapes = [
        (name, _result(name, contenders))
        for part in results["parts"]
        if part["name"] in ("benchmark", "peers")
        for name, contenders in part["numbers"].items()
        if isinstance(contenders, dict) and ", N = " in name
    ]
    if not shapes:
        return None
    order = [name for name, _ in shapes]
    shapes.sort(key=lambda shape: order.index(shape[0]))  # a shape's two panels beside each other
    rows = max(len(result.timings) for _, result in shapes)
    figure = new_figure(12, len(shapes[::2]) * (1.0 + 0.4 * rows))
    axes = figure.subplots(len(shapes[::2]), 2, squeeze=False).flatten()
    for axis, (name, result) in zip(axes, shapes, strict=False):
        timings = [timing for timing in result.timings if timing.work is not None]
        places = np.arange(len(timings))[::-1]
        for offset, goal, kind in zip((0.2, -0.2), GOALS.get(name.partition(",")[0], (1, 1)), KINDS, strict=True):
            ratios = [over_floor(result, timing, kind) for timing in timings]
            bars = axis.barh(places + offset, ratios, height=0.38, color=COLOURS[kind], label=KINDS[kind])
            axis.bar_label(bars, fmt=" {:.2f}", fontsize=8)
            axis.axvline(goal, color=COLOURS[kind], linestyle="--", linewidth=1)
        axis.set_yticks(places, [timing.contender for timing in timings], fontsize=8)
        axis.set_xscale("log")
        axis.margins(x=0.15)
        label(axis, "time over the floor", "", name)
    for axis in axes[len(shapes) :]:
        axis.set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def _result(name: str, contenders: dict[str, Any]) -> Result:
    return Result(name, "", 0.0, 0.0, [Timing(**timing) for timing in contenders.values()], {})
