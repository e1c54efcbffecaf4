"""The layer against a slow float64 reference of its own, forward and backward, and every edge case of the design."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.equations import decide, layer_output
from tests.support.kernels_agree import assert_kernels_agree
from unifmoe_dist import Routing, UniFMoEConfig, UniFMoELayer
from unifmoe_dist.errors import UserError
from unifmoe_dist.kernels import use_kernels
from unifmoe_dist.routing import route
from unifmoe_dist.routing_policies import FixedCount, FixedDemand, RouterPolicies, prefix_order

ABLATIONS = st.sampled_from(
    [
        dict(),
        dict(shared_demand=0.4),
        dict(fixed_experts=2),
        dict(block_choice="prefix"),
        dict(shared_demand=0.01, fixed_experts=1),
        dict(shared_demand=0.99, fixed_experts=3, block_choice="prefix"),
    ]
)


def make_layer(
    d=16, hidden=24, experts=3, blocks=4, activation="gelu", bias=True, seed=0, spread=1.0, **choices
) -> UniFMoELayer:
    """A layer whose experts differ, so that mixing them up shows."""
    torch.manual_seed(seed)
    layer = UniFMoELayer(UniFMoEConfig(d, hidden, experts, blocks, activation, bias, **choices))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        layer.router.weight.mul_(spread)
    return layer


def yardstick(layer: UniFMoELayer, x: torch.Tensor, grad: torch.Tensor, activation=F.gelu):
    """Output, input gradient and gradients by name, in float64, from the equations."""
    x64 = x.detach().double().requires_grad_()
    router = layer.router.weight.detach().double().requires_grad_()
    names = ["shared", *range(layer.config.num_experts)]
    ffns = [
        tuple(None if t is None else t.double().requires_grad_() for t in layer.ffn_weights(name)) for name in names
    ]
    ablations = {name: getattr(layer.config, name) for name in ("shared_demand", "fixed_experts", "block_choice")}
    y = layer_output(x64, router, ffns, layer.config.num_blocks, activation, **ablations)
    leaves = [x64, router, *(t for ffn in ffns for t in ffn if t is not None)]
    grads = torch.autograd.grad(y, leaves, grad.double(), allow_unused=True, materialize_grads=True)
    width = len([t for t in ffns[0] if t is not None])
    per_expert = [grads[2 + i * width : 2 + (i + 1) * width] for i in range(len(names))]
    return y.detach(), grads[0], grads[1], per_expert


def layer_grads(layer: UniFMoELayer) -> list[list[torch.Tensor]]:
    """Gradients per expert in nn.Linear layouts, the shared expert first."""
    result = []
    for bank in (layer.shared, layer.experts):
        for e in range(bank.keys.shape[0]):
            tensors = [bank.keys.grad[e]]
            if bank.key_bias is not None:
                tensors.append(bank.by_expert(bank.key_bias.grad)[e])
            tensors.append(bank.values.grad[e].T)
            if bank.value_bias is not None:
                tensors.append(bank.by_expert(bank.value_bias.grad)[e])
            result.append(tensors)
    return result


def assert_matches(layer: UniFMoELayer, x: torch.Tensor, activation=F.gelu, tol=2e-5) -> None:
    x = x.detach().requires_grad_()
    grad = torch.randn_like(x)
    y = layer(x)
    assert y.shape == x.shape and y.dtype == x.dtype
    y.backward(grad)
    want_y, want_x, want_router, want_experts = yardstick(layer, x, grad, activation)
    torch.testing.assert_close(y.detach().double(), want_y, rtol=tol, atol=tol)
    torch.testing.assert_close(x.grad.double(), want_x, rtol=tol, atol=tol)
    torch.testing.assert_close(layer.router.weight.grad.double(), want_router, rtol=tol, atol=10 * tol)
    for got, want in zip(layer_grads(layer), want_experts, strict=True):
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g.double(), w, rtol=tol, atol=10 * tol)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 9),
    d=st.integers(9, 20),
    block=st.integers(1, 4),
    blocks=st.integers(2, 9),
    experts=st.integers(1, 8),
    bias=st.booleans(),
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
    ablation=ABLATIONS,
)
def test_matches_the_equations(n, d, block, blocks, experts, bias, seed, spread, ablation):
    experts = max(experts, ablation.get("fixed_experts", 1))
    layer = make_layer(d, block * blocks, experts, blocks, bias=bias, seed=seed, spread=spread, **ablation)
    assert_matches(layer, torch.randn(n, d))


@pytest.mark.parametrize(
    "name,function",
    [
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
        ("relu", F.relu),
        ("silu", F.silu),
        ("quick_gelu", lambda x: x * torch.sigmoid(1.702 * x)),
        ("relu_squared", lambda x: F.relu(x) ** 2),
        ("tanh", torch.tanh),
        ("identity", lambda x: x),
    ],
)
def test_activations(name, function):
    assert_matches(make_layer(activation=name), torch.randn(7, 16), function)


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


@pytest.mark.parametrize("choices", [dict(shared_demand=0.4), dict(fixed_experts=2), dict(block_choice="prefix")])
def test_ablated_layer_on_edges(choices):
    """No token, a NaN token, and a token mask; with fixed alpha the shared column gets a gradient of 0, not None."""
    layer = make_layer(**choices)
    x = torch.randn(6, 16)
    clean = layer(x)
    x[2, 3] = float("nan")
    y = layer(x)
    others = [0, 1, 3, 4, 5]
    assert y[2].isnan().all() and torch.allclose(y[others], clean[others])
    mask = torch.tensor([True, True, False, True, True, True])
    assert torch.allclose(layer(x, mask)[mask], clean[mask])
    layer(torch.randn(0, 16)).sum().backward()
    assert not layer.router.weight.grad.any()
    layer(torch.randn(5, 16)).square().sum().backward()
    assert bool(layer.router.weight.grad[0].any()) is ("shared_demand" not in choices)
    assert layer.router.weight.grad[1:].any()


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


def test_bias_weight_equals_coefficient_mass():
    layer = make_layer(experts=4, seed=3)
    with torch.no_grad():
        for bank in (layer.shared, layer.experts):
            bank.values.zero_()
            bank.value_bias.fill_(1.0)
    x = torch.randn(20, 16)
    r = layer.route(x)
    torch.testing.assert_close(layer(x), (r.shared_demand + r.gates.sum(-1))[:, None].expand(20, 16))


def test_diversity_loss_value_and_gradient_at_orthonormality():
    layer = make_layer()
    gram = layer.router.weight @ layer.router.weight.T
    torch.testing.assert_close(layer.diversity_loss(), (gram - torch.eye(4)).square().sum().sqrt())
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(4, 16))
    layer.diversity_loss().backward()
    assert (layer.router.weight.grad == 0).all()
    fresh = UniFMoELayer(UniFMoEConfig(16, 24, 3, 4))
    assert fresh.diversity_loss() < 1e-5


def test_only_alpha_reaches_the_shared_column_and_only_gates_the_rest():
    layer = make_layer()
    x = torch.randn(5, 16)
    r = layer.route(x)
    (grad,) = torch.autograd.grad(r.shared_demand.sum(), layer.router.weight, retain_graph=True)
    assert grad[0].abs().sum() > 0 and (grad[1:] == 0).all()
    (grad,) = torch.autograd.grad(r.gates.sum(), layer.router.weight)
    assert (grad[0] == 0).all()


def test_empty_input():
    layer = make_layer()
    for shape in [(0, 16), (0, 3, 16), (2, 0, 16)]:
        x = torch.randn(shape, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert y.shape == x.shape and x.grad.shape == x.shape
    assert all((p.grad == 0).all() for p in layer.parameters())


def test_non_contiguous_input():
    layer = make_layer()
    wide = torch.randn(16, 7)
    torch.testing.assert_close(layer(wide.T), layer(wide.T.contiguous()))
    assert_matches(layer, torch.randn(5, 32)[:, ::2])


def test_one_expert():
    assert_matches(make_layer(experts=1), torch.randn(6, 16))


def test_expert_nobody_and_everybody_chose():
    layer = make_layer(experts=4)
    x = torch.rand(9, 16) + 0.5
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[3] = 5.0
    r = layer.route(x)
    assert (r.gates[:, 2] != 0).all() and (r.gates[:, :2] == 0).all()
    assert_matches(layer, x)


def test_nan_token_stays_alone():
    layer = make_layer()
    x = torch.randn(6, 16)
    clean = layer(x)
    x[2, 3] = float("nan")
    dirty = x.clone().requires_grad_()
    y = layer(dirty)
    assert y[2].isnan().all()
    keep = [0, 1, 3, 4, 5]
    torch.testing.assert_close(y[keep], clean[keep])
    y.sum().backward()
    assert dirty.grad[keep].isfinite().all()


def test_token_mask_costs_nothing_and_counts_nowhere():
    layer = make_layer()
    x = torch.randn(2, 4, 16, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    y = layer(x, token_mask=mask)
    assert (y[mask == 0] == 0).all()
    torch.testing.assert_close(y[mask == 1], layer(x.detach()[mask == 1]))
    assert layer.usage.totals[0] == 5 + 5
    y.sum().backward()
    assert (x.grad[mask == 0] == 0).all() and (x.grad[mask == 1] != 0).any(-1).all()
    with pytest.raises(UserError, match="token_mask"):
        layer(x, token_mask=mask[:, :2])


def test_usage_can_be_taken_back():
    layer = make_layer()
    empty = layer.usage.snapshot()
    with torch.inference_mode():
        layer(torch.randn(3, 16))
    once = layer.usage.snapshot()
    layer(torch.randn(4, 16))
    assert layer.usage.totals[0] == 7
    layer.usage.restore(once)
    assert torch.equal(layer.usage.totals, once) and once[0] == 3
    layer.usage.restore(empty)
    assert not layer.usage.totals.any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_pass_that_the_backward_pass_repeats_counts_once(reentrant):
    layer, x = make_layer(), torch.randn(5, 16, requires_grad=True)
    once = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
    once.square().sum().backward()
    assert layer.usage.totals[0] == 5
    twice = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
    torch.autograd.grad(twice.sum(), x) if not reentrant else twice.sum().backward()
    assert layer.usage.totals[0] == 10


@torch.no_grad()
def test_tracing_counts_nothing():
    """Before the first real pass it would leave a tensor without values, after it count what never was."""
    layer, x = make_layer(), torch.randn(5, 16)
    with use_kernels("reference"):
        torch.export.export(layer, (x,), strict=False)
        assert layer.usage.totals is None
        layer(x)
        torch.export.export(layer, (x,), strict=False)
    assert layer.usage.totals[0] == 5 and type(layer.usage.totals) is torch.Tensor


@pytest.mark.parametrize("called_before", [False, True])
def test_transforms_of_torch_func_give_the_gradients_and_count_nothing(called_before):
    layer, x = make_layer(), torch.randn(5, 16)
    if called_before:
        layer(x)
    weights = dict(layer.named_parameters())
    found = torch.func.grad(lambda w: torch.func.functional_call(layer, w, (x,)).square().sum())(weights)
    each = torch.func.vmap(layer)(torch.stack([x, 2 * x]))
    assert torch._C._functorch.maybe_get_level(layer.usage.totals if called_before else x) == -1
    assert called_before or layer.usage.totals is None
    layer(x).square().sum().backward()
    assert layer.usage.totals[0] == 5 * (1 + called_before)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(each, torch.stack([layer(x), layer(2 * x)]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype,tol", [(torch.bfloat16, 5e-2), (torch.float16, 1e-2)])
def test_half_precision(dtype, tol):
    layer = make_layer(d=32, hidden=64, blocks=8).to(dtype)
    x = torch.randn(12, 32, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)
    y = layer(x)
    y.backward(grad)
    want_y, want_x, *_ = yardstick(layer, x, grad)
    assert y.dtype == x.grad.dtype == dtype
    scale = want_y.abs().max()
    assert (y.double() - want_y).abs().max() < tol * scale
    assert (x.grad.double() - want_x).abs().max() < tol * want_x.abs().max()


@pytest.mark.parametrize("call", [UniFMoELayer.forward, UniFMoELayer.route])
@pytest.mark.parametrize(
    "x", [torch.ones(3, 32).long(), torch.ones(3, 32).bool(), torch.ones(3, 32) * 1j, [[1.0] * 32]]
)
def test_what_is_no_floating_point_tensor_is_one_sentence(call, x):
    with pytest.raises(UserError, match=r"input is a .*, but the layer takes tokens as a floating-point tensor"):
        call(make_layer(d=32, hidden=64, blocks=8), x)


def test_autocast_keeps_the_routing_and_the_dtype():
    layer = make_layer()
    x = torch.randn(8, 16)
    plain = layer.route(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = layer.route(x)
        y = layer(x)
    assert y.dtype == torch.float32 and torch.equal(plain.gates, inside.gates)
    torch.testing.assert_close(y, layer(x), rtol=0.1, atol=0.1)


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(0, 20),
    e=st.integers(1, 5),
    seed=st.integers(0, 1000),
    bias=st.booleans(),
    kept_ffns=st.sampled_from([0, 3]),
    chunk_rows=st.sampled_from([0, 9, 8192]),
)
def test_grouped_kernel_equals_reference_kernel(n, e, seed, bias, kept_ffns, chunk_rows):
    """Also for masks and gates that routing would never make: no block at all, no expert at all."""
    torch.manual_seed(seed)
    layer = make_layer(d=8, hidden=12, experts=e, blocks=3, bias=bias, seed=seed).double()
    x = torch.randn(n, 8, dtype=torch.float64, requires_grad=True)
    gates = (torch.rand(n, e) * (torch.rand(n, e) > 0.5)).double().requires_grad_()
    blocks = torch.rand(n, 3) > 0.5
    grad = torch.randn(n, 8, dtype=torch.float64)
    assert_kernels_agree(x, gates, blocks, layer.experts, grad, kept_ffns, chunk_rows)


def test_only_selected_blocks_are_computed():
    """Poisoned weights of a block that no token needs must not reach the output."""
    layer = make_layer(blocks=4)
    x = torch.randn(1, 16)
    shared = layer.route(x).shared_blocks[0]
    with torch.no_grad():
        for b in range(4):
            bank = layer.experts if shared[b] else layer.shared
            bank.values[:, b * 6 : (b + 1) * 6] = float("nan")
    assert layer(x).isfinite().all()


def test_load_and_read_back():
    layer = make_layer()
    up, ub, down, db = torch.randn(24, 16), torch.randn(24), torch.randn(16, 24), torch.randn(16)
    for expert in ("shared", 0, 2):
        layer.load_ffn(expert, up, ub, down, db)
        for got, want in zip(layer.ffn_weights(expert), (up, ub, down, db), strict=True):
            assert torch.equal(got, want)
    with pytest.raises(UserError, match="3"):
        layer.load_ffn(3, up, ub, down, db)
    with pytest.raises(UserError, match=r"\(24, 16\)"):
        layer.load_ffn(0, up.T, ub, down, db)


def test_all_experts_start_as_copies_and_router_orthonormal():
    layer = UniFMoELayer(UniFMoEConfig(16, 24, 3, 4))
    shared = layer.ffn_weights("shared")
    for expert in range(3):
        assert all(torch.equal(a, b) for a, b in zip(shared, layer.ffn_weights(expert), strict=True))
    torch.testing.assert_close(layer.router.weight @ layer.router.weight.T, torch.eye(4), atol=1e-5, rtol=0)


def test_deepcopy_and_state_dict():
    layer = make_layer()
    x = torch.randn(4, 16)
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x), layer(x))
    fresh = make_layer(seed=9)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), layer(x))


@pytest.mark.parametrize(
    "kwargs,words",
    [
        (dict(hidden_dim=30, num_blocks=4), ["30", "4"]),
        (dict(num_blocks=1), ["1", "num_blocks"]),
        (dict(num_experts=0), ["num_experts"]),
        (dict(activation="swish9"), ["swish9", "gelu"]),
        (dict(num_experts=16), ["16", "15"]),
        (dict(hidden_dim=2.5), ["hidden_dim", "2.5"]),
        (dict(shared_demand=0), ["shared_demand", "0"]),
        (dict(shared_demand=1.0), ["shared_demand", "1.0"]),
        (dict(shared_demand=float("nan")), ["shared_demand"]),
        (dict(shared_demand=True), ["shared_demand", "True"]),
        (dict(fixed_experts=0), ["fixed_experts", "0"]),
        (dict(fixed_experts=4), ["fixed_experts", "4", "3"]),
        (dict(fixed_experts=2.0), ["fixed_experts"]),
        (dict(block_choice="random"), ["block_choice", "random"]),
    ],
)
def test_config_errors(kwargs, words):
    with pytest.raises(UserError) as error:
        UniFMoEConfig(**{**dict(model_dim=16, hidden_dim=24, num_experts=3, num_blocks=4), **kwargs})
    assert all(word in str(error.value) for word in words)


def test_wrong_input_and_dispatcher():
    layer = make_layer()
    with pytest.raises(UserError, match="16"):
        layer(torch.randn(3, 8))
    with pytest.raises(UserError, match="carrier"):
        UniFMoELayer(UniFMoEConfig(16, 24, 3, 4), dispatcher="carrier")
