"""Images with what their patches cost, what each semantic element uses, and sentences with what their tokens cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from unifmoe_dist.studies.figures.style import heatmap, ink_on, new_figure, panels
from unifmoe_dist.studies.usage.maps import ElementUsage, TextCompute, high_demand


def patch_figure(images: Tensor, compute: Tensor, threshold: int, titles: Sequence[str], columns: int = 4) -> Figure:
    """Images beside the block usage of their patches; patches with C_B >= threshold are outlined.

    Args:
        images: (n, channels, height, width), n at least 1, values in 0..1.
        compute: (n, rows, columns) C_B, from `patch_compute`.
        threshold: Least C_B that is outlined.
        titles: One per image.
        columns: Images per row of the figure.
    """
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    figure, axes = panels(rows, 2 * columns, 3.4 * columns + 0.6, 1.95 * rows + 0.2)
    for axis in axes.flat:
        axis.axis("off")
    scale = Normalize(int(compute.min()), max(int(compute.max()), int(compute.min()) + 1))
    height, width = images.shape[2:]
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    for image, values, title, (plain, coloured) in zip(
        images, compute, titles, axes.reshape(-1, 2)[: len(images)], strict=True
    ):
        _show(plain, image, 1.0)
        _show(coloured, image.mean(0, keepdim=True), 0.45)  # grey and pale: its colours must not mix with the scale's
        coloured.imshow(values.numpy(), cmap="viridis", norm=scale, alpha=0.65, extent=extent)
        tall, wide = height / values.shape[0], width / values.shape[1]
        for row, column in high_demand(values, threshold).nonzero().tolist():
            corner = (column * wide - 0.5, row * tall - 0.5)
            coloured.add_patch(Rectangle(corner, wide, tall, fill=False, edgecolor="red", linewidth=1.4))
        plain.set_title(title, fontsize=9)
        coloured.set_title(f"mean $C_B$ {values.double().mean():.1f}", fontsize=9)
    label = rf"$C_B$ (outlined: $\geq$ {threshold})"
    figure.colorbar(ScalarMappable(scale, "viridis"), ax=axes, label=label, alpha=0.65, fraction=0.03, aspect=30)
    return figure


def element_figure(image: Tensor, mask: Tensor, usage: ElementUsage, names: Sequence[str]) -> Figure:
    """The image, its patch semantics, and the use of shared blocks and residual experts within each element.

    Args:
        image: (channels, height, width), values in 0..1.
        mask: (rows, columns), element of each patch.
        usage: From `element_usage`.
        names: One per element of `usage`, of which there are at most 20; patches of others stay grey.
    """
    figure = new_figure(10, 3.9 + 0.4 * len(names))
    halves: Any = figure.subfigures(2, 1, height_ratios=[2.8, 1.1 + 0.4 * len(names)])
    original, semantics = halves[0].subplots(1, 2)
    _show(original, image, 1.0)
    original.set_title("image", fontsize=10)
    _semantics(semantics, mask, usage.elements, names)
    rows = [f"{name} ({count})" for name, count in zip(names, usage.patches, strict=True)]
    kinds = {"shared block": usage.blocks, "residual expert": usage.experts}
    for axis, (text, values) in zip(halves[1].subplots(1, 2), kinds.items(), strict=True):
        columns = [str(c) for c in range(values.shape[1])]
        heatmap(axis, 100 * values, rows, columns, 0, 100 * float(values.max()), form="{:.0f}")
        axis.set(xlabel=text, aspect="auto")
        axis.set_title(f"{text}s within each element (%)", fontsize=10)
    return figure


def _show(axis: Axes, image: Tensor, strength: float) -> None:
    pixels = image.clamp(0, 1).movedim(0, -1).numpy()
    grey = pixels.shape[-1] == 1
    axis.imshow(pixels[..., 0] if grey else pixels, cmap="gray" if grey else None, vmin=0, vmax=1, alpha=strength)
    axis.axis("off")


def _semantics(axis: Axes, mask: Tensor, elements: list[int], names: Sequence[str]) -> None:
    place = {number: index for index, number in enumerate(elements)}
    indices = np.array([[place.get(int(v), -1) for v in row] for row in mask])
    size = 10 if len(elements) <= 10 else 20  # the colours of the larger map come in pairs that are harder to tell
    shown = axis.imshow(np.ma.masked_less(indices, 0), cmap=f"tab{size}", vmin=0, vmax=size - 1)
    axis.set_facecolor("0.9")
    axis.set(xticks=[], yticks=[])
    axis.set_title("patch semantics", fontsize=10)
    handles = [Rectangle((0, 0), 1, 1, color=shown.cmap(index)) for index in range(len(names))]
    axis.legend(handles, names, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))


_LINE, _TITLE = 0.55, 0.36  # heights of a line of tokens and of a title, in inches
_LETTER = 0.085  # width of a letter of the token font, in inches


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
    for x, y, string, value in placed:
        style: dict[str, Any] = {"va": "center", "color": "0.35", "parse_math": False}
        if value is None:
            axis.text(x, y, string, fontsize=8, style="italic", **style)
            continue
        axis.text(x, y + 0.21, str(value), fontsize=6.5, **style)
        ground = mapping.to_rgba(np.asarray(value))
        style |= {"bbox": {"boxstyle": "round,pad=0.25", "facecolor": ground, "edgecolor": "none"}}
        axis.text(x, y, string, fontsize=10, family="monospace", **style | {"color": ink_on(ground)})
    bar = figure.add_axes((0.25, 0.52 / height, 0.5, 0.1 / height))
    bounds = figure.colorbar(mapping, cax=bar, orientation="horizontal", label="blocks executed $C_B$")
    bounds.ax.tick_params(labelsize=8)
    return figure


def _layout(
    texts: Sequence[TextCompute], titles: Sequence[str] | None, width: float
) -> tuple[list[tuple[float, float, str, int | None]], float]:
    """All strings at their places in inches from the upper left, with their C_B or, titles, None; the height used."""
    placed: list[tuple[float, float, str, int | None]] = []
    y, left = 0.08, 0.15
    for number, text in enumerate(texts):
        if titles is not None:
            placed.append((left - 0.05, y + _TITLE / 2, titles[number], None))
            y += _TITLE
        x = left
        for string, value in zip(text.tokens, text.block_compute, strict=True):
            step = _LETTER * len(string) + 0.17
            if x + step > width and x > left:
                x, y = left, y + _LINE
            placed.append((x, y + 0.15, string, value))
            x += step
        y += _LINE
    return placed, y
