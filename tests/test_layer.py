"""The layer against a slow float64 reference of its own, forward and backward, and every edge case of the design."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.equations import layer_output
from tests.support.kernels_agree import assert_kernels_agree
from tests.support.layers import ABLATIONS, make_layer
from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.errors import UserError


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
            if bank.gate_keys is not None:
                tensors.append(bank.gate_keys.grad[e])
            if bank.gate_key_bias is not None:
                tensors.append(bank.by_expert(bank.gate_key_bias.grad)[e])
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
    gated=st.booleans(),
)
def test_matches_the_equations(n, d, block, blocks, experts, bias, seed, spread, ablation, gated):
    experts = max(experts, ablation.get("fixed_experts", 1))
    layer = make_layer(d, block * blocks, experts, blocks, bias=bias, seed=seed, spread=spread, gated=gated, **ablation)
    assert_matches(layer, torch.randn(n, d))


@pytest.mark.parametrize("gated", [False, True])
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
def test_activations(name, function, gated):
    assert_matches(make_layer(activation=name, gated=gated), torch.randn(7, 16), function)


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


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype,tol", [(torch.bfloat16, 5e-2), (torch.float16, 1e-2)])
def test_half_precision(dtype, tol, gated):
    layer = make_layer(d=32, hidden=64, blocks=8, gated=gated).to(dtype)
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


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(0, 20),
    e=st.integers(1, 5),
    seed=st.integers(0, 1000),
    bias=st.booleans(),
    gated=st.booleans(),
    activation=st.sampled_from(["gelu", "silu", "relu"]),
    kept_ffns=st.sampled_from([0, 3]),
    chunk_rows=st.sampled_from([0, 9, 8192]),
)
def test_grouped_kernel_equals_reference_kernel(n, e, seed, bias, gated, activation, kept_ffns, chunk_rows):
    """Also for masks and gates that routing would never make: no block at all, no expert at all."""
    torch.manual_seed(seed)
    layer = make_layer(8, 12, e, 3, activation, bias, seed, gated=gated).double()
    x = torch.randn(n, 8, dtype=torch.float64, requires_grad=True)
    gates = (torch.rand(n, e) * (torch.rand(n, e) > 0.5)).double().requires_grad_()
    blocks = torch.rand(n, 3) > 0.5
    grad = torch.randn(n, 8, dtype=torch.float64)
    assert_kernels_agree(x, gates, blocks, layer.experts, grad, kept_ffns, chunk_rows)


@pytest.mark.parametrize("gated", [False, True])
def test_only_selected_blocks_are_computed(gated):
    """Poisoned weights of a block that no token needs must not reach the output."""
    layer = make_layer(blocks=4, gated=gated)
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


def test_load_and_read_back_gated():
    layer = make_layer(gated=True)
    given = [torch.randn(24, 16), torch.randn(24), torch.randn(16, 24), torch.randn(16), torch.randn(24, 16), None]
    layer.load_ffn(1, *given)
    got = layer.ffn_weights(1)
    assert all(torch.equal(a, b) for a, b in zip(got, [*given[:5], torch.zeros(24)], strict=True))
    assert not torch.equal(layer.ffn_weights(0)[4], given[4])
    layer.load_dense(*given)
    for expert in ("shared", 0, 1, 2):
        assert torch.equal(layer.ffn_weights(expert)[4], given[4])
    with pytest.raises(UserError, match=r"gate_weight has shape None, but this layer needs \(24, 16\)"):
        layer.load_ffn(0, *given[:4])
    with pytest.raises(UserError, match="gate_weight was given, but this layer was made with gated=False"):
        make_layer().load_ffn(0, *given)
    with pytest.raises(UserError, match="gate_bias was given, but this layer was made with bias=False"):
        make_layer(gated=True, bias=False).load_ffn(0, given[0], None, given[2], None, given[4], torch.ones(24))


def test_prototypes_of_a_gated_layer_are_those_of_its_gate():
    layer, x = make_layer(gated=True), torch.randn(5, 16)
    want = layer.shared.gate_keys[0].view(4, 6, 16).mean(1)
    torch.testing.assert_close(layer.shared.prototypes()[0], want)
    before = layer.route(x).shared_blocks
    with torch.no_grad():
        layer.shared.keys.normal_()
    assert torch.equal(layer.route(x).shared_blocks, before)


def test_plain_layers_are_as_they_were():
    """Neither parameters nor saved tensors tell of gates."""
    names = [
        "router.weight",
        *(f"{b}.{n}" for b in ("experts", "shared") for n in ("keys", "values", "key_bias", "value_bias")),
    ]
    layer = make_layer()
    assert sorted(dict(layer.named_parameters())) == sorted(names)
    assert set(layer.state_dict()) - {*names} == set(dict(layer.named_buffers()))
    gated = [name for name, _ in make_layer(gated=True).named_parameters()]
    assert sorted(set(gated) - {*names}) == sorted(
        f"{b}.{n}" for b in ("experts", "shared") for n in ("gate_keys", "gate_key_bias")
    )


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


def test_wrong_input_and_dispatcher():
    layer = make_layer()
    with pytest.raises(UserError, match="16"):
        layer(torch.randn(3, 8))
    with pytest.raises(UserError, match="carrier"):
        UniFMoELayer(UniFMoEConfig(16, 24, 3, 4), dispatcher="carrier")
