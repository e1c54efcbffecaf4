"""How UniF-MoE layers use blocks and experts, as figures."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from unifmoe_dist.studies.diagnostics.pairs import expert_pairs
from unifmoe_dist.studies.figures.style import EXPERT_COLOUR, SHARED_COLOUR, bars, heatmap, label, panels, plain
from unifmoe_dist.studies.usage.study import Distribution, LayerUsage

QUANTITIES = (
    ("shared_demand", r"shared demand $\alpha$", SHARED_COLOUR),
    ("shared_block_count", "shared blocks $b$", SHARED_COLOUR),
    ("expert_count", "residual experts $k$", EXPERT_COLOUR),
    ("block_compute", "blocks executed $C_B$", "tab:green"),
)


def distribution_figure(layers: Mapping[str, LayerUsage]) -> Figure:
    """Histograms of alpha, b, k and C_B over tokens, one row per layer, with mean and quartiles."""
    figure, axes = panels(len(layers), len(QUANTITIES), 12.5, 2.7 * len(layers))
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
    label(axis, text, "", f"mean {values.mean:.2f}, quartiles {low:.3g} to {high:.3g}")
    axis.grid(visible=False, axis="x")
    filled, margin = np.flatnonzero(percent), 0.02 * np.ptp(edges)
    axis.set_xlim(edges[filled[0]] - margin, edges[filled[-1] + 1] + margin)


def load_figure(layers: Mapping[str, LayerUsage]) -> Figure:
    """Tokens that use each residual expert and share each block, one row per layer."""
    figure, axes = panels(len(layers), 2, 9, 2.6 * len(layers))
    for row, (name, layer) in zip(axes, layers.items(), strict=True):
        bars(row[0], layer.expert_load, "residual expert", f"{name} (dotted: mean)", EXPERT_COLOUR)
        bars(row[1], layer.block_load, "shared block", f"{name} (dotted: mean)", SHARED_COLOUR)
        for axis, load in zip(row, (layer.expert_load, layer.block_load), strict=True):
            axis.axhline(100 * float(np.mean(load)), color="black", linewidth=1, linestyle=":")
    return figure


def coactivation_graph(runs: Mapping[str, LayerUsage]) -> Figure:
    """One graph per run: experts on a circle, edges as wide and dark as pairs are co-activated, on one scale.

    Args:
        runs: For example the same layer without and with the Gram loss, by name.
    """
    figure, (axes,) = panels(1, len(runs), 4.0 * len(runs), 4.9)
    largest = max(float(layer.pair_coactivation.max()) for layer in runs.values())
    for axis, (name, layer) in zip(axes, runs.items(), strict=True):
        _graph(axis, layer, max(largest, 1e-9))
        mean = f"mean pair co-activation {100 * layer.mean_pair_coactivation:.1f} %"
        axis.set_title(f"{plain(name)}\n{mean}", fontsize=10)
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
    axis.scatter(x, y, s=250 + 1200 * np.asarray(layer.expert_load), color=EXPERT_COLOUR, edgecolor="white", zorder=2)
    for e in range(count):
        axis.text(x[e], y[e], str(e), ha="center", va="center", color="white", fontsize=9, zorder=3)
    axis.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal", xticks=[], yticks=[])
    axis.spines[:].set_visible(False)


def gram_figure(layers: Mapping[str, LayerUsage]) -> Figure:
    """Router Gram matrices with their distance to the identity; the shared embedding comes first."""
    figure, (axes,) = panels(1, len(layers), 4.6 * len(layers), 4.4)
    for axis, (name, layer) in zip(axes, layers.items(), strict=True):
        names = ["S", *(str(e) for e in range(len(layer.gram) - 1))]
        limit = max(1.0, float(layer.gram.abs().max()))
        heatmap(axis, layer.gram, names, names, -limit, limit, colours="RdBu_r", numbers=len(names) <= 9)
        axis.set_title(f"{name}: router Gram matrix,\ndistance to identity {layer.gram_distance:.2g}", fontsize=10)
    return figure
