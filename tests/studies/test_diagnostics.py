"""The paper's three observations, each statistic against cases worked by hand."""

from __future__ import annotations

import csv
import itertools
import json
import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.diagnostics import (
    FrozenExperts,
    RouterTraining,
    Settings,
    diagnose,
    train_router_on_task,
    write_diagnosis,
)
from unifmoe_dist.studies.diagnostics.alignment import shared_sets, value_alignment
from unifmoe_dist.studies.diagnostics.coactivation import coactivation_frequency, pearson
from unifmoe_dist.studies.diagnostics.demand import functional_demand, prefix_errors
from unifmoe_dist.studies.diagnostics.demand_statistics import HIGH, LOW, demand_statistics
from unifmoe_dist.studies.diagnostics.pairs import as_matrix, expert_order, expert_pairs, top_pair
from unifmoe_dist.studies.diagnostics.reconstruction import Reconstruction, reconstruction_problems, responses
from unifmoe_dist.studies.diagnostics.router_training import top2_gates, train_router
from unifmoe_dist.studies.diagnostics.task_router import _ResidualOutput
from unifmoe_dist.studies.diagnostics.transitions import rank_transition
from unifmoe_dist.studies.usage.capture import capture
from unifmoe_dist.upcycling import moe_layers, upcycle

FAST = RouterTraining(steps=60, batch_size=256)


def identity_experts(values: list, bias: list | None = None) -> FrozenExperts:
    """Experts without activation whose H = d channels read one input each: E_e(x) = x @ values[e] (+ bias[e])."""
    down = [torch.tensor(v, dtype=torch.float64) for v in values]
    size = len(down[0])
    ffns = [
        (torch.eye(size), None, v.T, None if bias is None else torch.tensor(bias[e], dtype=torch.float64))
        for e, v in enumerate(down)
    ]
    return FrozenExperts.from_ffns(ffns, "identity")


def random_experts(num_experts=4, hidden=6, dim=5, bias=True, seed=0) -> FrozenExperts:
    g = torch.Generator().manual_seed(seed)

    def r(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    ffns = []
    base = r(dim, hidden)
    for _ in range(num_experts):
        near = torch.rand(hidden, generator=g) < 0.5  # about half of the channels stay aligned
        down = torch.where(near, base, r(dim, hidden))
        ffns.append((r(hidden, dim), r(hidden) if bias else None, down, r(dim) if bias else None))
    return FrozenExperts.from_ffns(ffns, "gelu")


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


# -- from a model ----------------------------------------------------------------------------------------------------


def small_model():
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    model = VisionTransformer(img_size=8, patch_size=4, in_chans=1, num_classes=3, embed_dim=16, depth=2, num_heads=2)
    return upcycle(model, [1], num_experts=4, num_blocks=4, router_seed=0)


def test_capture_sees_every_token_where_it_was():
    model = small_model().train()
    ((name, layer),) = moe_layers(model).items()
    seen = []
    hook = layer.register_forward_hook(lambda m, args, out: seen.append((args[0].detach(), out.detach())))
    images = torch.randn(5, 1, 8, 8)
    got = capture(model, {name: layer}, [{"x": images[:3]}, {"x": images[3:]}], keep_tokens=True)[name]
    hook.remove()
    assert model.training and not layer._forward_pre_hooks
    assert got.item.tolist() == [i for i in range(5) for _ in range(5)]
    assert got.position.tolist() == list(range(5)) * 5
    tokens = torch.cat([x.reshape(-1, 16) for x, _ in seen])
    assert torch.equal(got.tokens, tokens)
    assert torch.equal(got.routing.gates, layer.route(tokens).gates)
    assert got.routing.by_products is None
    with pytest.raises(UserError, match="at least one batch"):
        capture(model, {name: layer}, [])


def test_capture_leaves_padding_out():
    layer = moe_layers(small_model())["blocks.1.mlp"]
    holder = torch.nn.ModuleDict({"layer": layer})
    holder.forward = lambda x, mask: layer(x, token_mask=mask)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    got = capture(holder, {"l": layer}, [{"x": torch.randn(2, 3, 16), "mask": mask}])["l"]
    assert got.item.tolist() == [0, 0, 1] and got.position.tolist() == [0, 1, 0]
    assert got.tokens is None and len(got.routing.expert_count) == 3


def test_frozen_experts_compute_what_the_layer_holds():
    layer = moe_layers(small_model())["blocks.1.mlp"]
    torch.nn.init.normal_(layer.experts.values)
    torch.nn.init.normal_(layer.experts.value_bias)
    experts, x = FrozenExperts.of(layer), torch.randn(7, 16)
    outputs = torch.bmm(experts.activations(x), experts.values)
    for e in range(4):
        up, up_bias, down, down_bias = layer.ffn_weights(e)
        expected = F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)
        assert torch.allclose(outputs[e].float(), expected, atol=1e-5)


def test_the_new_router_routes_residual_positions_alone():
    """y = S_ij(x) + sum over its top-2 of g_e E_e^R(x), token by token from the layer's own weights."""
    model = small_model()
    layer = moe_layers(model)["blocks.1.mlp"]
    for parameter in layer.experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    experts = FrozenExperts.of(layer)
    sets = shared_sets(experts, delta=0.1)
    assert 0 < sets.ratio.min() and sets.ratio.max() < 1
    weight, x = torch.randn(4, 16), torch.randn(2, 3, 16)
    got = _ResidualOutput(experts.to(torch.float32), sets, weight)(layer, (x,), {}, torch.empty(2, 3, 16))
    tokens = x.reshape(6, 16)
    scores, logits = layer.route(tokens).affinity, tokens @ weight.T
    parts = experts.activations(tokens)  # (4, 6, C)
    for n in range(6):
        i, j = scores[n].topk(2).indices.sort().values.tolist()
        shared = sets.shared[int(top_pair(scores[n : n + 1]))].double()
        total = scores[n, i] + scores[n, j]
        y = sum(scores[n, e] / total * ((parts[e, n] * shared) @ experts.values[e]) for e in (i, j))
        a, b = logits[n].topk(2).indices.tolist()
        gate = torch.sigmoid(logits[n, a] - logits[n, b])
        for e, g in ((a, gate), (b, 1 - gate)):
            y = y + g * ((parts[e, n] * (1 - shared)) @ experts.values[e])
        torch.testing.assert_close(got.reshape(6, 16)[n], y.float(), atol=1e-4, rtol=1e-4)


def test_router_on_the_task_loss_lowers_it_and_leaves_the_model_alone():
    model = small_model()
    layer = moe_layers(model)["blocks.1.mlp"]
    torch.nn.init.normal_(layer.experts.values, std=0.5)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    images = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = (images.mean((1, 2, 3)) > 0).long()
    losses = []

    def loss_of(output, target):
        loss = F.cross_entropy(output, target)
        losses.append(loss.item())
        return loss

    sets = shared_sets(FrozenExperts.of(layer))
    training = RouterTraining(steps=40, lr=0.05)
    weight = train_router_on_task(model, layer, sets, [({"x": images}, labels)] * 40, loss_of, training)
    assert weight.shape == (4, 16)
    assert len(losses) == 40 and min(losses[-5:]) < losses[0] - 0.02
    assert all(p.requires_grad and torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not layer._forward_hooks and model.training
    assert all(p.grad is None for p in model.parameters())
