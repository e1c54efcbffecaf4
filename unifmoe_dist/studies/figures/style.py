"""What all figures share. They are plain matplotlib `Figure`s, without pyplot's global state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

LOW_COLOUR, HIGH_COLOUR = "tab:orange", "tab:blue"
SHARED_COLOUR, EXPERT_COLOUR = "tab:orange", "tab:blue"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> Path:
    """Write a figure in the format of the path's suffix (png, pdf, svg), whole or not at all."""
    temporary = path.with_name(".writing-" + path.name)
    figure.savefig(temporary, dpi=140)
    temporary.replace(path)
    return path


def plain(name: str) -> str:
    """A name from outside, such as a run's folder, as matplotlib's text: no formula in it, and never left out."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def label(axis: Axes, xlabel: str, ylabel: str, title: str) -> None:
    """Labels, title, a light grid and no box."""
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.set_title(title, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)


def heatmap(
    axis: Axes,
    values: Tensor,
    rows: list[str],
    columns: list[str],
    low: float,
    high: float,
    colours: str = "Blues",
    form: str = "{:z.2f}",
    numbers: bool = True,
) -> Any:
    """A matrix with its numbers in the cells; NaN cells are grey. Returns what a colour bar needs."""
    data = values.double().numpy()
    image = axis.imshow(data, cmap=colours, vmin=low, vmax=high)
    axis.set_facecolor("0.9")
    axis.set_xticks(range(len(columns)), columns)
    axis.set_yticks(range(len(rows)), rows)
    axis.tick_params(length=0)
    for (row, column), value in _cells(data):
        if numbers and value == value:
            ink = ink_on(image.to_rgba(np.asarray(value)))
            axis.text(column, row, form.format(value), ha="center", va="center", fontsize=8, color=ink)
    return image


def ink_on(ground: Any) -> str:
    """Black or white, whichever reads better on a colour (red, green, blue, ...) in 0..1."""
    return "white" if 0.3 * ground[0] + 0.6 * ground[1] + 0.1 * ground[2] < 0.5 else "black"


def _cells(data: Any) -> list[tuple[tuple[int, int], float]]:
    return [((r, c), float(data[r, c])) for r in range(data.shape[0]) for c in range(data.shape[1])]
