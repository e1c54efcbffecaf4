"""Images with what their patches cost, and what each semantic element uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from unifmoe_dist.studies.figures.style import heatmap, new_figure
from unifmoe_dist.studies.usage.maps import ElementUsage, high_demand


def patch_figure(images: Tensor, compute: Tensor, threshold: int, titles: Sequence[str], columns: int = 4) -> Figure:
    """Images beside the block usage of their patches; patches with C_B >= threshold are outlined.

    Args:
        images: (n, channels, height, width), values in 0..1.
        compute: (n, rows, columns) C_B, from `patch_compute`.
        threshold: Least C_B that is outlined.
        titles: One per image.
        columns: Images per row of the figure.
    """
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    figure = new_figure(3.4 * columns + 0.6, 1.95 * rows + 0.2)
    axes = figure.subplots(rows, 2 * columns, squeeze=False)
    low, high = int(compute.min()), max(int(compute.max()), int(compute.min()) + 1)
    for axis in axes.flat:
        axis.axis("off")
    shown = None
    for n, (image, values) in enumerate(zip(images, compute, strict=True)):
        row, column = divmod(n, columns)
        plain, coloured = axes[row][2 * column], axes[row][2 * column + 1]
        _show(plain, image, 1.0)
        _show(coloured, image.mean(0, keepdim=True), 0.45)  # grey and pale: its colours must not mix with the scale's
        height, width = image.shape[1:]
        extent = (-0.5, width - 0.5, height - 0.5, -0.5)
        shown = coloured.imshow(values.numpy(), cmap="viridis", vmin=low, vmax=high, alpha=0.65, extent=extent)
        _outline(coloured, high_demand(values, threshold), height, width)
        plain.set_title(titles[n], fontsize=9)
        coloured.set_title(f"mean $C_B$ {values.double().mean():.1f}", fontsize=9)
    if shown is not None:
        figure.colorbar(shown, ax=axes, label=rf"$C_B$ (outlined: $\geq$ {threshold})", fraction=0.03, aspect=30)
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
    top, bottom = halves
    original, semantics = top.subplots(1, 2)
    _show(original, image, 1.0)
    original.set_title("image", fontsize=10)
    _semantics(semantics, mask, usage.elements, names)
    blocks, experts = bottom.subplots(1, 2)
    for axis, values, text in ((blocks, usage.blocks, "shared block"), (experts, usage.experts, "residual expert")):
        columns = [str(c) for c in range(values.shape[1])]
        rows = [f"{name} ({count})" for name, count in zip(names, usage.patches, strict=True)]
        heatmap(axis, 100 * values, rows, columns, 0, 100 * float(values.max()), form="{:.0f}")
        axis.set(xlabel=text, aspect="auto")
        axis.set_title(f"{text}s within each element (%)", fontsize=10)
    return figure


def _show(axis: Axes, image: Tensor, strength: float) -> None:
    pixels = image.clamp(0, 1).movedim(0, -1).numpy()
    grey = pixels.shape[-1] == 1
    axis.imshow(pixels[..., 0] if grey else pixels, cmap="gray" if grey else None, vmin=0, vmax=1, alpha=strength)
    axis.axis("off")


def _outline(axis: Axes, chosen: Tensor, height: int, width: int) -> None:
    rows, columns = chosen.shape
    tall, wide = height / rows, width / columns
    for row, column in chosen.nonzero().tolist():
        corner = (column * wide - 0.5, row * tall - 0.5)
        axis.add_patch(Rectangle(corner, wide, tall, fill=False, edgecolor="red", linewidth=1.4))


def _semantics(axis: Axes, mask: Tensor, elements: list[int], names: Sequence[str]) -> None:
    place = {number: index for index, number in enumerate(elements)}
    indices = np.array([[place.get(int(v), -1) for v in row] for row in mask])
    masked = np.ma.masked_less(indices, 0)
    size = 10 if len(elements) <= 10 else 20  # the colours of the larger map come in pairs that are harder to tell
    axis.imshow(masked, cmap=f"tab{size}", vmin=0, vmax=size - 1)
    axis.set_facecolor("0.9")
    axis.set(xticks=[], yticks=[])
    axis.set_title("patch semantics", fontsize=10)
    colours = axis.images[0].cmap
    handles = [Rectangle((0, 0), 1, 1, color=colours(index)) for index in range(len(names))]
    axis.legend(handles, names, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
