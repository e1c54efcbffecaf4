"""A diagnosis as JSON and CSV files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from unifmoe_dist.files import write_text
from unifmoe_dist.studies.diagnostics.demand_statistics import DemandStatistics
from unifmoe_dist.studies.diagnostics.study import Diagnosis
from unifmoe_dist.studies.records import csv_text, plain


def as_record(diagnosis: Diagnosis) -> dict[str, Any]:
    """Everything but the per-channel alignments, which have a file of their own."""

    def demand(found: DemandStatistics) -> dict[str, Any]:
        groups = {name: asdict(group) | {"success_at_2": group.success(2)} for name, group in found.groups.items()}
        return asdict(found) | {"groups": groups}

    d = diagnosis
    return plain(
        {
            "settings": asdict(d.settings),
            "num_experts": d.num_experts,
            "tokens": d.tokens,
            "pairs": d.pairs,
            "shared_ratio": d.sets.ratio,
            "coactivation_frequency": d.frequency,
            "correlation_ratio_coactivation": asdict(d.coactivation),
            "rank_transition": asdict(d.transition),
            "rank_transition_control": d.control and asdict(d.control),
            "residual_router_error": d.router_error,
            "demand": list(map(demand, d.demand)),
            "demand_uniform_averaging": list(map(demand, d.demand_uniform)),
        }
    )


def write_diagnosis(diagnosis: Diagnosis, folder: Path) -> list[Path]:
    """Write diagnosis.json and, as CSV, alignment, pairs, rank_transition and demand_cdf; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"diagnosis.json": json.dumps(as_record(diagnosis), indent=1)}
    texts |= {f"{name}.csv": csv_text(frame) for name, frame in frames(diagnosis).items()}
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def frames(diagnosis: Diagnosis) -> dict[str, pd.DataFrame]:
    """The tables by name.

    alignment: c_ijh of every pair, one row per channel; a last channel beyond H - 1 is the down bias. pairs: shared
    ratio, co-activation, and mean demand at every tolerance. rank_transition: one row per original rank. demand_cdf:
    one row per averaging, tolerance, group and prefix.
    """
    d = diagnosis
    alignment = pd.DataFrame(d.sets.alignment.T.tolist(), columns=[f"c_{i}_{j}" for i, j in d.pairs])
    pairs = pd.DataFrame(d.pairs, columns=["expert_i", "expert_j"]).assign(
        shared_ratio=d.sets.ratio.tolist(),
        coactivation_frequency=d.frequency.tolist(),
        tokens=d.demand[0].tokens.tolist(),
        **{f"mean_demand_eps_{s.epsilon:g}": s.mean_demand.tolist() for s in d.demand},
        **{f"mean_demand_uniform_eps_{s.epsilon:g}": s.mean_demand.tolist() for s in d.demand_uniform},
    )
    matrix = d.transition.matrix.tolist()
    transition = pd.DataFrame(matrix, columns=[f"residual_rank_{b + 1}" for b in range(len(matrix))])
    transition.insert(0, "original_rank", range(1, len(matrix) + 1))
    cdf = [
        (averaging, found.epsilon, name, m, value, error)
        for averaging, several in (("gates", d.demand), ("uniform", d.demand_uniform))
        for found in several
        for name, group in found.groups.items()
        for m, (value, error) in enumerate(zip(group.cdf.tolist(), group.standard_error.tolist(), strict=True), start=1)
    ]
    columns = ["averaging", "epsilon", "group", "prefix", "cdf", "standard_error"]
    return {
        "alignment": alignment.rename_axis("channel").reset_index(),
        "pairs": pairs,
        "rank_transition": transition,
        "demand_cdf": pd.DataFrame(cdf, columns=columns),
    }
