"""A diagnosis as JSON and CSV files."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from unifmoe_dist.analysis.diagnostics.demand_statistics import DemandStatistics
from unifmoe_dist.analysis.diagnostics.study import Diagnosis
from unifmoe_dist.analysis.diagnostics.transitions import RankTransition
from unifmoe_dist.engine.checkpoint import write_text


def as_record(diagnosis: Diagnosis) -> dict[str, Any]:
    """Everything but the per-channel alignments, with None for numbers that do not exist (JSON has no NaN)."""
    d = diagnosis
    record = {
        "settings": asdict(d.settings),
        "num_experts": d.num_experts,
        "tokens": d.tokens,
        "pairs": [list(pair) for pair in d.pairs],
        "shared_ratio": d.sets.ratio,
        "coactivation_frequency": d.frequency,
        "correlation_ratio_coactivation": asdict(d.coactivation),
        "rank_transition": _transition(d.transition),
        "rank_transition_control": None if d.control is None else _transition(d.control),
        "residual_router_error": d.router_error,
        "demand": [_demand(statistics) for statistics in d.demand],
        "demand_uniform_averaging": [_demand(statistics) for statistics in d.demand_uniform],
    }
    return _plain(record)


def write_diagnosis(diagnosis: Diagnosis, folder: Path) -> list[Path]:
    """Write diagnosis.json, pairs.csv, rank_transition.csv and demand_cdf.csv; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "diagnosis.json": json.dumps(as_record(diagnosis), indent=1),
        "pairs.csv": _csv(pair_rows(diagnosis)),
        "rank_transition.csv": _csv(transition_rows(diagnosis)),
        "demand_cdf.csv": _csv(cdf_rows(diagnosis)),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def pair_rows(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """One row per pair: shared ratio, co-activation, and mean demand at every tolerance."""
    rows = []
    for p, (i, j) in enumerate(diagnosis.pairs):
        row: dict[str, Any] = {
            "expert_i": i, "expert_j": j, "shared_ratio": float(diagnosis.sets.ratio[p]),
            "coactivation_frequency": float(diagnosis.frequency[p]), "tokens": int(diagnosis.demand[0].tokens[p]),
        }  # fmt: skip
        for statistics in diagnosis.demand:
            row[f"mean_demand_eps_{statistics.epsilon:g}"] = float(statistics.mean_demand[p])
        for statistics in diagnosis.demand_uniform:
            row[f"mean_demand_uniform_eps_{statistics.epsilon:g}"] = float(statistics.mean_demand[p])
        rows.append(row)
    return rows


def transition_rows(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """One row per original rank."""
    return [
        {"original_rank": a + 1} | {f"residual_rank_{b + 1}": float(mass) for b, mass in enumerate(row)}
        for a, row in enumerate(diagnosis.transition.matrix)
    ]


def cdf_rows(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """One row per averaging, tolerance, group and prefix."""
    rows = []
    for averaging, column in (("gates", diagnosis.demand), ("uniform", diagnosis.demand_uniform)):
        for statistics in column:
            for name, group in statistics.groups.items():
                for m, (value, error) in enumerate(zip(group.cdf, group.standard_error, strict=True), start=1):
                    rows.append(
                        {
                            "averaging": averaging, "epsilon": statistics.epsilon, "group": name, "prefix": m,
                            "cdf": float(value), "standard_error": float(error),
                        }
                    )  # fmt: skip
    return rows


def _transition(transition: RankTransition) -> dict[str, Any]:
    return {
        "matrix": transition.matrix, "same_pair": transition.same_pair, "diagonal": transition.diagonal,
        "chance_same_pair": transition.chance_same_pair, "chance_diagonal": transition.chance_diagonal,
    }  # fmt: skip


def _demand(statistics: DemandStatistics) -> dict[str, Any]:
    groups = {
        name: asdict(group) | {"success_at_2": group.success(2)} for name, group in statistics.groups.items()
    }
    return asdict(statistics) | {"groups": groups}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _csv(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
