"""What a run's layers do, as figures. UniF-MoE: statistics over tokens; images with what their patches cost, what each
semantic element uses, sentences with what their tokens cost. A fixed number of experts: the three observations."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from unifmoe_dist.studies.diagnostics.demand_statistics import HIGH, LOW, DemandStatistics
from unifmoe_dist.studies.diagnostics.diagnosis import Diagnosis
from unifmoe_dist.studies.diagnostics.rankings import as_matrix, expert_pairs
from unifmoe_dist.studies.figures import style
from unifmoe_dist.studies.usage.layer_usage import Distribution, ElementUsage, LayerUsage, TextCompute, high_demand

QUANTITIES = (
    ("shared_demand", r"shared demand $\alpha$", style.SHARED_COLOUR),
    ("shared_block_count", "shared blocks $b$", style.SHARED_COLOUR),
    ("expert_count", "residual experts $k$", style.EXPERT_COLOUR),
    ("block_compute", "blocks executed $C_B$", "tab:green"),
)


def distribution_figure(layers: Mapping[str, LayerUsage]) -> Figure:
    """Histograms of alpha, b, k and C_B over tokens, one row per layer, with mean and quartiles."""
    figure, axes = style.panels(len(layers), len(QUANTITIES), 12.5, 2.7 * len(layers))
    for row, (name, layer) in zip(axes, layers.items(), strict=True):
        for axis, (field, text, colour) in zip(row, QUANTITIES, strict=True):
            _histogram(axis, getattr(layer, field), text, colour)
        row[0].set_ylabel(f"{name}\ntokens (%)")
    return figure


def _histogram(axis: Axes, values: Distribution, text: str, colour: str) -> None:
    edges, percent = np.asarray(values.edges), 100 * np.asarray(values.fraction)
    axis.bar(edges[:-1], percent, np.diff(edges), align="edge", color=colour, edgecolor="white", linewidth=0.5)
    axis.axvline(values.mean, color="black", linewidth=1.2)
    low, high = values.quantiles[0.25], values.quantiles[0.75]
    style.label(axis, text, "", f"mean {values.mean:.2f}, quartiles {low:.3g} to {high:.3g}")
    axis.grid(visible=False, axis="x")
    filled, margin = np.flatnonzero(percent), 0.02 * np.ptp(edges)
    axis.set_xlim(edges[filled[0]] - margin, edges[filled[-1] + 1] + margin)


def load_figure(layers: Mapping[str, LayerUsage]) -> Figure:
    """Tokens that use each residual expert and share each block, one row per layer."""
    figure, axes = style.panels(len(layers), 2, 9, 2.6 * len(layers))
    for row, (name, layer) in zip(axes, layers.items(), strict=True):
        style.bars(row[0], layer.expert_load, "residual expert", f"{name} (dotted: mean)", style.EXPERT_COLOUR)
        style.bars(row[1], layer.block_load, "shared block", f"{name} (dotted: mean)", style.SHARED_COLOUR)
        for axis, load in zip(row, (layer.expert_load, layer.block_load), strict=True):
            axis.axhline(100 * float(np.mean(load)), color="black", linewidth=1, linestyle=":")
    return figure


def coactivation_graph(runs: Mapping[str, LayerUsage]) -> Figure:
    """One graph per run or layer: experts on a circle, edges as wide and dark as pairs are co-activated."""
    figure, (axes,) = style.panels(1, len(runs), 4.0 * len(runs), 4.9)
    largest = max(float(layer.pair_coactivation.max()) for layer in runs.values())
    for axis, (name, layer) in zip(axes, runs.items(), strict=True):
        _graph(axis, layer, max(largest, 1e-9))
        mean = f"mean pair co-activation {100 * layer.mean_pair_coactivation:.1f} %"
        axis.set_title(f"{style.plain(name)}\n{mean}", fontsize=10)
    figure.supxlabel("node area: tokens that use the expert; edge: tokens that use both", fontsize=8, color="0.4")
    return figure


def _graph(axis: Axes, layer: LayerUsage, largest: float) -> None:
    count = len(layer.coactivation)
    angle = np.pi / 2 - 2 * np.pi * np.arange(count) / count
    x, y = np.cos(angle), np.sin(angle)
    edges = zip(layer.pair_coactivation.tolist(), expert_pairs(count).tolist(), strict=True)
    for value, pair in sorted(edges):
        if value > 0:
            strength = value / largest
            axis.plot(x[pair], y[pair], color=str(0.85 - 0.75 * strength), linewidth=0.3 + 6 * strength, zorder=1)
    area = 250 + 1200 * np.asarray(layer.expert_load)
    axis.scatter(x, y, s=area, color=style.EXPERT_COLOUR, edgecolor="white", zorder=2)
    for e in range(count):
        axis.text(x[e], y[e], str(e), ha="center", va="center", color="white", fontsize=9, zorder=3)
    axis.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal", xticks=[], yticks=[])
    axis.spines[:].set_visible(False)


def gram_figure(layers: Mapping[str, LayerUsage]) -> Figure:
    """Router Gram matrices with their distance to the identity; the shared embedding comes first."""
    figure, (axes,) = style.panels(1, len(layers), 4.6 * len(layers), 4.4)
    for axis, (name, layer) in zip(axes, layers.items(), strict=True):
        names = ["S", *(str(e) for e in range(len(layer.gram) - 1))]
        limit = max(1.0, float(layer.gram.abs().max()))
        title = f"{name}: router Gram matrix,\ndistance to identity {layer.gram_distance:.2g}"
        style.heatmap(axis, layer.gram, names, names, -limit, limit, title, colours="RdBu_r", numbers=len(names) <= 9)
    return figure


# -- where -------------------------------------------------------------------------------------------------------------


def patch_figure(images: Tensor, compute: Tensor, threshold: int, titles: Sequence[str], columns: int = 4) -> Figure:
    """Images (n, channels, height, width), n at least 1, in 0..1, beside the C_B (n, rows, columns) of their patches,
    of which those from the threshold on are outlined; `columns` images in a row of the figure."""
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    figure, axes = style.panels(rows, 2 * columns, 3.4 * columns + 0.6, 1.95 * rows + 0.2)
    for axis in axes.flat:
        axis.axis("off")
    scale = Normalize(int(compute.min()), max(int(compute.max()), int(compute.min()) + 1))
    height, width = images.shape[2:]
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    places = axes.reshape(-1, 2)[: len(images)]
    for image, values, title, (alone, coloured) in zip(images, compute, titles, places, strict=True):
        _show(alone, image, 1.0)
        _show(coloured, image.mean(0, keepdim=True), 0.45)  # grey and pale: its colours must not mix with the scale's
        coloured.imshow(values.numpy(), cmap="viridis", norm=scale, alpha=0.65, extent=extent)
        tall, wide = height / values.shape[0], width / values.shape[1]
        for row, column in high_demand(values, threshold).nonzero().tolist():
            corner = (column * wide - 0.5, row * tall - 0.5)
            coloured.add_patch(Rectangle(corner, wide, tall, fill=False, edgecolor="red", linewidth=1.4))
        alone.set_title(title, fontsize=9)
        coloured.set_title(f"mean $C_B$ {values.double().mean():.1f}", fontsize=9)
    outlined = rf"$C_B$ (outlined: $\geq$ {threshold})"
    figure.colorbar(ScalarMappable(scale, "viridis"), ax=axes, label=outlined, alpha=0.65, fraction=0.03, aspect=30)
    return figure


def element_figure(image: Tensor, mask: Tensor, usage: ElementUsage, names: Sequence[str]) -> Figure:
    """An image (channels, height, width) in 0..1, the element of each of its patches (rows, columns), and the use of
    shared blocks and residual experts within each element of `usage`, at most 20; patches of others stay grey."""
    figure = style.new_figure(10, 3.9 + 0.4 * len(names))
    halves: Any = figure.subfigures(2, 1, height_ratios=[2.8, 1.1 + 0.4 * len(names)])
    original, semantics = halves[0].subplots(1, 2)
    _show(original, image, 1.0)
    original.set_title("image", fontsize=10)
    _semantics(semantics, mask, usage.elements, names)
    rows = [f"{name} ({count})" for name, count in zip(names, usage.patches, strict=True)]
    kinds = {"shared block": usage.blocks, "residual expert": usage.experts}
    for axis, (text, values) in zip(halves[1].subplots(1, 2), kinds.items(), strict=True):
        columns, title = [str(c) for c in range(values.shape[1])], f"{text}s within each element (%)"
        style.heatmap(axis, 100 * values, rows, columns, 0, 100 * float(values.max()), title, form="{:.0f}")
        axis.set(xlabel=text, aspect="auto")
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
    """Every token on a ground coloured by C_B, its C_B below, each text below its title; all on one scale, lines broken
    to the width in inches."""
    placed, used = _layout(texts, titles, width - 0.15)
    footer = 0.75
    height = used + footer
    figure = style.new_figure(width, height)
    figure.set_layout_engine("none")
    axis = figure.add_axes((0.0, footer / height, 1.0, used / height))
    axis.set(xlim=(0, width), ylim=(used, 0))
    axis.axis("off")
    values = [value for text in texts for value in text.block_compute]
    low, high = min(values, default=0), max(values, default=1)
    mapping = ScalarMappable(Normalize(low, max(high, low + 1)), "YlOrRd")
    for x, y, string, value in placed:
        look: dict[str, Any] = {"va": "center", "color": "0.35", "parse_math": False}
        if value is None:
            axis.text(x, y, string, fontsize=8, style="italic", **look)
            continue
        axis.text(x, y + 0.21, str(value), fontsize=6.5, **look)
        ground = mapping.to_rgba(np.asarray(value))
        look |= {"bbox": {"boxstyle": "round,pad=0.25", "facecolor": ground, "edgecolor": "none"}}
        axis.text(x, y, string, fontsize=10, family="monospace", **look | {"color": style.ink_on(ground)})
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


# -- the three observations, after the paper's figure 2 ----------------------------------------------------------------

RATIO = r"shared ratio $\rho_{ij}$ (%)"
NO_CORRELATION = "no correlation: one of the two is constant"


def coactivation_figure(diagnosis: Diagnosis) -> Figure:
    """(a) Shared ratio and co-activation of every pair, as matrices and against each other."""
    figure, ((*matrices, points),) = style.panels(1, 3, 11.5, 3.8)
    names = [str(e) for e in range(diagnosis.num_experts)]
    ratio, frequency = 100 * diagnosis.sets.ratio, 100 * diagnosis.frequency
    aligned = rf"aligned value positions $\rho_{{ij}}$ (%), $\delta$={diagnosis.sets.delta:g}"
    drawn = {aligned: ratio, "tokens routed to the pair (%)": frequency}
    for axis, (title, values) in zip(matrices, drawn.items(), strict=True):
        top = max(float(values.max()), 1e-9)
        style.heatmap(axis, as_matrix(values, diagnosis.num_experts), names, names, 0, top, title, form="{:.1f}")
        axis.set(xlabel="expert $j$", ylabel="expert $i$")
    _scatter(points, ratio, frequency)
    for (i, j), *at in zip(diagnosis.pairs, ratio.tolist(), frequency.tolist(), strict=True):
        points.annotate(f"{i},{j}", at, xytext=(4, 3), textcoords="offset points", fontsize=7, color="0.4")
    r = diagnosis.coactivation
    title = f"Pearson r = {r.r:.3f} (p = {r.p_value:.2g}, {len(diagnosis.pairs)} pairs)"
    style.label(points, RATIO, "co-activation (% of tokens)", title if isfinite(r.r) else NO_CORRELATION)
    points.margins(x=0.12)
    points.set_ylim(bottom=0)
    return figure


def transition_figure(diagnosis: Diagnosis) -> Figure:
    """(b) Rank transitions, beside those of the control where there is one."""
    drawn = {"router retrained on residual positions": diagnosis.transition}
    if diagnosis.control is not None:
        drawn["control: retrained on complete responses"] = diagnosis.control
    figure, axes = style.panels(1, len(drawn), 4.6 * len(drawn), 4.6)
    for axis, (title, found) in zip(axes[0], drawn.items(), strict=True):
        ranks = [str(rank + 1) for rank in range(len(found.matrix))]
        percent = 100 * found.matrix
        title += f"\nsame top-2 set {100 * found.same_pair:.1f} % (chance {100 * found.chance_same_pair:.1f})"
        title += f"\nmean diagonal {100 * found.diagonal:.1f} % (chance {100 * found.chance_diagonal:.1f})"
        style.heatmap(axis, percent, ranks, ranks, 0, float(percent.max()), title, form="{:.0f}")
        axis.set(xlabel="new rank", ylabel="original rank (each row: % of tokens)")
    return figure


def demand_figure(diagnosis: Diagnosis) -> Figure:
    """(c) Pair-balanced CDF of functional demand at every tolerance, and mean demand against the shared ratio."""
    columns = len(diagnosis.demand)
    figure, axes = style.panels(2, columns, 3.7 * columns, 6.4)
    for above, below, found in zip(*axes, diagnosis.demand, strict=True):
        _cdf(above, found, diagnosis.num_experts)
        observed = found.tokens > 0
        _scatter(below, 100 * diagnosis.sets.ratio, found.mean_demand.where(observed, float("nan")))
        low, high = found.interval
        title = f"r = {found.correlation:.3f}, {100 * found.confidence:.0f} % CI [{low:.3f}, {high:.3f}]"
        style.label(below, RATIO, r"mean $k_\varepsilon$", title if isfinite(found.correlation) else NO_CORRELATION)
        below.set_ylim(0.8, diagnosis.num_experts + 1.2)
    axes[0][0].legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def demand_over_runs_figure(tolerances: Sequence[Any]) -> Figure:
    """(c) over runs: the CDF of functional demand of a layer in every run and their mean, one panel per tolerance
    (`DemandOverRuns`)."""
    figure, (axes,) = style.panels(1, len(tolerances), 3.7 * len(tolerances), 3.4)
    for axis, found in zip(axes, tolerances, strict=True):
        for name, colour in ((LOW, style.LOW_COLOUR), (HIGH, style.HIGH_COLOUR)):
            if (mean := found.group(name)) is None:
                continue
            cdf, error = mean
            prefixes = np.arange(1, len(cdf) + 1)
            for run in found.by_run.values():
                if name in run.groups:
                    axis.plot(prefixes, run.groups[name].cdf, color=colour, alpha=0.35, linewidth=0.8)
            axis.plot(prefixes, cdf, "o-", color=colour, markersize=4, label=f"{name}est shared ratio")
            axis.fill_between(prefixes, cdf - error, cdf + error, color=colour, alpha=0.2, linewidth=0)
            axis.set_xticks(prefixes)
        axis.set_ylim(-0.02, 1.02)
        style.label(axis, "residual experts $m$", r"$\Pr[k_\varepsilon \leq m]$", rf"$\varepsilon$ = {found.epsilon:g}")
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def _scatter(axis: Axes, ratio: Tensor, values: Tensor) -> None:
    axis.scatter(ratio, values, color=style.HIGH_COLOUR)
    if float(ratio.max() - ratio.min()) == 0:  # the whole range: an automatic one would show some below 0
        axis.set_xlim(-5, 105)


def _cdf(axis: Axes, found: DemandStatistics, num_experts: int) -> None:
    prefixes = np.arange(1, num_experts + 1)
    if not found.groups:
        axis.plot(prefixes, found.cdf[found.tokens > 0].mean(0), "o-", color="0.4", markersize=4, label="all pairs")
    for name, colour, marker in ((LOW, style.LOW_COLOUR, "s-"), (HIGH, style.HIGH_COLOUR, "o-")):
        if (group := found.groups.get(name)) is not None:
            text = f"{len(group.pairs)} pairs of {name}est shared ratio"
            axis.plot(prefixes, group.cdf, marker, color=colour, markersize=4, label=text)
            band = group.cdf - group.standard_error, group.cdf + group.standard_error
            axis.fill_between(prefixes, *band, color=colour, alpha=0.2, linewidth=0)
    axis.set_xticks(prefixes)
    axis.set_ylim(-0.02, 1.02)
    style.label(axis, "residual experts $m$", r"$\Pr[k_\varepsilon \leq m]$", rf"$\varepsilon$ = {found.epsilon:g}")
