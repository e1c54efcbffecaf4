"""Observation 3: what the other experts can reconstruct, and what is left to route."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.experts import FAST, identity_experts, random_experts
from unifmoe_dist.studies.diagnostics.demand_statistics import HIGH, LOW, demand_statistics
from unifmoe_dist.studies.diagnostics.diagnosis import Settings, diagnose
from unifmoe_dist.studies.diagnostics.rankings import expert_order, expert_pairs, top_pair
from unifmoe_dist.studies.diagnostics.reconstruction import (
    Reconstruction,
    functional_demand,
    prefix_errors,
    reconstruction_problems,
    responses,
)
from unifmoe_dist.studies.diagnostics.shared_channels import FrozenExperts, shared_sets

# -- observation 3 ---------------------------------------------------------------------------------------------------


def test_responses_by_hand():
    """K=3, H=d=2, E_e(x) = x @ V_e with x = (2, 3); original gates .6 and .2 of experts 0 and 1 become .75 and .25.

    Values: channel 0 of experts 0 and 1 is (1, 0) and (2, 0), aligned; channel 1 is (0, 1) and (1, 0), not.
    E_0^S = 2 (1,0) = (2, 0);  E_1^S = 2 (2,0) = (4, 0);  S = .75 (2,0) + .25 (4,0) = (2.5, 0)
    E_0^R = 3 (0,1) = (0, 3);  E_1^R = 3 (1,0) = (3, 0);  E_2^R = 3 (1,1) = (3, 3)
    y = S + .75 (0,3) + .25 (3,0) = (3.25, 2.25);  r = y - S = (.75, 2.25)
    """
    experts = identity_experts([[[1.0, 0], [0, 1]], [[2.0, 0], [1, 0]], [[0.0, 1], [1, 1]]])
    sets = shared_sets(experts)
    x, scores = torch.tensor([[2.0, 3.0]]), torch.tensor([[0.6, 0.2, 0.1]])
    pair = top_pair(scores)
    got = responses(experts, sets.shared, pair, scores, x)
    for found, value in (
        (got.gates, [[0.75, 0.25, 0]]),
        (got.original, [[3.25, 2.25]]),
        (got.merged("gates"), [[2.5, 0.0]]),
        (got.merged("uniform"), [[3.0, 0.0]]),
        (got.residual, [[[0.0, 3], [3, 0], [3, 3]]]),
    ):
        assert torch.allclose(found, torch.tensor(value, dtype=torch.float64), atol=1e-7)

    problems = reconstruction_problems(experts, sets, pair, scores, x)
    assert problems.uniform.target_square.item() == pytest.approx(0.25**2 + 2.25**2)
    # complete experts: E_0 = (2, 3), E_1 = (7, 0), E_2 = (3, 5); products with y
    assert torch.allclose(problems.complete.products[0], torch.tensor([13.25, 22.75, 21.0], dtype=torch.float64))
    assert problems.complete.target_square.equal(problems.residual.output_square)
    problem = problems.residual
    assert torch.allclose(problem.gram[0], torch.tensor([[9.0, 0, 9], [0, 9, 9], [9, 9, 18]], dtype=torch.float64))
    assert torch.allclose(problem.products[0], torch.tensor([6.75, 2.25, 9.0], dtype=torch.float64))
    assert problem.target_square[0].item() == pytest.approx(0.75**2 + 2.25**2)
    assert problem.output_square[0].item() == pytest.approx(3.25**2 + 2.25**2)
    # a = (.5, 0, 0): .5 (0,3) - (.75, 2.25) = (-.75, -.75)
    error = problem.squared_error(torch.tensor([[0.5, 0.0, 0.0]], dtype=torch.float64))
    assert error.item() == pytest.approx(2 * 0.75**2)

    # Order 2, 0, 1. m=1: projection of r on (3,3) is (1.5, 1.5), so |(.75, -.75)| / |y|; m=2 spans the plane.
    errors = prefix_errors(problem, torch.tensor([[2, 0, 1]]))[0]
    norm = math.hypot(3.25, 2.25)
    assert errors[0].item() == pytest.approx(math.hypot(0.75, 0.75) / norm, rel=1e-4)
    assert errors[1].item() < 1e-4 and errors[2].item() < 1e-4
    assert functional_demand(errors[None], 0.05).tolist() == [2]
    assert functional_demand(errors[None], 0.3).tolist() == [1]


def test_demand_takes_the_first_prefix_or_the_sentinel():
    errors = torch.tensor([[0.3, 0.04, 0.2], [0.3, 0.2, 0.1], [0.05, 0.0, 0.0]])
    assert functional_demand(errors, 0.05).tolist() == [2, 4, 1]
    assert functional_demand(errors, 0.1).tolist() == [2, 3, 1]


@pytest.mark.parametrize("averaging", ["residual", "uniform"])
def test_batched_errors_equal_the_equations_token_by_token(averaging):
    """Every e_m by the letter: stacked residual rows, ridge solution by lstsq on the augmented system, y-hat."""
    experts = random_experts()
    g = torch.Generator().manual_seed(5)
    x, scores = torch.randn(9, 5, generator=g), torch.softmax(torch.randn(9, 4, generator=g), 1)
    order = expert_order(torch.randn(9, 4, generator=g))
    sets = shared_sets(experts)
    assert 0 < sets.ratio.max() < 1
    pair = top_pair(scores)
    problems = reconstruction_problems(experts, sets, pair, scores, x, chunk=4)
    got = prefix_errors(getattr(problems, averaging), order)

    for n in range(len(x)):
        i, j = expert_pairs(4)[pair[n]].tolist()
        shared = sets.shared[pair[n]]
        gate = {e: scores[n, e].double() / (scores[n, i] + scores[n, j]).double() for e in (i, j)}

        def output(e: int, channels: torch.Tensor, n: int = n) -> torch.Tensor:
            hidden = F.gelu(experts.keys[e] @ x[n].double() + experts.key_bias[e])
            return (torch.cat([hidden, hidden.new_ones(1)]) * channels.double()) @ experts.values[e]

        y = sum(gate[e] * output(e, torch.ones(7)) for e in (i, j))
        merge = {e: 0.5 for e in (i, j)} if averaging == "uniform" else gate
        common = sum(merge[e] * output(e, shared) for e in (i, j))
        for m in range(1, 5):
            R = torch.stack([output(int(e), ~shared) for e in order[n, :m]])
            gamma = 1e-6 * (R @ R.T).trace() / m
            system = torch.cat([R.T, gamma.sqrt() * torch.eye(m)])
            a = torch.linalg.lstsq(system, torch.cat([y - common, torch.zeros(m)])[:, None]).solution[:, 0]
            error = (common + a @ R - y).norm() / max(y.norm().item(), 1e-12)
            assert got[n, m - 1].item() == pytest.approx(error.item(), abs=1e-7)


def test_ridge_by_hand():
    """R_1 = (1, 0), R_2 = (0, 3), r = y = (1, 3), |y| = sqrt(10).

    m=1: gamma = 1e-6 * 1 / 1, a = 1 / (1 + gamma), so the residue is (1 - a, 3), that is (1e-6, 3).
    m=2: gamma = 1e-6 * (1 + 9) / 2 = 5e-6; a = (1 / (1 + gamma), 9 / (9 + gamma)), residues 1 - a_1 = 5e-6 and
    3 (1 - a_2) = 3 * 5e-6 / 9.
    """
    tensor = partial(torch.tensor, dtype=torch.float64)
    problem = Reconstruction(tensor([[[1, 0], [0, 9]]]), tensor([[1, 9]]), tensor([10]), tensor([10]))
    first, second = prefix_errors(problem, torch.tensor([[0, 1]]))[0].tolist()
    assert first == pytest.approx(math.sqrt((9 + 1e-12) / 10), rel=1e-9)
    assert second == pytest.approx(math.hypot(5e-6, 5e-6 / 3) / math.sqrt(10), rel=1e-3)
    # the other order: m=1 leaves (1, 3 gamma / (9 + gamma)) with gamma = 9e-6
    assert prefix_errors(problem, torch.tensor([[1, 0]]))[0, 0].item() == pytest.approx(math.sqrt(1 / 10), rel=1e-9)


def test_outputs_of_nothing_by_hand():
    """|y| = 1e-13 lies below eta = 1e-12, so with R = 0 every e_m = |r| / eta = 0.1; where r = 0 too, e_m = 0."""
    tiny, nothing = torch.tensor([1e-26, 0], dtype=torch.float64), torch.zeros(2, 3, 3, dtype=torch.float64)
    errors = prefix_errors(Reconstruction(nothing, nothing[0, :2], tiny, tiny), torch.arange(3).expand(2, 3))
    assert errors.tolist() == [[pytest.approx(0.1)] * 3, [0] * 3]
    assert functional_demand(errors, 0.05).tolist() == [4, 1]


def test_prefixes_are_solved_in_batches(monkeypatch):
    """One call per prefix length, whatever the number of tokens."""
    solve, sizes = torch.linalg.solve, []

    def counted(left, right):
        sizes.append(tuple(left.shape))
        return solve(left, right)

    monkeypatch.setattr(torch.linalg, "solve", counted)
    experts = random_experts()
    for count in (3, 300):
        sizes.clear()
        scores = torch.softmax(torch.randn(count, 4), 1)
        found = reconstruction_problems(experts, shared_sets(experts), top_pair(scores), scores, torch.randn(count, 5))
        prefix_errors(found.residual, expert_order(scores))
        assert sizes == [(count, m, m) for m in (1, 2, 3, 4)]


def test_whole_prefix_recovers_a_target_in_its_span():
    """With the gates' own merge the target is a sum of residual rows, so m = K leaves the ridge's bias alone."""
    experts = random_experts(num_experts=3, hidden=8, dim=6)
    g = torch.Generator().manual_seed(2)
    x, scores = torch.randn(50, 6, generator=g), torch.softmax(torch.randn(50, 3, generator=g), 1)
    problem = reconstruction_problems(experts, shared_sets(experts), top_pair(scores), scores, x).residual
    errors = prefix_errors(problem, expert_order(torch.randn(50, 3, generator=g)))
    assert errors[:, -1].max() < 1e-3
    original_first = prefix_errors(problem, expert_order(scores))
    assert original_first[:, 1].max() < 1e-3  # the original pair spans it alone
    assert (errors.diff(dim=1) < 1e-3).all()  # longer prefixes do not get worse beyond that bias


def test_everything_shared_leaves_nothing_to_route():
    """Identical experts: S holds all channels, residual outputs are 0, and one expert of none is enough."""
    up, down = torch.randn(5, 4), torch.randn(4, 5)
    experts = FrozenExperts.from_ffns([(up, None, down, None)] * 3, "gelu")
    scores = torch.softmax(torch.randn(20, 3), 1)
    found = diagnose(experts, torch.randn(20, 4), scores, Settings(router=FAST))
    assert found.sets.ratio.tolist() == [1, 1, 1]
    assert all((s.mean_demand[s.tokens > 0] == 1).all() for s in found.demand)
    assert math.isnan(found.coactivation.r)


def test_permuting_experts_changes_no_statistic():
    experts = random_experts(num_experts=4)
    g = torch.Generator().manual_seed(3)
    x, scores = torch.randn(300, 5, generator=g), torch.softmax(torch.randn(300, 4, generator=g), 1)
    logits = torch.randn(300, 4, generator=g)
    p = torch.tensor([2, 0, 3, 1])
    permuted = FrozenExperts(experts.keys[p], experts.key_bias[p], experts.values[p], "gelu")
    a = diagnose(experts, x, scores, residual_logits=logits)
    b = diagnose(permuted, x, scores[:, p], residual_logits=logits[:, p])
    assert sorted(a.sets.ratio.tolist()) == sorted(b.sets.ratio.tolist())
    assert sorted(a.frequency.tolist()) == sorted(b.frequency.tolist())
    assert torch.equal(a.transition.matrix, b.transition.matrix)
    assert a.coactivation.r == pytest.approx(b.coactivation.r)
    for s, t in zip(a.demand, b.demand, strict=True):
        assert s.correlation == pytest.approx(t.correlation, nan_ok=True)
        assert torch.allclose(s.mean_demand.sort().values, t.mean_demand.sort().values)


def test_pair_balanced_statistics_by_hand():
    """Three pairs of K=3 with ratios .1, .5, .9 and demands {2,4}, {1}, {1,1,1,2}; pair 1 of one token."""
    pair = torch.tensor([0, 0, 1, 2, 2, 2, 2])
    demand = torch.tensor([2, 4, 1, 1, 1, 1, 2])
    ratio = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    found = demand_statistics(demand, pair, ratio, 3, 0.05, group_size=5, resamples=500)
    assert found.tokens.tolist() == [2, 1, 4]
    assert found.mean_demand.tolist() == [3, 1, 1.25]
    assert found.cdf.tolist() == [[0, 0.5, 0.5], [1, 1, 1], [0.75, 1, 1]]
    assert found.groups[LOW].pairs == [0] and found.groups[HIGH].pairs == [2]  # three pairs: halves of one
    assert found.groups[HIGH].success(2) == 1 and found.groups[LOW].success(2) == 0.5
    assert found.groups[LOW].mean_demand == 3
    # means (3, 1, 1.25), mean 1.75: r = (-.4 * 1.25 + .4 * -.5) / sqrt(.32 * 2.375)
    assert found.correlation == pytest.approx(-0.7 / math.sqrt(0.32 * 2.375))
    assert -1 <= found.interval[0] <= found.interval[1] <= 1


def test_groups_balance_pairs_and_leave_out_unseen_ones():
    """K=4, six pairs; pair 3 has no token. Low: pairs 0 and 1 with CDFs at m=1 of 1 and 0, so mean 1/2, error 1/2."""
    pair = torch.tensor([0, 1, 1, 1, 2, 4, 5])
    demand = torch.tensor([1, 2, 2, 2, 5, 3, 1])
    ratio = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64)
    found = demand_statistics(demand, pair, ratio, 4, 0.05, group_size=2, resamples=100)
    assert found.groups[LOW].pairs == [0, 1] and found.groups[HIGH].pairs == [4, 5]
    assert found.groups[LOW].cdf.tolist() == [0.5, 1, 1, 1]
    assert found.groups[LOW].standard_error[0].item() == pytest.approx(math.sqrt(0.5) / math.sqrt(2))
    assert found.groups[LOW].mean_demand == 1.5
    assert math.isnan(found.mean_demand[3]) and found.tokens[3] == 0
    assert found.groups[HIGH].cdf.tolist() == [0.5, 0.5, 1, 1]


def test_bootstrap_interval_covers_and_is_seeded():
    g = torch.Generator().manual_seed(0)
    ratio = torch.rand(30, generator=g, dtype=torch.float64)
    demand = (4 - 3 * ratio + 0.3 * torch.randn(30, generator=g)).round().long().clamp(1, 4)
    kwargs = dict(pair=torch.arange(30), ratio=ratio, num_experts=4, epsilon=0.05, resamples=2000)
    found = demand_statistics(demand, seed=1, **kwargs)
    assert found.interval[0] < found.correlation < found.interval[1] < 0
    assert demand_statistics(demand, seed=1, **kwargs).interval == found.interval
    assert demand_statistics(demand, seed=2, **kwargs).interval != found.interval


def test_bootstrap_interval_is_that_of_all_resamples():
    """Five pairs of one token each: all 5^5 resamples of pairs, written out, have the quantiles that are drawn."""
    ratio = torch.tensor([0.1, 0.2, 0.5, 0.6, 0.9], dtype=torch.float64)
    demand = torch.tensor([4, 2, 3, 1, 1])
    exact = []
    for chosen in itertools.product(range(5), repeat=5):
        a, b = ratio[list(chosen)].numpy(), demand[list(chosen)].double().numpy()
        if a.std() and b.std():  # else there is no r
            exact.append(np.corrcoef(a, b)[0, 1])
    found = demand_statistics(demand, torch.arange(5), ratio, 4, 0.05, resamples=20000, confidence=0.8)
    assert found.correlation == pytest.approx(np.corrcoef(ratio.numpy(), demand.numpy())[0, 1])
    assert found.interval == pytest.approx(np.quantile(exact, [0.1, 0.9]), abs=0.015)
