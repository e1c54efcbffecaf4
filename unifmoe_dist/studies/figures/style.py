"""What all figures share. They are plain matplotlib `Figure`s, without pyplot's global state."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from unifmoe_dist.files import appearing

LOW_COLOUR, HIGH_COLOUR = "tab:orange", "tab:blue"
SHARED_COLOUR, EXPERT_COLOUR = "tab:orange", "tab:blue"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def panels(rows: int, columns: int, width: float, height: float, **more: Any) -> tuple[Figure, np.ndarray]:
    """A figure, in inches, and its (rows, columns) axes."""
    figure = new_figure(width, height)
    return figure, figure.subplots(rows, columns, squeeze=False, **more)


def save(figure: Figure, path: Path, dpi: int = 140) -> Path:
    """Write a figure in the format of the path's suffix (png, pdf, svg), whole or not at all.

    It is laid out once: savefig would do so anew for every format, twice, and draw all to know its size.
    """
    if engine := figure.get_layout_engine():
        engine.execute(figure)
        figure.set_layout_engine(None)
    with appearing(path) as temporary:
        figure.savefig(temporary, dpi=dpi)
    return path


def plain(name: str) -> str:
    """A name from outside, such as a run's folder, as matplotlib's text: no formula in it, and never left out."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def label(axis: Axes, xlabel: str = "", ylabel: str = "", title: str = "") -> None:
    """Labels, title, a light grid behind what is drawn, and no box."""
    axis.set(xlabel=xlabel, ylabel=ylabel)
    axis.set_title(title, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.set_axisbelow(True)


def bars(axis: Axes, load: Sequence[float], what: str, title: str, colour: str) -> None:
    """Fractions of tokens, one bar for each expert or block."""
    places = range(len(load))
    axis.bar(places, 100 * np.asarray(load), color=colour)
    axis.set_xticks(places)
    label(axis, what, "tokens using it (%)", title)
    axis.grid(visible=False, axis="x")


def heatmap(
    axis: Axes,
    values: Tensor,
    rows: list[str],
    columns: list[str],
    low: float,
    high: float,
    title: str,
    colours: str = "Blues",
    form: str = "{:z.2f}",
    numbers: bool = True,
) -> None:
    """A matrix with its numbers in the cells; NaN cells are grey."""
    image = axis.imshow(values.double().numpy(), cmap=colours, vmin=low, vmax=high)
    axis.set_facecolor("0.9")
    axis.set_xticks(range(len(columns)), columns)
    axis.set_yticks(range(len(rows)), rows)
    axis.tick_params(length=0)
    axis.set_title(title, fontsize=10)
    for (row, column), value in np.ndenumerate(values.double().numpy()):
        if numbers and value == value:
            ink = ink_on(image.to_rgba(np.asarray(value)))
            axis.text(column, row, form.format(value), ha="center", va="center", fontsize=8, color=ink)


def ink_on(ground: Any) -> str:
    """Black or white, whichever reads better on a colour (red, green, blue, ...) in 0..1."""
    return "white" if 0.3 * ground[0] + 0.6 * ground[1] + 0.1 * ground[2] < 0.5 else "black"
