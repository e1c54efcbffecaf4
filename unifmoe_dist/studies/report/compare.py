"""A table of finished runs side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.registry import method_of


def read_summary(folder: Path) -> dict[str, Any]:
    """summary.json of a finished run.

    Raises:
        UserError: the run has none.
    """
    path = folder / "summary.json"
    if not path.is_file():
        raise UserError(f"{folder} holds no summary.json; the run has not finished, or this is not a run.")
    return json.loads(path.read_text())


def comparison_table(folders: Sequence[Path]) -> str:
    """Markdown table of runs of one task, scored by its metric.

    A linear classifier's accuracy on the same split is added where a run reports it.
    """
    summaries = [read_summary(folder) for folder in folders]
    metric = summaries[0]["metric"].replace("_", " ")
    lines = [
        f"| model | test {metric} (%) | validation {metric} (%) | blocks per token C_B (dense: B) | residual experts k "
        "| seconds |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for s in summaries:
        method = method_of(s["moe"])
        name = method.title if method.layer else "dense twin"
        lines.append(
            f"| {name} | {100 * s['score']:.1f} | {100 * s['validation_score']:.1f} | "
            f"{s['mean_block_compute']:.2f} (B = {s['num_blocks']}) | {s['mean_expert_count']:.2f} | "
            f"{s['wall_seconds']:.0f} |"
        )
        if "linear_baseline_accuracy" in s:
            lines.append(f"| linear classifier | {100 * s['linear_baseline_accuracy']:.1f} | | | | |")
    return "\n".join(lines)
