"""Scores by domain before and after training, from what runs record."""

from __future__ import annotations

import json

from unifmoe_dist.studies.domain_scores import domain_figure, domain_scores, domain_table
from unifmoe_dist.studies.figures.style import save


def write_run(folder, moe: str, at_start: bool = True):
    folder.mkdir()
    lines = [("validation", 0, 40.0, {"news": 30.0, "lore": 50.0}), ("test", 0, 60.0, {"learned": 60.0})]
    lines = [*lines[: 2 * at_start], ("validation", 5, 25.0, {"news": 20.0, "lore": 31.5})]
    records = [
        {"kind": kind, "step": step, "metric": "perplexity", "perplexity": score, "per_domain": domains}
        for kind, step, score, domains in lines
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    summary = {"moe": moe, "metric": "perplexity", "score": 45.5, "per_domain": {"learned": 45.5}, "best_step": 5}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_table_and_figure(tmp_path):
    runs = [domain_scores(write_run(tmp_path / moe, moe)) for moe in ("unif", "none")]
    assert runs[0].domains == {"news": (30.0, 20.0, False), "lore": (50.0, 31.5, False), "learned": (60.0, 45.5, True)}
    table = domain_table(runs)
    assert "| UniF-MoE | 5 | 40.00 | 25.00 | 60.00 | 45.50 |" in table and "dense twin" in table
    assert "perplexity, held out, before" in table
    figure = domain_figure(runs)
    (axis,) = figure.axes
    assert [tick.get_text() for tick in axis.get_yticklabels()] == ["lore", "news", "learned (held out)"]
    assert axis.get_xlabel() == "perplexity (lower is better)"
    assert save(figure, tmp_path / "domains.png").stat().st_size > 1000


def test_runs_without_such_scores_have_none(tmp_path):
    assert domain_scores(write_run(tmp_path / "late", "unif", at_start=False)) is None
    (tmp_path / "late/summary.json").write_text('{"metric": "accuracy", "score": 0.5, "best_step": 5}')
    assert domain_scores(tmp_path / "late") is None
