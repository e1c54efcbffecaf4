"""A table of finished runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.registry import method_of
from unifmoe_dist.studies.records import read_summary


def comparison_table(folders: Sequence[Path]) -> str:
    """Markdown table of runs of one task, scored by its metric.

    A linear classifier's accuracy on the same split is added where a run reports it.

    Raises:
        UserError: a run has no summary.json.
    """
    lines = []
    for folder in folders:
        if (s := read_summary(folder)) is None:
            raise UserError(f"{folder} holds no summary.json; the run has not finished, or this is not a run.")
        metric = s["metric"].replace("_", " ")
        method = method_of(s["moe"])
        name = method.title if method.layer else "dense twin"
        lines.append(
            f"| {name} | {100 * s['score']:.1f} | {100 * s['validation_score']:.1f} | "
            f"{s['mean_block_compute']:.2f} (B = {s['num_blocks']}) | {s['mean_expert_count']:.2f} | "
            f"{s['wall_seconds']:.0f} |"
        )
        if "linear_baseline_accuracy" in s:
            lines.append(f"| linear classifier | {100 * s['linear_baseline_accuracy']:.1f} | | | | |")
    head = (
        f"| model | test {metric} (%) | validation {metric} (%) | blocks per token C_B (dense: B) | residual experts k "
        "| seconds |\n| --- | --- | --- | --- | --- | --- |"
    )
    return "\n".join([head, *lines])
