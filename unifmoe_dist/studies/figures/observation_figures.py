"""The three observations as figures, after the paper's figure 2."""

from __future__ import annotations

from math import isfinite

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from unifmoe_dist.studies.diagnostics.demand_statistics import HIGH, LOW, DemandStatistics
from unifmoe_dist.studies.diagnostics.diagnosis import Diagnosis
from unifmoe_dist.studies.diagnostics.rankings import as_matrix
from unifmoe_dist.studies.figures.style import HIGH_COLOUR, LOW_COLOUR, heatmap, label, panels

RATIO = r"shared ratio $\rho_{ij}$ (%)"
NO_CORRELATION = "no correlation: one of the two is constant"


def coactivation_figure(diagnosis: Diagnosis) -> Figure:
    """(a) Shared ratio and co-activation of every pair, as matrices and against each other."""
    figure, ((*matrices, points),) = panels(1, 3, 11.5, 3.8)
    names = [str(e) for e in range(diagnosis.num_experts)]
    ratio, frequency = 100 * diagnosis.sets.ratio, 100 * diagnosis.frequency
    aligned = rf"aligned value positions $\rho_{{ij}}$ (%), $\delta$={diagnosis.sets.delta:g}"
    drawn = {aligned: ratio, "tokens routed to the pair (%)": frequency}
    for axis, (title, values) in zip(matrices, drawn.items(), strict=True):
        top = max(float(values.max()), 1e-9)
        heatmap(axis, as_matrix(values, diagnosis.num_experts), names, names, 0, top, title, form="{:.1f}")
        axis.set(xlabel="expert $j$", ylabel="expert $i$")
    _scatter(points, ratio, frequency)
    for (i, j), *at in zip(diagnosis.pairs, ratio.tolist(), frequency.tolist(), strict=True):
        points.annotate(f"{i},{j}", at, xytext=(4, 3), textcoords="offset points", fontsize=7, color="0.4")
    r = diagnosis.coactivation
    title = f"Pearson r = {r.r:.3f} (p = {r.p_value:.2g}, {len(diagnosis.pairs)} pairs)"
    label(points, RATIO, "co-activation (% of tokens)", title if isfinite(r.r) else NO_CORRELATION)
    points.margins(x=0.12)
    points.set_ylim(bottom=0)
    return figure


def transition_figure(diagnosis: Diagnosis) -> Figure:
    """(b) Rank transitions, beside those of the control where there is one."""
    drawn = {"router retrained on residual positions": diagnosis.transition}
    if diagnosis.control is not None:
        drawn["control: retrained on complete responses"] = diagnosis.control
    figure, axes = panels(1, len(drawn), 4.6 * len(drawn), 4.6)
    for axis, (title, found) in zip(axes[0], drawn.items(), strict=True):
        ranks = [str(rank + 1) for rank in range(len(found.matrix))]
        percent = 100 * found.matrix
        title += f"\nsame top-2 set {100 * found.same_pair:.1f} % (chance {100 * found.chance_same_pair:.1f})"
        title += f"\nmean diagonal {100 * found.diagonal:.1f} % (chance {100 * found.chance_diagonal:.1f})"
        heatmap(axis, percent, ranks, ranks, 0, float(percent.max()), title, form="{:.0f}")
        axis.set(xlabel="new rank", ylabel="original rank (each row: % of tokens)")
    return figure


def demand_figure(diagnosis: Diagnosis) -> Figure:
    """(c) Pair-balanced CDF of functional demand at every tolerance, and mean demand against the shared ratio."""
    columns = len(diagnosis.demand)
    figure, axes = panels(2, columns, 3.7 * columns, 6.4)
    for above, below, found in zip(*axes, diagnosis.demand, strict=True):
        _cdf(above, found, diagnosis.num_experts)
        observed = found.tokens > 0
        _scatter(below, 100 * diagnosis.sets.ratio, found.mean_demand.where(observed, float("nan")))
        low, high = found.interval
        title = f"r = {found.correlation:.3f}, {100 * found.confidence:.0f} % CI [{low:.3f}, {high:.3f}]"
        label(below, RATIO, r"mean $k_\varepsilon$", title if isfinite(found.correlation) else NO_CORRELATION)
        below.set_ylim(0.8, diagnosis.num_experts + 1.2)
    axes[0][0].legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def _scatter(axis: Axes, ratio: Tensor, values: Tensor) -> None:
    axis.scatter(ratio, values, color=HIGH_COLOUR)
    if float(ratio.max() - ratio.min()) == 0:  # the whole range: an automatic one would show some below 0
        axis.set_xlim(-5, 105)


def _cdf(axis: Axes, found: DemandStatistics, num_experts: int) -> None:
    prefixes = np.arange(1, num_experts + 1)
    if not found.groups:
        axis.plot(prefixes, found.cdf[found.tokens > 0].mean(0), "o-", color="0.4", markersize=4, label="all pairs")
    for name, colour, marker in ((LOW, LOW_COLOUR, "s-"), (HIGH, HIGH_COLOUR, "o-")):
        if (group := found.groups.get(name)) is not None:
            text = f"{len(group.pairs)} pairs of {name}est shared ratio"
            axis.plot(prefixes, group.cdf, marker, color=colour, markersize=4, label=text)
            band = group.cdf - group.standard_error, group.cdf + group.standard_error
            axis.fill_between(prefixes, *band, color=colour, alpha=0.2, linewidth=0)
    axis.set_xticks(prefixes)
    axis.set_ylim(-0.02, 1.02)
    label(axis, "residual experts $m$", r"$\Pr[k_\varepsilon \leq m]$", rf"$\varepsilon$ = {found.epsilon:g}")
