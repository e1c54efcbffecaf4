"""The paper's three observations, each statistic against cases worked by hand."""

from __future__ import annotations

import csv
import json
import math

import pytest
import torch

from tests.support.experts import FAST, identity_experts
from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.diagnostics.demand_statistics import HIGH, LOW
from unifmoe_dist.studies.diagnostics.diagnosis import Settings, diagnose, write_diagnosis
from unifmoe_dist.studies.diagnostics.rankings import (
    as_matrix,
    coactivation_frequency,
    expert_pairs,
    pearson,
    rank_transition,
    top_pair,
)
from unifmoe_dist.studies.diagnostics.reconstruction import Reconstruction
from unifmoe_dist.studies.diagnostics.residual_router import RouterTraining, top2_gates, train_router
from unifmoe_dist.studies.diagnostics.shared_channels import FrozenExperts, shared_sets, value_alignment

# -- observation 1 ---------------------------------------------------------------------------------------------------


def test_pairs_are_numbered_as_listed():
    assert expert_pairs(4).tolist() == [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]
    for p, (i, j) in enumerate(expert_pairs(5).tolist()):
        scores = torch.zeros(2, 5)
        scores[0, i], scores[0, j] = 2.0, 1.0
        scores[1, i], scores[1, j] = 1.0, 2.0
        assert top_pair(scores).tolist() == [p, p]
    assert top_pair(torch.ones(1, 3)).tolist() == [0]  # ties: experts 0 and 1
    matrix = as_matrix(torch.tensor([1.0, 2.0, 3.0]), 3, diagonal=0.0)
    assert matrix.tolist() == [[0, 1, 2], [1, 0, 3], [2, 3, 0]]


def test_alignment_and_shared_ratio_by_hand():
    """K=2, H=4, d=2: cosines 1 (other length), 0, 4/5 (of (1,0) and (4,3)), and a zero row."""
    values = torch.tensor([[[1.0, 0], [1, 0], [1, 0], [0, 0]], [[7.0, 0], [0, 2], [4, 3], [1, 1]]], dtype=torch.float64)
    assert torch.allclose(value_alignment(values), torch.tensor([[1, 0, 0.8, 0]], dtype=torch.float64))
    experts = FrozenExperts(torch.zeros(2, 4, 2), torch.zeros(2, 4), values, "gelu")
    assert shared_sets(experts).shared.tolist() == [[True, False, False, False]]
    assert shared_sets(experts).ratio.tolist() == [0.25]
    assert shared_sets(experts, delta=0.8 - 1e-9).ratio.tolist() == [0.5]
    assert shared_sets(experts, delta=0.81).ratio.tolist() == [0.25]


def test_down_bias_is_a_channel_that_no_ratio_counts():
    """Aligned biases are shared, opposed ones residual; rho stays the fraction of the two hidden channels."""
    values = [[[1.0, 0], [0, 1]], [[1.0, 0], [1, 0]]]
    aligned, opposed = ([[1.0, 1], [2, 2]], [[1.0, 1], [-1, -1]])
    for bias, is_shared in ((aligned, True), (opposed, False)):
        sets = shared_sets(identity_experts(values, bias))
        assert sets.shared.tolist() == [[True, False, is_shared]]
        assert sets.ratio.tolist() == [0.5]


def test_coactivation_and_pearson_by_hand():
    scores = torch.tensor([[0.6, 0.3, 0.1], [0.3, 0.6, 0.1], [0.5, 0.1, 0.4], [0.1, 0.4, 0.5]])
    frequency = coactivation_frequency(top_pair(scores), 3)
    assert frequency.tolist() == [0.5, 0.25, 0.25]
    # ratio (1, 2, 3) against (.5, .25, .25): cov sum -0.25, squares 2 and 1/24, r = -0.25 / sqrt(1/12)
    assert pearson(torch.tensor([1.0, 2, 3]), frequency).r == pytest.approx(-0.25 * math.sqrt(12))
    assert math.isnan(pearson(torch.ones(3), frequency).r)
    assert math.isnan(pearson(torch.ones(1), torch.ones(1)).r)


