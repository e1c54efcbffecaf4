"""What a finished run, or a scored one, says at its end: sentences for people. summary.json has every digit."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unifmoe_dist.algorithms.registry import REGISTRY as ALGORITHMS
from unifmoe_dist.methods.registry import method_of


def percent(score: float) -> str:
    """A score from 0 to 1 (a correlation: from -1 to 1) in per cent, as the tables of the documentation have it."""
    return f"{100 * score:.1f} %"


def result_sentence(summary: Mapping[str, Any], split: str = "test") -> str:
    """How a model did on a split, beside what it can be compared with, and what it executed.

    The summary is that of `summarise`, perhaps with the validation score and the baseline of a whole run.
    """
    method, algorithm = method_of(summary["moe"]), ALGORITHMS[summary["algorithm"]]
    name = method.title if algorithm.plain else algorithm.title
    where = f" ({summary['held_out']} held out)" if summary["held_out"] else ""
    metric = summary["metric"].replace("_", " ")
    words = f"{name} on {summary['task']}{where}: {split} {metric} {percent(summary['score'])}"
    beside = []
    if "validation_score" in summary:
        beside.append(f"validation {percent(summary['validation_score'])}")
    if "linear_baseline_accuracy" in summary:
        beside.append(f"a linear classifier has {percent(summary['linear_baseline_accuracy'])} on the same test data")
    words += f" ({'; '.join(beside)})" if beside else ""
    if not method.layer:
        return words + "."
    blocks, experts = summary["mean_block_compute"], summary["mean_expert_count"]
    return (
        f"{words}, with {blocks:.2f} blocks per token and layer (a dense FFN is {summary['num_blocks']}) and "
        f"{experts:.2f} {'residual ' if method.shared else ''}experts."
    )


def closing_words(summary: Mapping[str, Any], folder: Path) -> str:
    """The end of a run: its result, how long it took, where everything is and how to look into it."""
    ranks = "1 rank" if summary["world_size"] == 1 else f"{summary['world_size']} ranks"
    steps = f"step {summary['best_step']} of {summary['steps']} was best"
    lines = [
        result_sentence(summary),
        f"Training took {summary['wall_seconds']:.0f} s on {ranks}; {steps} on the validation data and was tested.",
        f"Numbers: {folder / 'summary.json'}; plots: {folder / 'plots'}",
        f"A report of what its layers do: python launch/analyze.py {shlex.quote(str(folder))}",
    ]
    return "\n".join(lines)
