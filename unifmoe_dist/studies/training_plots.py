"""Plots of one run from its metrics.jsonl: learning curves, compute over time, expert and block usage."""

from __future__ import annotations

import sys
from pathlib import Path

from unifmoe_dist.studies.figures.style import save
from unifmoe_dist.studies.figures.training import compute_figure, curves_figure, of_kind, usage_figure
from unifmoe_dist.studies.records import read_metrics


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
