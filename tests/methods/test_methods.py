"""The other MoE layers: each against its own equations, its defining property, and the machinery that they share."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.gates import layer_output
from tests.support.methods import CLOSE, METHODS, SHAPE, applied, make
from unifmoe_dist.config import ModelConfig, ParallelConfig, TrainConfig
from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.balanced_kmeans import balanced_assignment, balanced_kmeans
from unifmoe_dist.methods.noisy_top_k import load_importance_loss
from unifmoe_dist.methods.topk import balance_loss
from unifmoe_dist.upcycling import upcycle
from unifmoe_dist.upcycling.convert import build_layer
from unifmoe_dist.usage import UsageSummary

# -- equations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training,gated", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("method", METHODS)
def test_output_and_gradients_equal_the_equations(method, training, gated):
    layer = make(method, gated=gated).train(training)
    if hasattr(layer, "gate_noise"):
        layer.gate_noise = 0.0
    x = torch.randn(9, 12, requires_grad=True)
    direction = torch.randn(9, 12)
    y = layer(x)
    (y * direction).sum().backward()

    p = {n: t.detach().double().requires_grad_(t.requires_grad) for n, t in layer.named_parameters()}
    x64 = x.detach().double().requires_grad_()
    active = layer.active.nonzero().flatten().tolist() if hasattr(layer, "active") else []
    want, used = layer_output(method, x64, p, top_k=2, active=active, training=training, tau=0.6)
    (want * direction.double()).sum().backward()

    torch.testing.assert_close(y.double(), want, **CLOSE)
    torch.testing.assert_close(x.grad.double(), x64.grad, **CLOSE)
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad:
            got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            expected = torch.zeros_like(p[name]) if p[name].grad is None else p[name].grad
            torch.testing.assert_close(got.double(), expected, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")
    layer.eval().usage.reset()
    assert [row.nonzero().flatten().tolist() for row in layer.train(training).route(x).gates] == used


@pytest.mark.parametrize("method", METHODS)
def test_usage_counts_blocks_of_the_dense_ffn_and_no_masked_token(method):
    layer = make(method).eval()
    x, mask = torch.randn(2, 5, 12), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]).bool()
    y = layer(x, token_mask=mask)
    assert (y[~mask] == 0).all() and torch.allclose(y[mask], layer(x[mask]), atol=1e-6)
    count = layer.route(x[mask]).expert_count.float()
    totals = layer.usage.totals / 2  # both calls saw the same tokens
    usage = UsageSummary.from_totals(totals, layer.config.num_experts)
    assert usage.tokens == 5 and usage.expert_count == pytest.approx(float(count.mean()))
    assert usage.block_compute == pytest.approx(usage.expert_count * 6 / (4 if "emoe" in method else 1))
    assert sum(usage.expert_load) == pytest.approx(usage.expert_count)
    assert usage.shared_demand == 0 and usage.block_load == [0] * 6 and usage.dropped == 0


@pytest.mark.parametrize("method", METHODS)
def test_no_tokens_and_a_nan_token(method):
    layer = make(method).train()
    x = torch.randn(5, 12)
    x[2] = float("nan")
    y = layer(x)
    assert y[2].isnan().all() and y[[0, 1, 3, 4]].isfinite().all()
    empty = torch.zeros(0, 12, requires_grad=True)
    (layer(empty).sum() + layer.auxiliary_loss()).backward()
    assert empty.grad.shape == (0, 12) and layer.auxiliary_loss().isfinite()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)
    assert copy.deepcopy(layer)(x[:1]).shape == (1, 12)  # though the last loss is part of a graph


# -- auxiliary losses and properties ----------------------------------------------------------------------------------


def test_balance_loss_is_least_when_even():
    even, skewed = torch.eye(4).repeat(3, 1), torch.eye(4)[:1].repeat(12, 1)
    assert float(balance_loss(even)) == pytest.approx(1) and float(balance_loss(skewed)) == pytest.approx(4)
    layer = make("topk").train()
    layer(torch.randn(7, 12))
    layer.auxiliary_loss().backward()
    assert layer.router.weight.grad.abs().sum() > 0
    layer.eval()(torch.randn(7, 12))
    assert float(layer.auxiliary_loss()) == 0


def test_importance_and_load_loss_by_hand():
    logits = torch.tensor([[1.0, 0.0], [0.5, 0.5], [2.0, 0.0]], dtype=torch.float64)
    weakest = torch.tensor([[1.0], [0.5], [2.0]], dtype=torch.float64)
    importance = [0.7310585786, 0.5, 0.8807970780]
    importance = np.array([sum(importance), 3 - sum(importance)])
    phi = {0.0: 0.5, -2.0: 0.0227501319, -4.0: 0.0000316712}  # of (logit - weakest) / 0.5
    load = np.array([3 * phi[0.0], phi[-2.0] + phi[0.0] + phi[-4.0]])
    want = sum(v.var(ddof=1) / v.mean() ** 2 for v in (importance, load)) / 2
    assert float(load_importance_loss(logits, weakest, 0.5, "shazeer")) == pytest.approx(want, rel=1e-6)


def test_gmoe_does_not_feel_a_tokens_length():
    x = torch.randn(6, 12)
    layer = make("gmoe").eval()
    with torch.no_grad():
        layer.router.projection.bias.zero_()
    torch.testing.assert_close(layer.route(x).gates, layer.route(7 * x).gates)
    plain = make("topk").eval()
    assert not torch.allclose(plain.route(x).gates, plain.route(7 * x).gates, atol=1e-2)
    layer.train()(x)
    assert layer.route(x).gates.sum(-1).allclose(torch.ones(6)) and float(layer.auxiliary_loss()) > 0


def dense_ffn():
    torch.manual_seed(3)
    return torch.nn.Linear(12, 24), torch.nn.Linear(24, 12), torch.nn.Linear(12, 24)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("method", ["emoe", "emoe_learn"])
def test_emoe_splits_the_dense_ffn(method, gated):
    """By its keys, which are the gate's where there is one."""
    up, down, gate = dense_ffn()
    parts = (up, down, gate) if gated else (up, down)
    layer = build_layer(method, {**SHAPE, "gated": gated}, dict(num_experts=4, top_k=4), None, "auto").eval()
    layer.load_dense(*(t for part in parts for t in (part.weight, part.bias)))
    keys, clustered = (layer.experts.gate_keys, gate) if gated else (layer.experts.keys, up)
    assert keys.shape == (4, 6, 12)
    rows = [int((clustered.weight == key).all(-1).nonzero()) for key in keys.flatten(0, 1)]
    assert sorted(rows) == list(range(24))
    torch.testing.assert_close(layer.router.weight, keys.detach().mean(1))
    x = torch.randn(5, 12)
    want = down(F.gelu(gate(x)) * up(x) if gated else F.gelu(up(x)))
    if method == "emoe":
        torch.testing.assert_close(layer(x), want, rtol=1e-5, atol=1e-6)
    with torch.no_grad():  # even scores: a quarter of every expert
        layer.router.weight.zero_()
    scale = 1.0 if method == "emoe" else 0.25
    torch.testing.assert_close(layer(x), scale * want, rtol=1e-5, atol=1e-6)


