"""What the Triton kernels must equal, on a CUDA device or, without one, in Triton's interpreter.

Collected by test_triton.py: directly where there is a CUDA device, else in a process of its own that sets
TRITON_INTERPRET=1 before anything imports Triton. The interpreter is slow, so sizes are small.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.config import ACTIVATIONS
from unifmoe_dist.errors import UserError
from unifmoe_dist.experts import BlockExperts
from unifmoe_dist.kernels import HiddenDropout, block_ffn, reference_block_ffn, self_test, use_kernels
from unifmoe_dist.kernels.triton import ffn as triton_ffn
from unifmoe_dist.kernels.triton import routing as triton_routing
from unifmoe_dist.kernels.triton.ffn import TritonOptions, triton_block_ffn
from unifmoe_dist.kernels.triton.plan import count_groups, make_plan, scan_groups
from unifmoe_dist.kernels.triton.routing import triton_route
from unifmoe_dist.kernels.triton.tuning import first_tiles
from unifmoe_dist.routing import Routing, route

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module", autouse=True)
def without_tuning():
    """Trial runs of every tile for every shape here would take long."""
    with first_tiles():
        yield


def bank(experts, dim, hidden, blocks, activation="gelu", bias=True, dtype=torch.float32) -> BlockExperts:
    made = BlockExperts(experts, dim, hidden, blocks, activation, bias).to(DEVICE, dtype)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def random(*shape, dtype=torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def error(got: Tensor, want: Tensor, least: float = 1e-6) -> float:
    """Largest difference over the largest wanted value, or over `least` if that is larger."""
    if not want.numel():
        return 0.0
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).abs().max() / want.abs().max().clamp(min=least))


def wide(experts: BlockExperts) -> BlockExperts:
    copy = BlockExperts(
        *experts.keys.shape[:1],
        experts.keys.shape[2],
        experts.keys.shape[1],
        experts.num_blocks,
        experts.activation,
        experts.key_bias is not None,
    ).to(DEVICE, torch.float64)
    copy.load_state_dict(experts.state_dict())
    return copy


def check_ffn(x, gates, blocks, experts, shared=None, options=None, tolerance=2e-5, dropout=None) -> None:
    """Outputs and all gradients against the reference in float64."""
    grad = random(*x.shape, dtype=x.dtype)
    banks = [experts] if shared is None else [shared, experts]
    leaves = [x.requires_grad_(), gates.requires_grad_(), *(p for b in banks for p in b.parameters())]
    beside = None if shared is None else shared.weights()
    y = triton_block_ffn(x, gates, blocks, experts.weights(), beside, options, dropout=dropout)
    assert y.shape == x.shape and y.dtype == x.dtype
    got = torch.autograd.grad(y, leaves, grad)

    x64, gates64 = x.detach().double().requires_grad_(), gates.detach().double().requires_grad_()
    banks64 = [wide(b) for b in banks]
    if shared is None:
        want_y = reference_block_ffn(x64, gates64, blocks, banks64[0].weights(), dropout)
    else:
        rest = None if dropout is None else dropout.of_experts(1)
        want_y = reference_block_ffn(x64, gates64[:, :1], blocks, banks64[0].weights(), dropout)
        want_y = want_y + reference_block_ffn(x64, gates64[:, 1:], ~blocks, banks64[1].weights(), rest)
    leaves64 = [x64, gates64, *(p for b in banks64 for p in b.parameters())]
    want = list(torch.autograd.grad(want_y, leaves64, grad.double()))
    want[1] = torch.where(gates64 != 0, want[1], 0)  # a gate of 0 has no gradient here, in the layer it never matters
    assert error(y, want_y) < tolerance
    for leaf, g, w in zip(leaves, got, want, strict=True):
        assert g.shape == leaf.shape and g.dtype == leaf.dtype
        assert error(g, w) < tolerance


def random_gates(n: int, e: int) -> Tensor:
    return torch.rand(n, e, device=DEVICE) * (torch.rand(n, e, device=DEVICE) > 0.5)


@settings(max_examples=12, deadline=None)
@given(
    n=st.integers(0, 20),
    e=st.integers(1, 4),
    dim=st.sampled_from([16, 48, 80]),
    block=st.sampled_from([16, 48, 80]),
    num_blocks=st.integers(2, 4),
    bias=st.booleans(),
    with_shared=st.booleans(),
    seed=st.integers(0, 10_000),
    options=st.builds(
        TritonOptions,
        atomic=st.booleans(),
        workspace_bytes=st.sampled_from([None, 8_000]),
        tile_rows=st.sampled_from([None, 32]),
    ),
)
def test_ffn_equals_the_reference(n, e, dim, block, num_blocks, bias, with_shared, seed, options):
    """Any gates and masks, also those that routing would never make; a small workspace means many rounds."""
    torch.manual_seed(seed)
    shared = bank(1, dim, block * num_blocks, num_blocks, bias=bias) if with_shared else None
    experts = bank(e, dim, block * num_blocks, num_blocks, bias=bias)
    blocks = torch.rand(n, num_blocks, device=DEVICE) > 0.5
    check_ffn(random(n, dim), random_gates(n, e + with_shared), blocks, experts, shared, options)


@pytest.mark.parametrize("rate", [0.1, 0.9])
@pytest.mark.parametrize("with_shared,first", [(True, 0), (False, 0), (False, 1)])
@pytest.mark.parametrize(
    "block,dtype,options",
    [
        (16, torch.float32, TritonOptions()),
        (192, torch.float32, TritonOptions(tile_rows=16, workspace_bytes=40_000)),
        (288, torch.bfloat16, TritonOptions(backward_tile_rows=32)),
        (48, torch.float16, TritonOptions(atomic=True)),
    ],
)
def test_ffn_dropout(rate, with_shared, first, block, dtype, options):
    """The mask of the definition, whatever the tiles, the parts of a block and the rounds are, in both passes."""
    torch.manual_seed(block)
    shared, experts = (bank(e, 32, 2 * block, 2, dtype=dtype) for e in (1, 2))
    dropout = HiddenDropout.draw(rate, torch.device(DEVICE)).of_experts(first)
    blocks = torch.rand(19, 2, device=DEVICE) > 0.4
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    x, gates = random(19, 32, dtype=dtype), random_gates(19, 2 + with_shared)
    check_ffn(x, gates, blocks, experts, shared if with_shared else None, options, tolerance, dropout)


@pytest.mark.parametrize("dtype,tolerance", [(torch.bfloat16, 3e-2), (torch.float16, 4e-3), (torch.float32, 2e-5)])
@pytest.mark.parametrize("block", [32, 192, 288])  # one tile, three tiles, and wider than registers hold
def test_ffn_types_and_widths(dtype, tolerance, block):
    torch.manual_seed(block)
    shared, experts = (bank(e, 32, 2 * block, 2, dtype=dtype) for e in (1, 2))
    blocks = torch.rand(11, 2, device=DEVICE) > 0.5
    check_ffn(random(11, 32, dtype=dtype), random_gates(11, 3), blocks, experts, shared, tolerance=tolerance)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_ffn_activations(activation):
    torch.manual_seed(1)
    experts = bank(1, 16, 32, 2, activation)
    check_ffn(2 * random(9, 16), random_gates(9, 1), torch.ones(9, 2, dtype=torch.bool, device=DEVICE), experts)


@pytest.mark.parametrize("options", [TritonOptions(), TritonOptions(tile_rows=16, workspace_bytes=40_000)])
def test_ffn_groups_of_many_tiles(options):
    """Groups longer than a tile, continued over rounds; one expert has all tokens, one none."""
    torch.manual_seed(2)
    gates = torch.rand(150, 3, device=DEVICE) + 0.1
    gates[:, 1] = 0
    check_ffn(random(150, 16), gates, torch.rand(150, 2, device=DEVICE) > 0.3, bank(3, 16, 32, 2), options=options)


def test_ffn_is_deterministic():
    torch.manual_seed(3)
    experts = bank(2, 32, 64, 2, dtype=torch.bfloat16)
    x = random(40, 32, dtype=torch.bfloat16).requires_grad_()
    gates = torch.rand(40, 2, device=DEVICE).requires_grad_()
    blocks = torch.ones(40, 2, dtype=torch.bool, device=DEVICE)
    runs = []
    for _ in range(2):
        y = triton_block_ffn(x, gates, blocks, experts.weights())
        runs.append((y, *torch.autograd.grad(y, [x, gates, *experts.parameters()], torch.ones_like(y))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_ffn_computes_only_selected_blocks():
    """Poisoned weights of a block that no token needs reach nothing."""
    experts = bank(2, 16, 64, 4)
    with torch.no_grad():
        experts.keys[0, 16:32] = experts.values[1, 48:] = float("nan")
    gates = torch.tensor([[1.0, 0.0], [0.0, 1.0]], device=DEVICE)
    blocks = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 0]], device=DEVICE).bool()
    x = random(2, 16).requires_grad_()
    y = triton_block_ffn(x, gates, blocks, experts.weights())
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()
    assert experts.keys.grad.isfinite().all() and (experts.keys.grad[0, 16:32] == 0).all()


def test_ffn_with_frozen_experts():
    """Gradients that nobody wants are not made; the others are as before."""
    shared, experts = bank(1, 16, 32, 2), bank(2, 16, 32, 2)
    x, gates, blocks = random(9, 16).requires_grad_(), random_gates(9, 3), torch.rand(9, 2, device=DEVICE) > 0.5

    def gradient():
        triton_block_ffn(x, gates, blocks, experts.weights(), shared.weights()).sum().backward()
        (result, x.grad) = (x.grad, None)
        return result

    before = gradient()
    experts.requires_grad_(False)
    wanted, shared.keys.grad = shared.keys.grad, None
    assert torch.equal(before, gradient()) and torch.equal(shared.keys.grad, wanted)
    shared.requires_grad_(False)
    assert torch.equal(before, gradient())


def test_ffn_autocast():
    experts, x = bank(2, 32, 64, 2), random(8, 32).requires_grad_()
    gates, blocks = random_gates(8, 2), torch.rand(8, 2, device=DEVICE) > 0.5
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = triton_block_ffn(x, gates, blocks, experts.weights())
    y.sum().backward()
    assert y.dtype == x.grad.dtype == experts.keys.grad.dtype == torch.float32
    assert 1e-5 < error(y, reference_block_ffn(x, gates, blocks, experts.weights())) < 3e-2


def test_ffn_saves_little_for_the_backward_pass():
    """No gathered tokens and no hidden activations: x, gates, masks and group offsets, whatever C_B is."""
    experts, x = bank(4, 32, 128, 4), random(30, 32).requires_grad_()
    gates = torch.rand(30, 4, device=DEVICE)
    own = {p.data_ptr() for p in experts.parameters()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        triton_block_ffn(x, gates, torch.ones(30, 4, dtype=torch.bool, device=DEVICE), experts.weights())
    total = sum(t.numel() * t.element_size() for t in saved if t.data_ptr() not in own)
    assert total <= 4 * (x.numel() + gates.numel()) + 30 * 4 + 2 * (4 * 4 * 4)


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


@settings(max_examples=25, deadline=None)
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


def make_layer(dim=32, hidden=64, experts=3, blocks=4, seed=0, **more) -> UniFMoELayer:
    torch.manual_seed(seed)
    layer = UniFMoELayer(UniFMoEConfig(dim, hidden, experts, blocks, **more)).to(DEVICE)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer


def check_layer(layer: UniFMoELayer, x: Tensor, token_mask: Tensor | None = None) -> None:
    """Outputs, gradients and statistics, Triton against plain torch."""
    x, grad = x.detach().requires_grad_(), random(*x.shape)
    results = []
    for name in ("triton", "grouped"):
        torch.manual_seed(6)  # of what is dropped
        layer.zero_grad()
        layer.usage.reset()
        with use_kernels(name):
            y = layer(x, token_mask)
        (gx,) = torch.autograd.grad(y, x, grad, retain_graph=True)
        y.backward(grad)
        results.append([y, gx, *(p.grad.clone() for p in layer.parameters()), layer.usage.totals.clone()])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=1e-4, atol=2e-4, equal_nan=True)


@pytest.mark.parametrize(
    "sizes",
    [
        dict(),
        dict(experts=1),
        dict(hidden=32, blocks=2),
        dict(dim=48, hidden=144, blocks=3),
        dict(capacity_factor=0.7),
        dict(shared_demand=0.4, fixed_experts=2, block_choice="prefix"),
        dict(hidden_dropout=0.3),
    ],
)
def test_layer(sizes):
    layer = make_layer(**sizes)
    check_layer(layer, random(3, 5, layer.config.model_dim))


def test_layer_with_one_expert_for_all_and_others_unused():
    layer = make_layer()
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[2] = 5.0
    check_layer(layer, torch.rand(9, 32, device=DEVICE) + 0.5)


def test_layer_on_no_token_and_on_strides():
    layer = make_layer()
    check_layer(layer, random(0, 32))
    check_layer(layer, random(2, 0, 32))
    check_layer(layer, random(5, 64)[:, ::2])
    check_layer(layer, random(32, 5).T)


def test_layer_nan_token_stays_alone():
    layer = make_layer()
    x = random(6, 32)
    with use_kernels("triton"):
        clean = layer(x)
        x[2, 3] = float("nan")
        dirty = x.clone().requires_grad_()
        y = layer(dirty)
        y.sum().backward()
    keep = [0, 1, 3, 4, 5]
    assert y[2].isnan().all() and (y[keep] - clean[keep]).abs().max() < 1e-5
    assert dirty.grad[keep].isfinite().all()


def test_layer_token_mask():
    layer = make_layer()
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0]], device=DEVICE)
    x = random(3, 4, 32)
    check_layer(layer, x, mask)
    x[mask == 0] = float("nan")
    with use_kernels("triton"):
        y = layer(x, mask)
        y.sum().backward()
    assert (y[mask == 0] == 0).all() and y.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_selector_refuses_what_triton_cannot_run():
    experts = bank(1, 24, 48, 2)
    x = random(3, 24)
    arguments = (x, x.new_ones(3, 1), x.new_ones(3, 2, dtype=torch.bool), experts.weights())
    with use_kernels("triton"), pytest.raises(UserError, match="24"):
        block_ffn(*arguments)
    torch.testing.assert_close(block_ffn(*arguments), reference_block_ffn(*arguments))


def test_float32_products_keep_float32():
    """Neither pass may fall to plain TF32, 2^-11, unless torch's switch asks for it."""
    torch.manual_seed(5)
    x, experts = random(64, 64), bank(1, 64, 64, 2, "identity", bias=False)
    y = triton_block_ffn(x, x.new_ones(64, 1), x.new_ones(64, 2, dtype=torch.bool), experts.weights())
    want = F.linear(x.double(), experts.keys[0].double()) @ experts.values[0].double()
    assert error(y, want) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dropout", [False, True])
