"""The benchmark as bars: how many dense FFNs every layer costs, and how many it computes."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

from unifmoe_dist.analysis.benchmark import Shape, Timing  # noqa: E402

COLOURS = {"forward": "tab:blue", "training": "tab:orange"}
LABELS = {"forward": "forward", "training": "forward + backward"}


def plot(results: list[tuple[Shape, list[Timing]]], where: str, path: Path) -> Path:
    """One panel per shape; a black mark shows the arithmetic of each layer, its floor."""
    figure, axes = plt.subplots(1, len(results), figsize=(6.4 * len(results), 4.2), squeeze=False)
    for axis, (shape, timings) in zip(axes[0], results, strict=True):
        rows = np.arange(len(timings))[::-1]
        longest = 0.0
        for offset, kind in ((0.2, "forward"), (-0.2, "training")):
            ratios = [t.median(kind) / timings[0].median(kind) for t in timings]
            longest = max(longest, *ratios)
            axis.barh(rows + offset, ratios, height=0.38, color=COLOURS[kind], label=LABELS[kind])
            for row, ratio in zip(rows, ratios, strict=True):
                axis.text(ratio, row + offset, f" {ratio:.2f}", va="center", fontsize=8)
        marks = [(row, t.ffns) for row, t in zip(rows, timings, strict=True) if t.ffns is not None]
        axis.plot([f for _, f in marks], [r for r, _ in marks], "k|", markersize=26, label="arithmetic (floor)")
        axis.set_yticks(rows, [t.contender for t in timings])
        axis.set_xlim(0, 1.12 * longest)
        axis.set_xlabel("time, in dense FFNs")
        size = f"N={shape.tokens}, d={shape.dim}, K={shape.experts}, B={shape.blocks}"
        axis.set_title(f"{shape.name}: {size}", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x", alpha=0.25)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="lower center", ncols=3, fontsize=9, markerscale=0.4)
    figure.suptitle(where, fontsize=11)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    temporary = path.with_name(".writing-" + path.name)
    figure.savefig(temporary, dpi=130)
    plt.close(figure)
    temporary.replace(path)
    return path