# -- observation 2 ---------------------------------------------------------------------------------------------------


def test_rank_transition_by_hand():
    """K=3, two tokens. Token 1 keeps (0, 1, 2); token 2 goes from (0, 1, 2) to (2, 0, 1): ranks 1->2, 2->3, 3->1."""
    original = torch.tensor([[3.0, 2, 1], [3, 2, 1]])
    residual = torch.tensor([[30.0, 20, 10], [20, 10, 30]])
    found = rank_transition(original, residual)
    assert found.matrix.tolist() == [[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]]
    assert found.diagonal == 0.5
    assert found.same_pair == 0.5  # {0, 1} against {0, 1} and {2, 0}
    assert (found.chance_same_pair, found.chance_diagonal) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    same = rank_transition(original, original * 5)
    assert same.same_pair == same.diagonal == 1 and same.matrix.equal(torch.eye(3, dtype=torch.float64))


def test_unrelated_rankings_meet_at_chance():
    g = torch.Generator().manual_seed(0)
    found = rank_transition(torch.randn(20000, 6, generator=g), torch.randn(20000, 6, generator=g))
    assert found.same_pair == pytest.approx(1 / 15, abs=0.01)
    assert found.diagonal == pytest.approx(1 / 6, abs=0.01)


def test_top2_gates_are_renormalised_and_sparse():
    gates = top2_gates(torch.tensor([[math.log(3), 0.0, -5.0], [-5.0, 0.0, 0.0]]))
    assert torch.allclose(gates, torch.tensor([[0.75, 0.25, 0], [0, 0.5, 0.5]]))


def test_residual_router_learns_a_planted_choice_and_is_deterministic():
    """Targets are 0.5 R_0 + 0.5 R_1 where x_0 > 0 and 0.5 R_2 + 0.5 R_3 elsewhere, R_e orthonormal."""
    x = torch.randn(600, 3, generator=torch.Generator().manual_seed(1))
    products = torch.where(x[:, :1] > 0, torch.tensor([[0.5, 0.5, 0, 0]]), torch.tensor([[0, 0, 0.5, 0.5]])).double()
    ones = torch.ones(600, dtype=torch.float64)
    problem = Reconstruction(torch.eye(4, dtype=torch.float64).expand(600, 4, 4), products, ones / 2, ones / 2)
    training = RouterTraining(steps=120, batch_size=128, lr=0.05, seed=3)
    logits, error = train_router(x, problem, training)
    right = top_pair(logits) == torch.where(x[:, 0] > 0, 0, 5)
    assert right.double().mean() > 0.9
    assert error < 0.2  # relative: choosing a wrong pair costs 2
    again, _ = train_router(x, problem, training)
    assert torch.equal(logits, again)
    other, _ = train_router(x, problem, RouterTraining(steps=5, seed=4))
    assert not torch.equal(logits, other)


# -- the whole study -------------------------------------------------------------------------------------------------


