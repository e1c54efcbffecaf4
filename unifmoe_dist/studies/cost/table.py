"""The paper's cost table for one's own models: statistics as rows, methods as columns, the paper's number beside."""

from __future__ import annotations

from collections.abc import Mapping

from unifmoe_dist.studies.cost.count import FLOP_UNIT, PARAMETER_UNIT, Cost
from unifmoe_dist.studies.cost.measure import MEMORY_UNIT, MeasuredCost
from unifmoe_dist.studies.records import csv_text, markdown

STATISTICS = ("N", "N_A", "FLOPs", "T-TPS", "I-TPS", "T-RTM", "I-RTM")

Columns = Mapping[str, Mapping[str, float]]
"""Statistics by method."""


def statistics_of(cost: Cost, measured: MeasuredCost | None = None) -> dict[str, float]:
    """One column in the table's units: 2^20 parameters, 2^30 operations per item, seconds, GiB."""
    counted = [cost.parameters / PARAMETER_UNIT, cost.activated / PARAMETER_UNIT, cost.flops / FLOP_UNIT]
    if measured is not None:
        counted += [measured.train_seconds, measured.eval_seconds]
        counted += [measured.train_memory / MEMORY_UNIT, measured.eval_memory / MEMORY_UNIT]
    return dict(zip(STATISTICS, counted, strict=False))


def markdown_table(columns: Columns, published: Columns | None = None) -> str:
    """A Markdown table; the paper's numbers are in brackets behind ours where it has the method."""

    def cell(name: str, method: str) -> str:
        value, paper = columns[method].get(name), (published or {}).get(method, {}).get(name)
        # Two decimals as in the paper; small models need significant digits instead.
        own = "" if value is None else f"{value:.2f}" if value >= 1 else f"{value:.3g}"
        return own if paper is None else f"{own} ({paper:.2f})".strip()

    names = [name for name in STATISTICS if any(name in column for column in columns.values())]
    return (
        markdown([{"statistic": name, **{method: cell(name, method) for method in columns}} for name in names]) + "\n"
    )


def csv_table(columns: Columns, published: Columns | None = None) -> str:
    """CSV with one row per method and statistic: method, statistic, value, published."""
    rows = [
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
    return csv_text(rows)
