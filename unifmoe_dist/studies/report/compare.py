"""A table of finished runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unifmoe_dist.data.metrics import ACCURACY, metric_named
from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.registry import method_of
from unifmoe_dist.studies.records import markdown, read_summary


def comparison_table(folders: Sequence[Path]) -> str:
    """Markdown table of runs of one task, scored by its metric.

    A linear classifier's accuracy on the same split is added where a run reports it.

    Raises:
        UserError: a run has no summary.json.
    """
    lines: list[list[str]] = []
    for folder in folders:
        if (s := read_summary(folder)) is None:
            raise UserError(f"{folder} holds no summary.json; the run has not finished, or this is not a run.")
        metric, method = metric_named(s["metric"]), method_of(s["moe"])
        scores = [metric.number(s["score"]), metric.number(s["validation_score"])]
        costs = [f"{s['mean_block_compute']:.2f} (B = {s['num_blocks']})", f"{s['mean_expert_count']:.2f}"]
        lines.append([method.title if method.layer else "dense twin", *scores, *costs, f"{s['wall_seconds']:.0f}"])
        if "linear_baseline_accuracy" in s:
            lines.append(["linear classifier", ACCURACY.number(s["linear_baseline_accuracy"]), "", "", "", ""])
    unit = f" ({metric.unit})" if metric.unit else ""
    scored = [f"test {metric.title}{unit}", f"validation {metric.title}{unit}"]
    head = ["model", *scored, "blocks per token C_B (dense: B)", "residual experts k", "seconds"]
    return markdown([dict(zip(head, line, strict=True)) for line in lines], left=head)
