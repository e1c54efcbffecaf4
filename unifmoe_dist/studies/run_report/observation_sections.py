"""The paper's three observations on a run with a fixed number of experts per token, as blocks of a page."""

from __future__ import annotations

import math

from unifmoe_dist.studies.diagnostics.demand_statistics import HIGH, LOW
from unifmoe_dist.studies.figures.diagnostics import coactivation_figure, demand_figure, transition_figure
from unifmoe_dist.studies.page import Block, Cell, Number, Picture, Section, Table
from unifmoe_dist.studies.run_report.study import RunStudy


def observation_sections(found: RunStudy, prefix: str) -> list[Section]:
    """A section for each observation, all layers in it. Empty for a run without such layers."""
    if not found.diagnoses:
        return []
    first = next(iter(found.diagnoses.values()))
    delta, steps = first.settings.delta, first.settings.router.steps
    size = f"{first.tokens:,} tokens per layer from {len(found.sample.places):,} items of the test data"
    k = found.run.config.model.top_k
    pair = "" if k == 2 else f" This layer sends tokens to {k} experts; its observations are on the two best of each."
    return [
        Section(
            "Observation 1: do experts that work together write alike?",
            [
                "A hidden channel is shared by two experts if the cosine of their value rows is at least "
                f"{delta:g}. The paper finds a correlation of 0.697 between a pair's shared ratio and how "
                f"often tokens go to it. Here: {size}.{pair}",
                *_nothing_shared(found),
                _coactivation_table(found, prefix),
                *_pictures(found, prefix, "alignment"),
            ],
        ),
        Section(
            "Observation 2: does the residual ask for another routing?",
            [
                "Experts are frozen and the shared response of each token's two experts is set apart; a new "
                f"top-2 router for what remains is trained on the task for {steps} steps. Its control is "
                "trained from the same start on the complete responses. In the paper 5.7 % of tokens keep "
                "their set and the mean diagonal is 26.9 %, without a control. Only a difference between "
                "residual and control speaks for the residual: what both show comes from training a router "
                "anew.",
                _transition_table(found, prefix),
                *_pictures(found, prefix, "ranks"),
            ],
        ),
        Section(
            "Observation 3: how many residual experts does a token need?",
            [
                "The functional demand k_ε is the least number of residual experts, in the residual router's "
                "order, that restore a token's output to a relative error of ε. If sharing leaves less to "
                "route, pairs with a high shared ratio need fewer.",
                _demand_table(found, prefix),
                *_pictures(found, prefix, "demand"),
            ],
        ),
    ]


def _nothing_shared(found: RunStudy) -> list[Block]:
    """A warning for layers in which residual and complete responses are the same."""
    layers = {layer: d for layer, d in found.diagnoses.items() if not d.sets.shared.any()}
    if not layers:
        return []
    tenth = min(float(d.sets.alignment.flatten().quantile(0.9)) for d in layers.values())
    return [
        f"In {' and '.join(layers)} no channel of any pair is shared at {next(iter(layers.values())).sets.delta:g}. "
        "The residual is the complete response then: residual router and control of observation 2 are the same by "
        "construction, and observations 2 and 3 say nothing about sharing. --delta lowers the threshold; at "
        f"{math.floor(100 * tenth) / 100:g} a tenth of all channels or more is shared."
    ]


def _coactivation_table(found: RunStudy, prefix: str) -> Table:
    rows: list[dict[str, Cell]] = [
        {
            "layer": layer,
            "r": Number(d.coactivation.r, ".3f"),
            "p": Number(d.coactivation.p_value, ".2g"),
            "median cosine": Number(float(d.sets.alignment.median()), ".3f"),
            "mean ratio": Number(float(d.sets.ratio.mean()), ".1%"),
            "lowest": Number(float(d.sets.ratio.min()), ".1%"),
            "highest": Number(float(d.sets.ratio.max()), ".1%"),
            "tokens, lowest": Number(float(d.frequency.min()), ".1%"),
            "tokens, highest": Number(float(d.frequency.max()), ".1%"),
        }
        for layer, d in found.diagnoses.items()
    ]
    caption = (
        "Pearson's r of shared ratio and co-activation over pairs, with its two-sided p-value; the median cosine "
        "of channels, over all pairs; shared ratios, and the fractions of tokens routed to a pair. Where all "
        "experts are still alike (ratios near 100 %) or no longer (near 0 %) there is nothing to correlate, and "
        "a dash stands for an r that does not exist."
    )
    return Table(f"{prefix}observation-1", caption, rows)


