"""The paper's cost table for one's own models: statistics as rows, methods as columns, the paper's number beside."""

from __future__ import annotations

from collections.abc import Mapping

from unifmoe_dist.studies.cost.count import FLOP_UNIT, PARAMETER_UNIT, Cost
from unifmoe_dist.studies.cost.measure import MEMORY_UNIT, MeasuredCost
from unifmoe_dist.studies.records import csv_text

STATISTICS = ("N", "N_A", "FLOPs", "T-TPS", "I-TPS", "T-RTM", "I-RTM")


def statistics_of(cost: Cost, measured: MeasuredCost | None = None) -> dict[str, float]:
    """One column in the table's units: 2^20 parameters, 2^30 operations per item, seconds, GiB."""
    column = {
        "N": cost.parameters / PARAMETER_UNIT,
        "N_A": cost.activated / PARAMETER_UNIT,
        "FLOPs": cost.flops / FLOP_UNIT,
    }
    if measured is not None:
        column |= {
            "T-TPS": measured.train_seconds,
            "I-TPS": measured.eval_seconds,
            "T-RTM": measured.train_memory / MEMORY_UNIT,
            "I-RTM": measured.eval_memory / MEMORY_UNIT,
        }
    return column


def markdown_table(
    columns: Mapping[str, Mapping[str, float]], published: Mapping[str, Mapping[str, float]] | None = None
) -> str:
    """A Markdown table.

    Args:
        columns: Statistics by method.
        published: The paper's, in brackets behind ours where it has the method.
    """
    lines = ["| statistic | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    for name in STATISTICS:
        if any(name in column for column in columns.values()):
            cells = [_cell(name, column, (published or {}).get(method)) for method, column in columns.items()]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def csv_table(
    columns: Mapping[str, Mapping[str, float]], published: Mapping[str, Mapping[str, float]] | None = None
) -> str:
    """CSV with one row per method and statistic: method, statistic, value, published."""
    return csv_text(
        [
            {
                "method": method,
                "statistic": name,
                "value": column[name],
                "published": (published or {}).get(method, {}).get(name, ""),
            }
            for method, column in columns.items()
            for name in STATISTICS
            if name in column
        ]
    )


def _cell(name: str, column: Mapping[str, float], published: Mapping[str, float] | None) -> str:
    own = _number(column[name]) if name in column else ""
    return own if published is None or name not in published else f"{own} ({published[name]:.2f})".strip()


def _number(value: float) -> str:
    """Two decimals as in the paper; small models need significant digits instead."""
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"
