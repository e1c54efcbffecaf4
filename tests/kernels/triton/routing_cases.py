"""What the Triton kernels of routing and planning must equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.drawn import given, settings, st
from tests.support.triton import (
    DEVICE,
    bank,
    error,
    random,
    random_gates,
    without_tuning,  # noqa: F401
)
from unifmoe_dist.kernels.triton.plan import count_groups, make_plan
from unifmoe_dist.kernels.triton.routing import triton_route
from unifmoe_dist.routing import Routing, route


@pytest.mark.parametrize(
    "n,e,b,has_shared,parts",
    [
        (300, 3, 3, True, 1),
        (20, 19, 2, False, 1),
        (7, 1, 5, False, 1),
        (9, 18, 3, True, 1),
        (0, 2, 2, True, 1),
        (150, 3, 2, True, 3),
        (9, 2, 2, False, 2),
    ],
)
def test_plan(n, e, b, has_shared, parts):
    torch.manual_seed(n)
    gates, blocks = random_gates(n, e).cpu(), torch.rand(n, b) > 0.4
    device = gates.to(DEVICE), blocks.to(DEVICE)
    plan = make_plan(*device, count_groups(*device, has_shared), 16, has_shared, parts)
    blocks, b = blocks.repeat_interleave(parts, dim=1), b * parts
    used, slots = int(plan.num_tiles), [[] for _ in range(n)]
    tile = 0
    for group in range(e * b):
        expert, block = divmod(group, b)
        mask = blocks if not has_shared or expert == 0 else ~blocks
        tokens = ((gates[:, expert] != 0) & mask[:, block]).nonzero().flatten().tolist()
        assert int(plan.group_tiles[group]) == tile
        for first in range(0, len(tokens), 16):
            part = tokens[first : first + 16]
            assert int(plan.tile_group[tile]) == group and int(plan.tile_count[tile]) == len(part)
            assert plan.rows[tile * 16 : tile * 16 + len(part)].tolist() == part
            for row, token in enumerate(part):
                slots[token].append(tile * 16 + row)
            tile += 1
    assert used == tile == int(plan.group_tiles[-1]) <= plan.max_tiles
    assert plan.token_count.tolist() == [len(s) for s in slots]
    assert all(plan.token_slots[i, : len(s)].tolist() == s for i, s in enumerate(slots))


def routed(x, weight, prototypes, token_mask=None) -> Routing:
    """With blocks of one key each, which then is the prototype."""
    return triton_route(x, weight, prototypes, len(prototypes), token_mask)


def settled(x, weight, prototypes) -> Tensor:
    """Tokens whose decisions do not hang on the last digits: twelve small disturbances leave them as they are."""

    def decisions(noise):
        tensors = [t.double() * (1 + noise * torch.randn_like(t, dtype=torch.float64)) for t in (weight, prototypes)]
        routing = route(x.double(), *tensors)
        return torch.cat([routing.shared_blocks, routing.gates != 0], 1)

    plain = decisions(0.0)
    return torch.stack([(decisions(1e-4) == plain).all(-1) for _ in range(12)]).all(0)


def check_route(x, weight, prototypes) -> None:
    """Decisions, weights and gradients against `route`; tokens that rounding alone decides are left out."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    x32 = x.detach().float().requires_grad_()
    want, got = route(x32, weight, prototypes), routed(x, weight, prototypes)
    with torch.no_grad():
        clear = settled(x32, weight, prototypes)
    assert clear.float().mean() > 0.5 or len(clear) < 10
    for name in ("shared_blocks", "shared_block_count", "expert_count"):
        assert torch.equal(getattr(got, name)[clear], getattr(want, name)[clear])
    for name in ("shared_demand", "affinity", "gates"):
        torch.testing.assert_close(getattr(got, name)[clear], getattr(want, name)[clear], rtol=1e-4, atol=2e-6)
    upstream = [
        torch.randn_like(t) * clear.reshape(-1, *[1] * (t.ndim - 1))
        for t in (want.shared_demand, want.affinity, want.gates)
    ]
    outputs = [(r.shared_demand, r.affinity, r.gates) for r in (got, want)]
    mine = torch.autograd.grad(outputs[0], [x, weight], upstream)
    theirs = torch.autograd.grad(outputs[1], [x32, weight], upstream)
    # Where a sigmoid or softmax saturates, 1 - p keeps float32's absolute precision only, in either implementation.
    if len(x):
        usual = [0.01 * float(factor.detach().abs().max()) for factor in (weight, x)]
        assert error(mine[0], theirs[0], usual[0]) < (2e-5 if x.dtype == torch.float32 else 1e-2)
        assert error(mine[1], theirs[1], usual[1]) < 2e-5
        sums = got.by_products.statistics
        single = (got.block_compute, got.expert_count, got.shared_block_count, got.shared_demand, 0 * got.expert_count)
        columns = [*(c[:, None] for c in single), got.gates != 0, got.shared_blocks]
        counted = torch.cat([c.double() for c in columns], 1).sum(0)
        torch.testing.assert_close(sums, torch.cat([sums.new_tensor([len(x)]), counted]), rtol=1e-5, atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(0, 70),
    dim=st.sampled_from([20, 48, 130]),
    experts=st.integers(1, 18),
    blocks=st.integers(2, 20),
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.01, 1.0, 10.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_routing_equals_the_reference(n, dim, experts, blocks, seed, spread, dtype):
    torch.manual_seed(seed)
    weight = random(experts + 1, dim) * spread / dim**0.5
    check_route(random(n, dim, dtype=dtype), weight, random(blocks, dim))


@pytest.mark.parametrize("experts,blocks", [(64, 16), (6, 64)])
def test_routing_over_many(experts, blocks):
    torch.manual_seed(experts)
    check_route(random(33, 48), random(experts + 1, 48) / 7, random(blocks, 48))


@pytest.mark.parametrize("n,experts,blocks,masked", [(300, 3, 5, True), (130, 1, 2, False), (20, 130, 33, False)])
def test_routing_counts_groups(n, experts, blocks, masked):
    """Rows before every span of tokens, and in all; with 130 experts a kernel of its own counts."""
    torch.manual_seed(n)
    mask = torch.rand(n, device=DEVICE) > 0.4 if masked else None
    r = routed(random(n, 16), random(experts + 1, 16), random(blocks, 16), mask)
    assert torch.equal(r.by_products.coefficients, torch.cat([r.shared_demand[:, None], r.gates], 1))
    used = r.by_products.coefficients != 0
    rows = used[:, :, None] & torch.stack([r.shared_blocks, *[~r.shared_blocks] * experts], 1)
    offsets = r.by_products.group_offsets
    assert torch.equal(offsets.totals, rows.sum(0, dtype=torch.int32))
    for span, earlier in enumerate(offsets.earlier):
        assert torch.equal(earlier, rows[: 128 * span].sum(0, dtype=torch.int32))
    assert len(offsets.earlier) == -(-n // 128)


def test_prototypes_are_means_of_keys():
    torch.manual_seed(0)
    x, router, experts = random(20, 48), random(4, 48), bank(1, 48, 600, 4)
    got = triton_route(x, router, experts.keys[0], 4)
    want = route(x, router, experts.prototypes()[0])
    clear = settled(x, router, experts.prototypes()[0])
    assert clear.sum() > 10 and torch.equal(got.shared_blocks[clear], want.shared_blocks[clear])


def test_routing_ties_go_to_the_lower_index():
    x = torch.ones(1, 16, device=DEVICE)
    r = routed(x, x.new_zeros(5, 16), x.new_zeros(4, 16))
    assert r.shared_blocks.tolist() == [[True, True, False, False]]
    assert (r.gates != 0).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("blocks", [2, 8])
@pytest.mark.parametrize("logit", [-1e4, 1e4])
def test_routing_saturated(blocks, logit):
    router = torch.zeros(64, 16, device=DEVICE)
    router[0, 0] = logit
    x = torch.zeros(1, 16, device=DEVICE)
    x[0, 0] = 1.0
    prototypes = random(blocks, 16)
    got, want = routed(x, router, prototypes), route(x, router, prototypes)
    assert torch.equal(got.shared_blocks, want.shared_blocks)
    assert abs(int(got.expert_count) - int(want.expert_count)) <= 1  # 63 equal affinities: rounding decides


def test_routing_rounds_half_to_even():
    # alpha = 0.5 exactly, B = 3, 5, 7: 1.5, 2.5 and 3.5 blocks.
    for blocks, count in ((3, 2), (5, 2), (7, 4)):
        r = routed(torch.ones(1, 16, device=DEVICE), torch.zeros(3, 16, device=DEVICE), random(blocks, 16))
        assert int(r.shared_block_count) == count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routing_of_nan_and_infinity(dtype):
    torch.manual_seed(0)
    x = random(5, 16, dtype=dtype)
    x[1, 0], x[3, 2], x[4, 2:4] = float("nan"), float("inf"), float("inf")
    weight, prototypes = random(4, 16), random(8, 16)
    scores = x[4].float() @ prototypes.T
    assert scores.isnan().any() and scores.isinf().any()
    got, want = routed(x, weight, prototypes), route(x.float(), weight, prototypes)
    for name in ("shared_blocks", "shared_block_count", "expert_count", "shared_demand", "gates"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), equal_nan=True)


def test_routing_mask():
    """A masked token decides nothing and gets no gradient, even if it is NaN."""
    torch.manual_seed(0)
    x, weight, prototypes = random(40, 16), random(4, 16), random(4, 16)
    keep = torch.rand(40, device=DEVICE) > 0.4
    x[~keep] = float("nan")
    x.requires_grad_()
    weight.requires_grad_()
    r = routed(x, weight, prototypes, keep)
    want = route(x[keep], weight, prototypes)
    for name in ("shared_demand", "shared_blocks", "affinity", "gates", "shared_block_count", "expert_count"):
        torch.testing.assert_close(getattr(r, name)[keep], getattr(want, name))
        assert not getattr(r, name)[~keep].any()
    mine = torch.autograd.grad(r.gates.sum() + r.shared_demand.sum(), [x, weight])
    theirs = torch.autograd.grad(want.gates.sum() + want.shared_demand.sum(), [x, weight])
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mine[0][keep], theirs[0][keep], rtol=1e-4, atol=1e-5)
    assert (mine[0][~keep] == 0).all()
    assert r.by_products.statistics[0] == keep.sum()
