"""A diagnosis as JSON and CSV files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unifmoe_dist.studies.diagnostics.demand_statistics import DemandStatistics
from unifmoe_dist.studies.diagnostics.study import Diagnosis
from unifmoe_dist.studies.diagnostics.transitions import RankTransition
from unifmoe_dist.studies.records import csv_text, plain
from unifmoe_dist.train.checkpoint import write_text


def as_record(diagnosis: Diagnosis) -> dict[str, Any]:
    """Everything but the per-channel alignments, which have a file of their own."""
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
    return plain(record)


def write_diagnosis(diagnosis: Diagnosis, folder: Path) -> list[Path]:
    """Write diagnosis.json and, as CSV, alignment, pairs, rank_transition and demand_cdf; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "diagnosis.json": json.dumps(as_record(diagnosis), indent=1),
        "alignment.csv": csv_text(alignment_rows(diagnosis)),
        "pairs.csv": csv_text(pair_rows(diagnosis)),
        "rank_transition.csv": csv_text(transition_rows(diagnosis)),
        "demand_cdf.csv": csv_text(cdf_rows(diagnosis)),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def alignment_rows(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """One row per channel: the alignment c_ijh of every pair. A last channel beyond H - 1 is the down bias."""
    names = [f"c_{i}_{j}" for i, j in diagnosis.pairs]
    columns = diagnosis.sets.alignment.T.tolist()
    return [{"channel": h} | dict(zip(names, row, strict=True)) for h, row in enumerate(columns)]


def pair_rows(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """One row per pair: shared ratio, co-activation, and mean demand at every tolerance."""
    rows = []
    for p, (i, j) in enumerate(diagnosis.pairs):
        row: dict[str, Any] = {
            "expert_i": i,
            "expert_j": j,
            "shared_ratio": float(diagnosis.sets.ratio[p]),
            "coactivation_frequency": float(diagnosis.frequency[p]),
            "tokens": int(diagnosis.demand[0].tokens[p]),
        }
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
                            "averaging": averaging,
                            "epsilon": statistics.epsilon,
                            "group": name,
                            "prefix": m,
                            "cdf": float(value),
                            "standard_error": float(error),
                        }
                    )
    return rows


def _transition(transition: RankTransition) -> dict[str, Any]:
    return {
        "matrix": transition.matrix,
        "same_pair": transition.same_pair,
        "diagonal": transition.diagonal,
        "chance_same_pair": transition.chance_same_pair,
        "chance_diagonal": transition.chance_diagonal,
    }


def _demand(statistics: DemandStatistics) -> dict[str, Any]:
    groups = {name: asdict(group) | {"success_at_2": group.success(2)} for name, group in statistics.groups.items()}
    return asdict(statistics) | {"groups": groups}