def planted(num_tokens: int = 1500):
    """K=6 experts in clans {0,1,2} and {3,4,5}: pair (i, j) of a clan shares value rows, and the router sends tokens to
    pairs of one clan; pairs across clans share nothing and are rare."""
    g = torch.Generator().manual_seed(7)
    hidden, dim = 24, 8
    base = [torch.randn(dim, hidden, generator=g) for _ in range(2)]
    up = torch.randn(hidden, dim, generator=g)
    kept = [20, 16, 10]
    ffns = []
    for e in range(6):
        down = torch.randn(dim, hidden, generator=g)
        down[:, : kept[e % 3]] = base[e // 3][:, : kept[e % 3]]
        ffns.append((up, None, down, None))
    x = torch.randn(num_tokens, dim, generator=g)
    clan = torch.where(x[:, :1] > 0, torch.tensor([[1.0, 1, 1, 0, 0, 0]]), torch.tensor([[0.0, 0, 0, 1, 1, 1]]))
    liking = torch.tensor([1.0, 0.7, 0.0] * 2)
    scores = torch.softmax(2 * clan + liking + torch.randn(num_tokens, 6, generator=g), 1)
    return FrozenExperts.from_ffns(ffns, "gelu"), x, scores


def test_planted_sharing_shows_in_all_three_observations(tmp_path):
    experts, x, scores = planted()
    found = diagnose(experts, x, scores, Settings(router=FAST, resamples=500))
    assert found.coactivation.r > 0.8 and found.coactivation.p_value < 1e-3
    ratio = as_matrix(found.sets.ratio, 6)
    assert ratio[0, 1] == ratio[4, 3] == pytest.approx(16 / 24) and ratio[0, 3] == 0
    assert found.frequency.sum().item() == pytest.approx(1)
    assert torch.allclose(found.transition.matrix.sum(1), torch.ones(6, dtype=torch.float64))
    assert found.control is not None and 0 <= found.control.same_pair <= 1
    at_5_percent = found.demand[0]
    assert at_5_percent.correlation < 0
    assert at_5_percent.groups[HIGH].mean_demand < at_5_percent.groups[LOW].mean_demand
    for tight, loose in zip(found.demand, found.demand[1:], strict=False):  # a larger tolerance needs no more experts
        assert (loose.mean_demand <= tight.mean_demand + 1e-12)[tight.tokens > 0].all()

    paths = write_diagnosis(found, tmp_path / "new")
    assert {p.name for p in paths} == {
        "diagnosis.json",
        "alignment.csv",
        "pairs.csv",
        "rank_transition.csv",
        "demand_cdf.csv",
    }
    with (tmp_path / "new/alignment.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    assert len(rows) == 24 and float(rows[0]["c_0_1"]) == pytest.approx(1)
    record = json.loads((tmp_path / "new/diagnosis.json").read_text())
    assert record["correlation_ratio_coactivation"]["r"] == pytest.approx(found.coactivation.r)
    assert len(record["pairs"]) == 15 and record["settings"]["delta"] == 0.98
    with (tmp_path / "new/pairs.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    assert float(rows[0]["shared_ratio"]) == pytest.approx(16 / 24)
    with (tmp_path / "new/demand_cdf.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    assert len(rows) == 2 * 3 * 2 * 6


def test_chunks_change_nothing_and_runs_repeat():
    experts, x, scores = planted(200)
    whole, parts = (diagnose(experts, x, scores, Settings(router=FAST, chunk=c, resamples=99)) for c in (1000, 37))
    assert torch.allclose(whole.transition.matrix, parts.transition.matrix, atol=0.02)
    assert torch.allclose(whole.demand[0].mean_demand, parts.demand[0].mean_demand, atol=0.1, equal_nan=True)
    again = diagnose(experts, x, scores, Settings(router=FAST, chunk=37, resamples=99))
    assert torch.equal(again.transition.matrix, parts.transition.matrix)
    assert again.demand[0].interval == parts.demand[0].interval


def test_mistakes_are_named():
    experts, x, scores = planted(10)
    with pytest.raises(UserError, match=r"\(10, 5\).*\(N, 8\)"):
        diagnose(experts, x[:, :5], scores)
    with pytest.raises(UserError, match="N at least 1"):
        diagnose(experts, x[:0], scores[:0])
    with pytest.raises(UserError, match=r"scores have shape \(10, 5\)"):
        diagnose(experts, x, scores[:, :5])
    with pytest.raises(UserError, match="pairs of experts; this layer has 1"):
        FrozenExperts.from_ffns([(torch.zeros(2, 2), None, torch.zeros(2, 2), None)], "gelu")