def _transition_table(found: RunStudy, prefix: str) -> Table:
    rows: list[dict[str, Cell]] = [
        {
            "layer and router": f"{layer}, {what}",
            "same set": Number(t.same_pair, ".1%"),
            "by chance": Number(t.chance_same_pair, ".1%"),
            "mean diagonal": Number(t.diagonal, ".1%"),
            "by chance (diagonal)": Number(t.chance_diagonal, ".1%"),
        }
        for layer, d in found.diagnoses.items()
        for what, t in (("residual", d.transition), ("control", d.control))
        if t is not None
    ]
    caption = (
        "Tokens whose set of two best experts stays the same, and the mean diagonal of the rank-transition "
        "matrix; beside each what two unrelated rankings would give."
    )
    return Table(f"{prefix}observation-2", caption, rows)


def _demand_table(found: RunStudy, prefix: str) -> Table:
    rows: list[dict[str, Cell]] = []
    for layer, d in found.diagnoses.items():
        for s in d.demand:
            low, high = s.groups.get(LOW), s.groups.get(HIGH)
            rows.append(
                {
                    "layer and tolerance": f"{layer}, ε = {s.epsilon:g}",
                    "mean k_ε": Number(float(s.mean_demand.nanmean())),
                    "low": Number(low.mean_demand if low else None),
                    "high": Number(high.mean_demand if high else None),
                    "success at 2, low": Number(low.success(2) if low else None, ".1%"),
                    "success, high": Number(high.success(2) if high else None, ".1%"),
                    "r": Number(s.correlation, ".3f"),
                    "from": Number(s.interval[0], ".3f"),
                    "to": Number(s.interval[1], ".3f"),
                }
            )
    level = next(iter(found.diagnoses.values())).settings.confidence
    caption = (
        "The mean k_ε over all pairs, then over the pairs with the lowest and the highest shared ratio, every pair "
        "weighing the same; a dash where all ratios are equal. "
        "Success is the share of tokens for which two residual experts are enough. r correlates shared ratio and "
        f"mean demand over pairs; beside it its {100 * level:.0f} % bootstrap interval over pairs. An interval "
        "that contains 0 decides nothing."
    )
    return Table(f"{prefix}observation-3", caption, rows)


_DRAWN = {
    "alignment": (
        coactivation_figure,
        "Shared ratio and co-activation",
        "Left and middle: every pair of experts, as a matrix. Right: the same pairs as points. Observation 1 is "
        "a rising cloud.",
    ),
    "ranks": (
        transition_figure,
        "Rank transitions",
        "Row: rank of an expert under the original router; column: its rank under the new one; each row adds up "
        "to 100 %. A dark diagonal means that the ranking stays. Compare the two panels, not one with chance "
        "alone.",
    ),
    "demand": (
        demand_figure,
        "Functional demand",
        "Above: share of tokens whose output m residual experts restore; the band is one standard error over "
        "pairs. Observation 3 is a blue curve above the orange one. Below: every pair's mean demand against its "
        "shared ratio; observation 3 is a falling cloud. A demand of K + 1 means that even all experts were not "
        "enough.",
    ),
}


def _pictures(found: RunStudy, prefix: str, name: str) -> list[Block]:
    draw, title, caption = _DRAWN[name]
    return [
        Picture(f"{prefix}{name}-{number}", f"{title}, {layer}", caption, draw(diagnosis))
        for number, (layer, diagnosis) in enumerate(found.diagnoses.items(), start=1)
    ]
