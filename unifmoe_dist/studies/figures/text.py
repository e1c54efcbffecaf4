"""Sentences with every token coloured by what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from unifmoe_dist.studies.figures.style import ink_on, new_figure
from unifmoe_dist.studies.usage.maps import TextCompute

_LINE, _TITLE = 0.55, 0.36  # heights of a line of tokens and of a title, in inches
_LETTER = 0.085  # width of a letter of the token font, in inches


@dataclass(frozen=True)
class _Placed:
    """A string at a place in inches from the upper left; value is its C_B, or None for a title."""

    x: float
    y: float
    string: str
    value: int | None


def text_figure(texts: Sequence[TextCompute], titles: Sequence[str] | None = None, width: float = 9.0) -> Figure:
    """Every token on a ground coloured by C_B, its C_B below; all texts on one scale, lines broken to the width.

    Args:
        texts: From `text_compute`.
        titles: One per text, set above it.
        width: Of the figure, in inches.
    """
    placed, used = _layout(texts, titles, width - 0.15)
    footer = 0.75
    height = used + footer
    figure = new_figure(width, height)
    figure.set_layout_engine("none")
    axis = figure.add_axes((0.0, footer / height, 1.0, used / height))
    axis.set(xlim=(0, width), ylim=(used, 0))
    axis.axis("off")
    values = [value for text in texts for value in text.block_compute]
    low, high = min(values, default=0), max(values, default=1)
    mapping = ScalarMappable(Normalize(low, max(high, low + 1)), "YlOrRd")
    for p in placed:
        if p.value is None:
            axis.text(p.x, p.y, p.string, fontsize=8, color="0.35", va="center", style="italic", parse_math=False)
            continue
        ground = mapping.to_rgba(np.asarray(p.value))
        box = {"boxstyle": "round,pad=0.25", "facecolor": ground, "edgecolor": "none"}
        axis.text(
            p.x,
            p.y,
            p.string,
            fontsize=10,
            family="monospace",
            va="center",
            color=ink_on(ground),
            bbox=box,
            parse_math=False,
        )
        axis.text(p.x, p.y + 0.21, str(p.value), fontsize=6.5, color="0.35", va="center")
    bar = figure.add_axes((0.25, 0.52 / height, 0.5, 0.1 / height))
    bounds = figure.colorbar(mapping, cax=bar, orientation="horizontal", label="blocks executed $C_B$")
    bounds.ax.tick_params(labelsize=8)
    return figure


def _layout(texts: Sequence[TextCompute], titles: Sequence[str] | None, width: float) -> tuple[list[_Placed], float]:
    """All strings at their places, and the height used."""
    placed: list[_Placed] = []
    y, left = 0.08, 0.15
    for number, text in enumerate(texts):
        if titles is not None:
            placed.append(_Placed(left - 0.05, y + _TITLE / 2, titles[number], None))
            y += _TITLE
        x = left
        for string, value in zip(text.tokens, text.block_compute, strict=True):
            step = _LETTER * len(string) + 0.17
            if x + step > width and x > left:
                x, y = left, y + _LINE
            placed.append(_Placed(x, y + 0.15, string, value))
            x += step
        y += _LINE
    return placed, y
