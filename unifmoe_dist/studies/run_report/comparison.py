"""Two runs side by side."""

from __future__ import annotations

from typing import Any

from unifmoe_dist.studies.figures import coactivation_graph
from unifmoe_dist.studies.html import Block, Cell, Number, Picture, Section, Table, Text
from unifmoe_dist.studies.run_report.run_sections import key_numbers
from unifmoe_dist.studies.run_report.study import RunStudy
from unifmoe_dist.studies.run_report.usage_sections import usage_table
from unifmoe_dist.studies.usage.study import coactivation_change


def by_gram_loss(first: RunStudy, second: RunStudy) -> tuple[RunStudy, RunStudy]:
    """The run with the smaller weight of the Gram loss, then the other; as given where the weights are equal."""
    weights = [found.run.config.optim.lambda_div for found in (first, second)]
    return (second, first) if weights[1] < weights[0] else (first, second)


def common_layers(first: RunStudy, second: RunStudy) -> list[str]:
    """UniF-MoE layers that both runs have."""
    return [layer for layer in first.usage if layer in second.usage]


def comparison_record(first: RunStudy, second: RunStudy) -> dict[str, Any]:
    """Change of the mean pair co-activation, by layer."""
    before, after = by_gram_loss(first, second)
    change = {
        layer: coactivation_change(before.usage[layer], after.usage[layer]) for layer in common_layers(first, second)
    }
    return {"from": before.run.name, "to": after.run.name, "coactivation_change": change}


def comparison_sections(first: RunStudy, second: RunStudy) -> list[Section]:
    """Key numbers of both, usage of both layer by layer, and what changed in co-activation."""
    both = (first, second)
    numbers = [{number.label: number.value for number in key_numbers(found)} for found in both]
    labels = list(dict.fromkeys(label for column in numbers for label in column))
    rows: list[list[Cell]] = [[label, *(column.get(label, "–") for column in numbers)] for label in labels]
    names = [found.run.name for found in both]
    sections = [Section("Both runs", [Table("comparison", "Key numbers of both runs.", ["number", *names], rows)])]
    if layers := common_layers(first, second):
        sections.append(Section("Usage of both runs", _usage(first, second, layers)))
    return sections


def _usage(first: RunStudy, second: RunStudy, layers: list[str]) -> list[Block]:
    before, after = by_gram_loss(first, second)
    weights = [found.run.config.optim.lambda_div for found in (before, after)]
    changes = comparison_record(first, second)["coactivation_change"]
    both = {f"{found.run.name}, {layer}": found.usage[layer] for layer in layers for found in (before, after)}
    rows: list[list[Cell]] = [
        [
            layer,
            Number(before.usage[layer].mean_pair_coactivation, ".1%"),
            Number(after.usage[layer].mean_pair_coactivation, ".1%"),
            Number(changes[layer], "+.1%"),
        ]
        for layer in layers
    ]
    caption = (
        "Mean, over pairs of residual experts, of the fraction of tokens that use both, and its relative change. "
        "The paper reports -62.9 % from training without to training with the Gram loss, on PACS."
    )
    columns = ["layer", f"{before.run.name} (λ = {weights[0]:g})", f"{after.run.name} (λ = {weights[1]:g})", "change"]
    blocks: list[Block] = [
        usage_table(both, "comparison-usage", first.run.config.model.num_blocks),
        Table("coactivation-change", caption, columns, rows),
    ]
    if weights[0] == weights[1]:
        blocks.insert(0, Text("Both runs have the same weight of the Gram loss: it is not what makes them differ."))
    for number, layer in enumerate(layers, start=1):
        graph = coactivation_graph({found.run.name: found.usage[layer] for found in (before, after)})
        blocks.append(
            Picture(
                f"comparison-coactivation-{number}",
                f"Co-activation in both runs, {layer}",
                "Edges are drawn on one scale: a paler graph means fewer tokens with both experts of a pair.",
                graph,
            )
        )
    return blocks
