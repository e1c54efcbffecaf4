"""Does a run that was saved at one world size and resumed at others go on as if it had not stopped?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.figures.style import label as describe
from unifmoe_dist.studies.figures.style import new_figure, save
from unifmoe_dist.studies.records import read_metrics


def training_losses(run: Path) -> dict[int, float]:
    """Training loss by step."""
    return {r["step"]: r["loss"] for r in read_metrics(run) if r["kind"] == "train"}


def plot_resume(
    uninterrupted: tuple[str, Path], resumed: Mapping[str, Path], saved_at: int, path: Path
) -> dict[str, float]:
    """Overlay loss curves, and show below how far the resumed runs are from the uninterrupted one.

    Args:
        uninterrupted: Label and folder of the run that went through.
        resumed: Label -> folder of a run that continued from step `saved_at`.
        saved_at: The step of the checkpoint.
        path: The image to write.

    Returns:
        The largest absolute difference of the loss after `saved_at`, by label.

    Raises:
        UserError: a resumed run has no step in common with the uninterrupted one after `saved_at`.
    """
    whole = training_losses(uninterrupted[1])
    figure = new_figure(7.2, 5.6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    above.plot(list(whole), list(whole.values()), color="0.75", linewidth=5, label=uninterrupted[0])
    largest = {}
    for (label, run), marker, size in zip(resumed.items(), "o^sDvP", (6, 3.5, 3, 3, 3, 3), strict=False):
        losses = {s: v for s, v in training_losses(run).items() if s > saved_at and s in whole}
        if not losses:
            raise UserError(f"{run} has no training step after {saved_at} in common with {uninterrupted[1]}.")
        gaps = {step: abs(value - whole[step]) for step, value in losses.items()}
        largest[label] = max(gaps.values())
        above.plot(list(losses), list(losses.values()), marker, markersize=size, markerfacecolor="none", label=label)
        # A difference of exactly 0 has no place on a log scale: it is left out.
        below.plot(list(gaps), [gap or float("nan") for gap in gaps.values()], marker + "-", markersize=3, label=label)
    after = {step: value for step, value in whole.items() if step > saved_at}
    rounding = [np.finfo(np.float32).eps * abs(value) for value in after.values()]
    below.plot(list(after), rounding, "--", color="0.4", linewidth=1, label="float32 rounding of the loss")
    for axis in (above, below):
        axis.axvline(saved_at, color="0.4", linestyle=":", linewidth=1)
    above.annotate(
        f"checkpoint, step {saved_at}",
        (saved_at, 0.97),
        (4, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        va="top",
        fontsize=8,
        color="0.3",
    )
    above.legend(frameon=False, fontsize=8)
    below.set_yscale("log")
    below.legend(frameon=False, fontsize=8, loc="lower left")
    describe(above, "", "training loss", "A run resumed at other world sizes")
    describe(below, "step", "|difference| (log)", "Distance from the uninterrupted run")
    save(figure, path)
    return largest
