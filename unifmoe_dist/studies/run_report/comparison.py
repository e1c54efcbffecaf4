"""Two runs side by side."""

from __future__ import annotations

from typing import Any

from unifmoe_dist.studies.figures.usage import coactivation_graph
from unifmoe_dist.studies.page import Block, Cell, Number, Picture, Section, Table
from unifmoe_dist.studies.run_report.run_sections import key_numbers
from unifmoe_dist.studies.run_report.study import RunStudy
from unifmoe_dist.studies.run_report.usage_sections import usage_table
from unifmoe_dist.studies.usage.study import coactivation_change


def by_gram_loss(first: RunStudy, second: RunStudy) -> tuple[RunStudy, RunStudy]:
    """The run with the smaller weight of the Gram loss, then the other; as given where the weights are equal."""
    weights = [found.run.config.optim.lambda_div for found in (first, second)]
    return (second, first) if weights[1] < weights[0] else (first, second)


def comparison_record(first: RunStudy, second: RunStudy) -> dict[str, Any]:
    """Change of the mean pair co-activation, by UniF-MoE layers that both runs have."""
    before, after = by_gram_loss(first, second)
    change = {
        layer: coactivation_change(before.usage[layer], after.usage[layer])
        for layer in first.usage
        if layer in second.usage
    }
    return {"from": before.run.name, "to": after.run.name, "coactivation_change": change}


def comparison_sections(first: RunStudy, second: RunStudy) -> list[Section]:
    """Key numbers of both, usage of both layer by layer, and what changed in co-activation."""
    numbers = {found.run.name: {n.label: n.value for n in key_numbers(found)} for found in (first, second)}
    labels = dict.fromkeys(label for column in numbers.values() for label in column)
    rows: list[dict[str, Cell]] = [
        {"number": label, **{run: column.get(label, "–") for run, column in numbers.items()}} for label in labels
    ]
    sections = [Section("Both runs", [Table("comparison", "Key numbers of both runs.", rows)])]
    if changes := comparison_record(first, second)["coactivation_change"]:
        sections.append(Section("Usage of both runs", _usage(*by_gram_loss(first, second), changes)))
    return sections


def _usage(before: RunStudy, after: RunStudy, changes: dict[str, float]) -> list[Block]:
    heads = [(found, f"{found.run.name} (λ = {found.run.config.optim.lambda_div:g})") for found in (before, after)]
    both = {f"{found.run.name}, {layer}": found.usage[layer] for layer in changes for found in (before, after)}
    rows: list[dict[str, Cell]] = [
        {"layer": layer}
        | {head: Number(found.usage[layer].mean_pair_coactivation, ".1%") for found, head in heads}
        | {"change": Number(change, "+.1%")}
        for layer, change in changes.items()
    ]
    caption = (
        "Mean, over pairs of residual experts, of the fraction of tokens that use both, and its relative change. "
        "The paper reports -62.9 % from training without to training with the Gram loss, on PACS."
    )
    blocks: list[Block] = [
        usage_table(both, "comparison-usage", before.run.config.model.num_blocks),
        Table("coactivation-change", caption, rows),
    ]
    if before.run.config.optim.lambda_div == after.run.config.optim.lambda_div:
        blocks.insert(0, "Both runs have the same weight of the Gram loss: it is not what makes them differ.")
    for number, layer in enumerate(changes, start=1):
        graph = coactivation_graph({found.run.name: found.usage[layer] for found in (before, after)})
        title = f"Co-activation in both runs, {layer}"
        told = "Edges are drawn on one scale: a paler graph means fewer tokens with both experts of a pair."
        blocks.append(Picture(f"comparison-coactivation-{number}", title, told, graph))
    return blocks