def test_the_split_finds_planted_modules():
    generator = np.random.default_rng(0)
    centres = np.eye(4, 12)
    module = np.tile(np.arange(4), 6)
    keys = centres[module] + 0.05 * generator.standard_normal((24, 12))
    groups = balanced_kmeans(keys, 4)
    assert sorted(module[group].tolist() for group in groups) == [[m] * 6 for m in range(4)]


@pytest.mark.parametrize("points,clusters", [(12, 3), (40, 5), (9, 9), (6, 1)])
def test_balanced_assignment_is_the_cheapest(points, clusters):
    from scipy.optimize import linear_sum_assignment

    cost = np.random.default_rng(points).standard_normal((points, clusters))
    cost[:, 0] -= 2  # everyone prefers one cluster
    labels = balanced_assignment(cost)
    assert (np.bincount(labels, minlength=clusters) == points // clusters).all()
    rows, columns = linear_sum_assignment(np.repeat(cost, points // clusters, axis=1))
    best = np.repeat(cost, points // clusters, axis=1)[rows, columns].sum()
    assert cost[np.arange(points), labels].sum() == pytest.approx(best)


def test_emoe_gate_follows_the_keys():
    layer = make("emoe")
    with torch.no_grad():
        layer.experts.keys.add_(1.0)
    assert layer.after_step(applied()) == []
    torch.testing.assert_close(layer.router.weight, layer.experts.keys.mean(1))
    assert not layer.router.weight.requires_grad and make("emoe_learn").router.weight.requires_grad


@pytest.mark.parametrize(
    "method,options,millions",
    [
        ("emoe", dict(num_experts=24, top_k=4), 20.70),
        ("emoe_learn", dict(num_experts=24), 20.70),
        ("gmoe", dict(num_experts=6), 32.12),
        ("dynmoe", dict(num_experts=6, max_experts=8), 36.45),
    ],
)
def test_parameters_of_deit_small_as_in_the_papers_cost_table(method, options, millions):
    import timm

    with torch.device("meta"):
        model = timm.create_model("deit_small_patch16_224", num_classes=5)
    upcycle(model, [8, 10], method=method, **options)
    assert round(sum(p.numel() for p in model.parameters()) / 2**20, 2) == millions


def test_statistics_stay_float32():
    layer = make("dynmoe").to(torch.bfloat16)
    assert layer.count.dtype == layer.lost.dtype == torch.float32 and layer.router.weight.dtype == torch.bfloat16
    assert layer(torch.randn(3, 12, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(moe="topk", top_k=7), "top_k 7.*num_experts 6"),
        (dict(moe="gmoe", top_k=0), "top_k 0"),
        (dict(moe="emoe", capacity_factor=1.5), "capacity_factor 1.5"),
        (dict(moe="topk", shared_demand=0.4), "shared_demand 0.4 .*ablation.*topk"),
        (dict(moe="gmoe", fixed_experts=2), "fixed_experts 2 .*ablation.*gmoe"),
        (dict(moe="mass", block_choice="prefix"), "block_choice prefix .*ablation.*mass"),
        (dict(moe="dynmoe", max_experts=5), "max_experts 5.*num_experts 6"),
        (dict(moe="mass", mass_threshold=1.5), "mass_threshold"),
        (dict(moe="mass", max_experts=7), "max_experts 7 is not divisible"),
        (dict(moe="topk", num_experts=5), "num_experts 5 is not divisible"),
        (dict(moe="gmoe", layers=[]), "layers is empty"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(UserError, match=message):
        TrainConfig(model=ModelConfig(**options), parallel=ParallelConfig(expert_parallel_size=2)).validate(2)


def test_layers_that_do_not_fit():
    with pytest.raises(UserError, match="24.*5"):
        build_layer("emoe", SHAPE, dict(num_experts=5), None, "auto")
    with pytest.raises(UserError, match="switch.*topk"):
        upcycle(torch.nn.Linear(1, 1), [0], method="switch")
    with pytest.raises(UserError, match="0 experts.*6"):
        build_layer("dynmoe", SHAPE, dict(num_experts=0, max_experts=6), None, "auto")
    with pytest.raises(UserError, match="expert 'shared' does not exist; use a whole number from 0 to 3"):
        make("topk").ffn_weights("shared")


@pytest.mark.parametrize("gated", [False, True])
def test_a_wider_ffn_starts_as_the_dense_one_and_uses_every_channel(gated):
    torch.manual_seed(3)
    options = dict(num_experts=3, num_blocks=6)
    layer = build_layer("wide", {**SHAPE, "gated": gated}, options, None, "auto")
    parts = dense_ffn() if gated else dense_ffn()[:2]
    layer.load_dense(*(t for part in parts for t in (part.weight, part.bias)))
    up, down, gate = (*parts, None)[:3]
    x = torch.randn(5, 12)
    y = layer(x)
    torch.testing.assert_close(y, down(F.gelu(gate(x)) * up(x) if gate else F.gelu(up(x))), rtol=1e-5, atol=1e-6)
    y.square().sum().backward()
    assert layer.experts.values.shape == (3, 12, 12) and (layer.experts.values.grad.abs().sum((1, 2)) > 0).all()
    assert UsageSummary.from_totals(layer.usage.totals, 3).block_compute == 9  # 1.5 FFNs of 6 blocks
    with pytest.raises(UserError, match="num_experts 1 at least 2"):
        build_layer("wide", SHAPE, dict(num_experts=1), None, "auto")
