"""The three observations as figures, after the paper's figure 2."""

from __future__ import annotations

from math import isfinite

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from unifmoe_dist.studies.diagnostics.demand_statistics import HIGH, LOW, DemandStatistics
from unifmoe_dist.studies.diagnostics.pairs import as_matrix
from unifmoe_dist.studies.diagnostics.study import Diagnosis
from unifmoe_dist.studies.diagnostics.transitions import RankTransition
from unifmoe_dist.studies.figures.style import HIGH_COLOUR, LOW_COLOUR, heatmap, label, new_figure


def coactivation_figure(diagnosis: Diagnosis) -> Figure:
    """(a) Shared ratio and co-activation of every pair, as matrices and against each other."""
    figure = new_figure(11.5, 3.8)
    ratio, frequency, scatter = figure.subplots(1, 3)
    names = [str(e) for e in range(diagnosis.num_experts)]
    aligned = rf"aligned value positions $\rho_{{ij}}$ (%), $\delta$={diagnosis.sets.delta:g}"
    panels = (
        (ratio, 100 * diagnosis.sets.ratio, aligned),
        (frequency, 100 * diagnosis.frequency, "tokens routed to the pair (%)"),
    )
    for axis, values, title in panels:
        top = max(float(values.max()), 1e-9)
        heatmap(axis, as_matrix(values, diagnosis.num_experts), names, names, 0, top, form="{:.1f}")
        axis.set(xlabel="expert $j$", ylabel="expert $i$")
        axis.set_title(title, fontsize=10)
    scatter.scatter(100 * diagnosis.sets.ratio, 100 * diagnosis.frequency, color=HIGH_COLOUR)
    for p, (i, j) in enumerate(diagnosis.pairs):
        at = (100 * float(diagnosis.sets.ratio[p]), 100 * float(diagnosis.frequency[p]))
        scatter.annotate(f"{i},{j}", at, xytext=(4, 3), textcoords="offset points", fontsize=7, color="0.4")
    r = diagnosis.coactivation
    label(
        scatter,
        r"shared ratio $\rho_{ij}$ (%)",
        "co-activation (% of tokens)",
        f"Pearson r = {r.r:.3f} (p = {r.p_value:.2g}, {len(diagnosis.pairs)} pairs)"
        if isfinite(r.r)
        else "no correlation: one of the two is constant",
    )
    scatter.margins(x=0.12)
    scatter.set_ylim(bottom=0)
    _ratio_axis(scatter, diagnosis)
    return figure


def transition_figure(diagnosis: Diagnosis) -> Figure:
    """(b) Rank transitions, beside those of the control where there is one."""
    panels = [("router retrained on residual positions", diagnosis.transition)]
    if diagnosis.control is not None:
        panels.append(("control: retrained on complete responses", diagnosis.control))
    figure = new_figure(4.6 * len(panels), 4.6)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, transition) in zip(axes, panels, strict=True):
        _transition(axis, title, transition)
    return figure


def _transition(axis: Axes, title: str, transition: RankTransition) -> None:
    ranks = [str(rank + 1) for rank in range(len(transition.matrix))]
    percent = 100 * transition.matrix
    heatmap(axis, percent, ranks, ranks, 0, float(percent.max()), form="{:.0f}")
    axis.set(xlabel="new rank", ylabel="original rank (each row: % of tokens)")
    axis.set_title(
        f"{title}\nsame top-2 set {100 * transition.same_pair:.1f} % "
        f"(chance {100 * transition.chance_same_pair:.1f})\n"
        f"mean diagonal {100 * transition.diagonal:.1f} % (chance {100 * transition.chance_diagonal:.1f})",
        fontsize=9,
    )


def demand_figure(diagnosis: Diagnosis) -> Figure:
    """(c) Pair-balanced CDF of functional demand at every tolerance, and mean demand against the shared ratio."""
    columns = len(diagnosis.demand)
    figure = new_figure(3.7 * columns, 6.4)
    axes = figure.subplots(2, columns, squeeze=False)
    for above, below, statistics in zip(axes[0], axes[1], diagnosis.demand, strict=True):
        _cdf(above, statistics, diagnosis.num_experts)
        observed = statistics.tokens > 0
        below.scatter(100 * diagnosis.sets.ratio[observed], statistics.mean_demand[observed], color=HIGH_COLOUR)
        low, high = statistics.interval
        level = 100 * statistics.confidence
        title = f"r = {statistics.correlation:.3f}, {level:.0f} % CI [{low:.3f}, {high:.3f}]"
        if not isfinite(statistics.correlation):
            title = "no correlation: one of the two is constant"
        label(below, r"shared ratio $\rho_{ij}$ (%)", r"mean $k_\varepsilon$", title)
        below.set_ylim(0.8, diagnosis.num_experts + 1.2)
        _ratio_axis(below, diagnosis)
    axes[0][0].legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def _ratio_axis(axis: Axes, diagnosis: Diagnosis) -> None:
    """Where all ratios are equal, the whole range of ratios: an automatic one would show some below 0."""
    if float(diagnosis.sets.ratio.max() - diagnosis.sets.ratio.min()) == 0:
        axis.set_xlim(-5, 105)


def _cdf(axis: Axes, statistics: DemandStatistics, num_experts: int) -> None:
    prefixes = range(1, num_experts + 1)
    if not statistics.groups:
        observed = statistics.cdf[statistics.tokens > 0]
        axis.plot(prefixes, observed.mean(0), color="0.4", marker="o", markersize=4, label="all pairs")
    for name, colour, marker in ((LOW, LOW_COLOUR, "s"), (HIGH, HIGH_COLOUR, "o")):
        if name in statistics.groups:
            group = statistics.groups[name]
            text = f"{len(group.pairs)} pairs of {name}est shared ratio"
            axis.plot(prefixes, group.cdf, color=colour, marker=marker, markersize=4, label=text)
            axis.fill_between(
                prefixes,
                group.cdf - group.standard_error,
                group.cdf + group.standard_error,
                color=colour,
                alpha=0.2,
                linewidth=0,
            )
    axis.set_xticks(list(prefixes))
    axis.set_ylim(-0.02, 1.02)
    label(axis, "residual experts $m$", r"$\Pr[k_\varepsilon \leq m]$", rf"$\varepsilon$ = {statistics.epsilon:g}")
