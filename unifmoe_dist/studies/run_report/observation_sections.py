"""The paper's three observations on a run with a fixed number of experts per token, as blocks of a page."""

from __future__ import annotations

import math

from unifmoe_dist.studies.diagnostics.demand_statistics import HIGH, LOW
from unifmoe_dist.studies.figures import coactivation_figure, demand_figure, transition_figure
from unifmoe_dist.studies.html import Block, Cell, Number, Picture, Section, Table, Text
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
                Text(
                    "A hidden channel is shared by two experts if the cosine of their value rows is at least "
                    f"{delta:g}. The paper finds a correlation of 0.697 between a pair's shared ratio and how "
                    f"often tokens go to it. Here: {size}.{pair}"
                ),
                *_nothing_shared(found),
                _coactivation_table(found, prefix),
                *_pictures(found, prefix, "alignment"),
            ],
        ),
        Section(
            "Observation 2: does the residual ask for another routing?",
            [
                Text(
                    "Experts are frozen and the shared response of each token's two experts is set apart; a new "
                    f"top-2 router for what remains is trained on the task for {steps} steps. Its control is "
                    "trained from the same start on the complete responses. In the paper 5.7 % of tokens keep "
                    "their set and the mean diagonal is 26.9 %, without a control. Only a difference between "
                    "residual and control speaks for the residual: what both show comes from training a router "
                    "anew."
                ),
                _transition_table(found, prefix),
                *_pictures(found, prefix, "ranks"),
            ],
        ),
        Section(
            "Observation 3: how many residual experts does a token need?",
            [
                Text(
                    "The functional demand k_ε is the least number of residual experts, in the residual router's "
                    "order, that restore a token's output to a relative error of ε. If sharing leaves less to "
                    "route, pairs with a high shared ratio need fewer."
                ),
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
    first = next(iter(layers.values()))
    tenth = min(float(d.sets.alignment.flatten().quantile(0.9)) for d in layers.values())
    return [
        Text(
            f"In {' and '.join(layers)} no channel of any pair is shared at {first.settings.delta:g}. The residual is "
            "the complete response then: residual router and control of observation 2 are the same by construction, "
            "and observations 2 and 3 say nothing about sharing. --delta lowers the threshold; at "
            f"{math.floor(100 * tenth) / 100:g} a tenth of all channels or more is shared."
        )
    ]


def _coactivation_table(found: RunStudy, prefix: str) -> Table:
    rows: list[list[Cell]] = []
    for layer, d in found.diagnoses.items():
        ratio, frequency = d.sets.ratio, d.frequency
        rows.append(
            [
                layer,
                Number(d.coactivation.r, ".3f"),
                Number(d.coactivation.p_value, ".2g"),
                Number(float(d.sets.alignment.median()), ".3f"),
                Number(float(ratio.mean()), ".1%"),
                Number(float(ratio.min()), ".1%"),
                Number(float(ratio.max()), ".1%"),
                Number(float(frequency.min()), ".1%"),
                Number(float(frequency.max()), ".1%"),
            ]
        )
    return Table(
        f"{prefix}observation-1",
        "Pearson's r of shared ratio and co-activation over pairs, with its two-sided p-value; the median cosine "
        "of channels, over all pairs; shared ratios, and the fractions of tokens routed to a pair. Where all "
        "experts are still alike (ratios near 100 %) or no longer (near 0 %) there is nothing to correlate, and "
        "a dash stands for an r that does not exist.",
        ["layer", "r", "p", "median cosine", "mean ratio", "lowest", "highest", "tokens, lowest", "tokens, highest"],
        rows,
    )


def _transition_table(found: RunStudy, prefix: str) -> Table:
    rows: list[list[Cell]] = []
    for layer, d in found.diagnoses.items():
        for what, t in (("residual", d.transition), ("control", d.control)):
            if t is not None:
                rows.append(
                    [
                        f"{layer}, {what}",
                        Number(t.same_pair, ".1%"),
                        Number(t.chance_same_pair, ".1%"),
                        Number(t.diagonal, ".1%"),
                        Number(t.chance_diagonal, ".1%"),
                    ]
                )
    return Table(
        f"{prefix}observation-2",
        "Tokens whose set of two best experts stays the same, and the mean diagonal of the rank-transition "
        "matrix; beside each what two unrelated rankings would give.",
        ["layer and router", "same set", "by chance", "mean diagonal", "by chance (diagonal)"],
        rows,
    )


def _demand_table(found: RunStudy, prefix: str) -> Table:
    rows: list[list[Cell]] = []
    for layer, d in found.diagnoses.items():
        for s in d.demand:
            row = [f"{layer}, ε = {s.epsilon:g}"]
            seen = s.mean_demand[s.tokens > 0]
            cells = [Number(float(seen.mean()))]
            cells += [Number(group.mean_demand if group else None) for group in (s.groups.get(LOW), s.groups.get(HIGH))]
            cells += [
                Number(group.success(2) if group else None, ".1%") for group in (s.groups.get(LOW), s.groups.get(HIGH))
            ]
            cells += [Number(s.correlation, ".3f"), Number(s.interval[0], ".3f"), Number(s.interval[1], ".3f")]
            rows.append([*row, *cells])
    level = next(iter(found.diagnoses.values())).demand[0].confidence
    return Table(
        f"{prefix}observation-3",
        "The mean k_ε over all pairs, then over the pairs with the lowest and the highest shared ratio, every pair "
        "weighing the same; a dash where all ratios are equal. "
        "Success is the share of tokens for which two residual experts are enough. r correlates shared ratio and "
        f"mean demand over pairs; beside it its {100 * level:.0f} % bootstrap interval over pairs. An interval "
        "that contains 0 decides nothing.",
        ["layer and tolerance", "mean k_ε", "low", "high", "success at 2, low", "success, high", "r", "from", "to"],
        rows,
    )


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
