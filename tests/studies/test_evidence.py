"""The evidence table: paired statistics by hand, learning rates chosen on other seeds, and the report."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from unifmoe_dist.data.registry import find_task
from unifmoe_dist.errors import UserError
from unifmoe_dist.studies import paired
from unifmoe_dist.studies.report.entries import Result, best_rates
from unifmoe_dist.studies.report.evidence import comparisons, write_evidence

OPTIONS = {"model.num_blocks": 8, "model.num_experts": 6, "optim.lambda_div": 0.01, "optim.lr": 0.002}


def runs(method, score, *, task="digit-sources", seeds=(0, 1, 2), lr=None):
    """Runs of every environment; `score(environment index, seed)`, and a validation score 10 above it."""
    return [
        Result(task, e, method, s, lr, Path("absent"), score(i, s), score(i, s) + 10, 12.0, 2.0, OPTIONS)
        for i, e in enumerate(find_task(task).environments)
        for s in seeds
    ]


def test_differences_by_hand():
    found = paired.compare(np.array([[1.0, -1.0], [3.0, 0.0], [2.0, -2.0]]))
    assert (found.mean, found.by_domain, found.above) == (0.5, (2.0, -1.0), (3, 2))
    # variances over seeds 1 and 1, so that of the mean over two domains is 2 / 4: (1.96 + 0.84)^2 of it, over 0.5^2
    assert found.seeds_needed == 16
    assert found.interval is not None and found.interval[0] < 0.5 < found.interval[1]
    few = paired.compare(np.array([[1.0, 2.0], [2.0, 3.0]]))
    assert (few.mean, few.interval, few.seeds_needed) == (2.0, None, None)
    same = paired.compare(np.zeros((3, 2)))
    assert (same.interval, same.above, same.seeds_needed) == ((0.0, 0.0), (0, 0), 2)


@pytest.mark.parametrize("seeds", [3, 5])
def test_intervals_hold_the_truth_as_often_as_they_say(seeds, monkeypatch):
    monkeypatch.setattr(paired, "RESAMPLES", 2000)
    generator, held = np.random.default_rng(0), 0
    for trial in range(300):
        low, high = paired.bootstrap(generator.normal(0.3, (1.0, 2.0, 3.0), (seeds, 3)), seed=trial)
        held += low <= 0.3 <= high
    assert 0.89 <= held / 300 <= 0.98  # a plain percentile interval of three seeds holds it 0.81 times


def test_the_table_holds_seeds_that_every_method_has(tmp_path):
    results = runs("dense", lambda e, s: 50.0 + e) + runs("unif", lambda e, s: 52.0 + e + s)
    results += runs("lfme", lambda e, s: 60.0) + runs("unif-lfme", lambda e, s: 59.0)
    third = runs("dense", lambda e, s: 99.0, seeds=(3,)) + runs("unif", lambda e, s: 0.0, seeds=(3,))
    third[-1] = replace(third[-1], score=None)
    lines = {(line.method, line.against): line for line in comparisons(results + third, "digit-sources")}
    assert set(lines) == {("unif", "dense"), ("lfme", "dense"), ("unif-lfme", "dense"), ("unif-lfme", "lfme")}
    unif = lines["unif", "dense"]
    assert list(unif.differences.index) == [0, 1, 2] and list(unif.differences) == ["uci", "mnist", "print"]
    assert unif.paired.by_domain == (3.0, 3.0, 3.0) and unif.paired.above == (9, 0) and unif.block_compute == 12.0
    assert lines["unif-lfme", "lfme"].paired.mean == -1.0
    text, picture = write_evidence(results + third, "digit-sources", tmp_path)
    (row,) = [line for line in text.splitlines() if line.startswith("| UniF-MoE | Dense |")]
    assert row.startswith("| UniF-MoE | Dense | +3.0 | +3.0 | +3.0 | +3.00 | +2.") and " to +3." in row
    assert row.endswith(" | 9, 0 | 11 | 12.00 |")
    assert "Seeds 0, 1, 2, whose" in text and "(evidence-digit-sources.png)" in picture
    assert (tmp_path / "evidence-digit-sources.png").stat().st_size > 10_000
    rows = list(csv.DictReader((tmp_path / "evidence-digit-sources-runs.csv").open()))
    assert len(rows) == 36 + 5 and rows[0]["method"] == "dense" and rows[0]["lr"] == "0.002"
    assert write_evidence(runs("dense", lambda e, s: 50.0), "digit-sources", tmp_path) == []


def test_the_table_says_where_less_is_better(tmp_path):
    results = runs("dense", lambda e, s: 30.0, task="genres") + runs("unif", lambda e, s: 29.0 + s, task="genres")
    text, _ = write_evidence(results, "genres", tmp_path)
    assert "Of perplexity less is better." in text and "| UniF-MoE | Dense | +0.0 |" in text


def test_learning_rates_are_chosen_on_other_seeds():
    scores = {("dense", 0.002): 70.0, ("dense", 0.004): 71.0, ("unif", 0.002): 73.0, ("unif", 0.004): 72.0}
    results = [r for (m, lr), v in scores.items() for r in runs(m, lambda e, s, v=v: v + e * s, seeds=(100,), lr=lr)]
    assert best_rates(results, (0, 1)) == {("digit-sources", "dense"): 0.004, ("digit-sources", "unif"): 0.002}
    with pytest.raises(UserError, match="was chosen on seed 100, which is to be run"):
        best_rates(results, (0, 100))
    assert best_rates(results[:-1], (0,)) == {("digit-sources", "dense"): 0.004}
    perplexity = [
        Result("corpus", "learned", "unif", 9, lr, Path("absent"), v, v, 8.0, 1.0, OPTIONS)
        for lr, v in ((1e-4, 30.0), (2e-4, 31.0))
    ]
    assert best_rates(perplexity, (0,)) == {("corpus", "unif"): 1e-4}