def test_trial_passes(dtype, dropout, recwarn):
    x = random(4, 48, dtype=dtype)
    weights = bank(2, 48, 64, 2, dtype=dtype).weights()
    assert self_test.ffn_works(x, weights, dropout) and self_test.routing_works(x, 5, 4)
    assert not [w for w in recwarn if "Triton is not used" in str(w.message)]


@pytest.mark.parametrize("fault", ["wrong gradient", "NaN", "crash"])
def test_trial_finds_a_faulty_kernel(fault, monkeypatch):
    """Then plain torch is used, with a warning, instead of a wrong or broken kernel."""

    def faulty(x, gates, blocks, weights, *rest):
        if fault == "crash":
            raise RuntimeError("out of resource: shared memory")
        y = triton_block_ffn(x, gates, blocks, weights)
        return y * float("nan") if fault == "NaN" else y.detach() + 1.1 * (y - y.detach())

    monkeypatch.setattr(triton_ffn, "triton_block_ffn", faulty)
    self_test._ffn_works.cache_clear()
    with pytest.warns(UserWarning, match="Triton is not used for block-sparse experts"):
        assert not self_test.ffn_works(random(4, 48), bank(2, 48, 64, 2).weights())
    self_test._ffn_works.cache_clear()


def test_trial_finds_wrong_counts(monkeypatch):
    """Experts would compute the wrong rows."""

    def faulty(*arguments):
        offsets = scan_groups(*arguments)
        return replace(offsets, totals=offsets.totals.roll(1, 0))

    monkeypatch.setattr(triton_routing, "scan_groups", faulty)
    self_test._routing_works.cache_clear()
    with pytest.warns(UserWarning, match="Triton is not used for routing"):
        assert not self_test.routing_works(random(4, 16), 4, 3)
    self_test._routing_works.cache_clear()
