"""The routing decision against its equations: demand, blocks, gates, and the cases where rounding decides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.equations import decide
from tests.support.layers import ABLATIONS, make_layer
from unifmoe_dist import Routing, UniFMoEConfig
from unifmoe_dist.routing import route
from unifmoe_dist.routing_policies import FixedCount, FixedDemand, RouterPolicies, prefix_order


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 12),
    experts=st.integers(1, 9),
    blocks=st.integers(2, 16),
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.01, 1.0, 10.0]),
    ablation=ABLATIONS,
)
def test_routing_decisions_match_the_equations(n, experts, blocks, seed, spread, ablation):
    experts = max(experts, ablation.get("fixed_experts", 1))
    policies = RouterPolicies.of(UniFMoEConfig(99, blocks, experts, blocks, **ablation))
    torch.manual_seed(seed)
    x, router, up = torch.randn(n, 12), torch.randn(experts + 1, 12) * spread, torch.randn(blocks * 2, 12)
    x, router, up = x.double(), router.double(), up.double()
    prototypes = up.view(blocks, 2, 12).mean(1)
    r = route(x, router, prototypes, policies)
    for i in range(n):
        alpha, shared, active, affinity = decide(x[i], router, up, blocks, **ablation)
        assert r.shared_blocks[i].nonzero().flatten().tolist() == shared
        assert sorted(active) == (r.gates[i] != 0).nonzero().flatten().tolist()
        assert int(r.expert_count[i]) == len(active) and int(r.shared_block_count[i]) == len(shared)
        assert int(r.block_compute[i]) == len(shared) + len(active) * (blocks - len(shared))
        torch.testing.assert_close(r.shared_demand[i], alpha)
        torch.testing.assert_close(r.affinity[i], affinity)


def test_routing_types_and_names():
    layer = make_layer()
    r = layer.route(torch.randn(2, 5, 16).bfloat16())
    assert isinstance(r, Routing)
    assert r.shared_demand.dtype == r.affinity.dtype == r.gates.dtype == torch.float32
    assert r.shared_blocks.dtype == torch.bool
    assert r.shared_demand.shape == (10,) and r.shared_blocks.shape == (10, 4) and r.gates.shape == (10, 3)


def test_ties_go_to_the_lower_index():
    x = torch.ones(1, 4)
    r = route(x, torch.zeros(5, 4), torch.zeros(4, 4))  # alpha = 0.5: two blocks, half the mass
    assert r.shared_blocks.tolist() == [[True, True, False, False]]
    assert (r.gates != 0).tolist() == [[True, True, False, False]]
    fixed = route(x, torch.zeros(5, 4), torch.zeros(4, 4), RouterPolicies(FixedDemand(0.75), count=FixedCount(1)))
    assert fixed.shared_blocks.tolist() == [[True, True, True, False]]
    assert (fixed.gates != 0).tolist() == [[True, False, False, False]]
    prefix = route(x, torch.zeros(5, 4), torch.arange(4.0)[:, None].expand(4, 4), RouterPolicies(order=prefix_order))
    assert prefix.shared_blocks.tolist() == [[True, True, False, False]]  # the worst prototypes, but the first


def test_fixed_demand_rounds_half_to_even_and_keeps_a_block_on_both_sides():
    for blocks, alpha, count in [
        (2, 0.4, 1),
        (4, 0.4, 2),
        (5, 0.5, 2),
        (7, 0.5, 4),
        (8, 0.4, 3),
        (16, 0.4, 6),
        (2, 0.01, 1),
        (8, 0.01, 1),
        (2, 0.99, 1),
        (8, 0.99, 7),
    ]:
        r = route(torch.ones(1, 4), torch.randn(3, 4), torch.randn(blocks, 4), RouterPolicies(FixedDemand(alpha)))
        assert int(r.shared_block_count) == count
        torch.testing.assert_close(r.shared_demand, torch.tensor([alpha]))


@pytest.mark.parametrize("blocks", [2, 8])
@pytest.mark.parametrize("logit", [-1e4, 1e4])
def test_saturated_sigmoid_keeps_a_block_on_both_sides(blocks, logit):
    router = torch.zeros(3, 2)
    router[0, 0] = logit
    r = route(torch.tensor([[1.0, 0.0]]), router, torch.randn(blocks, 2))
    assert 1 <= int(r.shared_block_count) <= blocks - 1


def test_rounding_below_the_threshold_takes_every_expert():
    # 64 equal affinities whose float32 running sum may stay under beta: k = K, never beyond.
    r = route(torch.ones(1, 2), torch.tensor([[-1e4, 0.0]] + [[0.0, 0.0]] * 63), torch.randn(2, 2))
    assert 1 <= int(r.expert_count) <= 63


def test_gates_are_not_renormalised_and_mass_is_bounded():
    layer = make_layer(experts=6, spread=0.5)
    r = layer.route(torch.randn(200, 16))
    mass = r.shared_demand + r.gates.sum(-1)
    last = torch.where(r.gates > 0, r.gates, torch.inf).min(-1).values
    assert (mass >= 1 - 1e-5).all() and (mass < 1 + last + 1e-5).all()


def test_autocast_keeps_the_routing_and_the_dtype():
    layer = make_layer()
    x = torch.randn(8, 16)
    plain = layer.route(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = layer.route(x)
        y = layer(x)
    assert y.dtype == torch.float32 and torch.equal(plain.gates, inside.gates)
    torch.testing.assert_close(y, layer(x), rtol=0.1, atol=0.1)
