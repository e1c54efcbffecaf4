"""The other MoE layers: each against its own equations, its defining property, and the machinery that they share."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.support.gates import layer_output
from tests.support.jobs import run_job
from tests.support.ranks import run_ranks
from tests.support.sharded import EXCHANGES, held_here
from tests.train.test_faults import SMALL
from unifmoe_dist.config import ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_layer import AppliedStep
from unifmoe_dist.methods import MOE_LAYERS, LayerOptions, upcycle_baseline
from unifmoe_dist.methods.balanced_kmeans import balanced_assignment, balanced_kmeans
from unifmoe_dist.methods.mass import MASSConfig, MASSLayer, reaching_mass
from unifmoe_dist.methods.noisy_top_k import load_importance_loss
from unifmoe_dist.methods.topk import balance_loss
from unifmoe_dist.runtime.ranks import running_ranks
from unifmoe_dist.studies import training_plots
from unifmoe_dist.train import build, checkpoint, export
from unifmoe_dist.train.cli import load_train_config
from unifmoe_dist.train.trainer import Trainer
from unifmoe_dist.upcycling import moe_layers
from unifmoe_dist.usage import UsageSummary

METHODS = list(MOE_LAYERS)
SHAPE = dict(model_dim=12, hidden_dim=24, num_blocks=6, activation="gelu", bias=True)
OPTIONS = LayerOptions(num_experts=4, num_blocks=6, top_k=2, max_experts=6, mass_threshold=0.6)
CLOSE = dict(rtol=1e-4, atol=1e-5, equal_nan=True)


def make(method, options=OPTIONS, group=None, dispatcher="auto", seed=1):
    """A layer whose experts differ, so that mixing them up shows."""
    torch.manual_seed(seed)
    layer = MOE_LAYERS[method](SHAPE, options, group, dispatcher)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    if method == "emoe":
        layer._renew_gate()
    return layer


def applied(step=1, task_loss=lambda: 0.0):
    """A step of a job of one rank."""
    return AppliedStep(step, lambda t: t.detach().double().cpu(), task_loss)


# -- equations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_output_and_gradients_equal_the_equations(method, training):
    layer = make(method).train(training)
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
    return torch.nn.Linear(12, 24), torch.nn.Linear(24, 12)


@pytest.mark.parametrize("method", ["emoe", "emoe_learn"])
def test_emoe_splits_the_dense_ffn(method):
    up, down = dense_ffn()
    layer = MOE_LAYERS[method](SHAPE, LayerOptions(num_experts=4, top_k=4), None, "auto").eval()
    layer.load_dense(up.weight, up.bias, down.weight, down.bias)
    keys = layer.experts.keys.detach()
    assert keys.shape == (4, 6, 12)
    rows = [int((up.weight == key).all(-1).nonzero()) for key in keys.flatten(0, 1)]
    assert sorted(rows) == list(range(24))
    torch.testing.assert_close(layer.router.weight, keys.mean(1))
    x = torch.randn(5, 12)
    want = down(F.gelu(up(x)))
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
        ("emoe", LayerOptions(num_experts=24, top_k=4), 20.70),
        ("emoe_learn", LayerOptions(num_experts=24), 20.70),
        ("gmoe", LayerOptions(num_experts=6), 32.12),
        ("dynmoe", LayerOptions(num_experts=6, max_experts=8), 36.45),
    ],
)
def test_parameters_of_deit_small_as_in_the_papers_cost_table(method, options, millions):
    import timm

    with torch.device("meta"):
        model = timm.create_model("deit_small_patch16_224", num_classes=5)
    upcycle_baseline(model, method, [8, 10], options)
    assert round(sum(p.numel() for p in model.parameters()) / 2**20, 2) == millions


# -- DynMoE -----------------------------------------------------------------------------------------------------------


def test_dynmoe_chooses_how_many():
    layer = make("dynmoe").train()
    with torch.no_grad():
        layer.router.thresholds.add_(0.2)
    x = torch.randn(40, 12)
    count = layer.route(x).expert_count
    assert len(set(count.tolist())) > 2 and int(count.min()) == 0
    y = layer(x)
    assert (y[count == 0] == 0).all()
    y.square().sum().backward()
    used = layer.route(x).gates.any(0)
    assert (layer.router.thresholds.grad[used] != 0).all() and (layer.router.thresholds.grad[~used] == 0).all()
    gates = layer.eval().route(x).gates
    assert (gates != 0).sum(-1).min() == 1  # in evaluation every token has an expert
    lonely = gates[count == 0]
    assert (lonely.max(-1).values == 1).all() and (lonely.sum(-1) == 1).all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_dynmoe_gives_tokens_without_an_expert_nothing_in_a_recomputation_too(reentrant):
    layer, x = make("dynmoe").train(), torch.randn(40, 12, requires_grad=True)
    with torch.no_grad():
        layer.router.thresholds.add_(0.2)
    grads = []
    for call in (layer, lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)):
        layer.zero_grad()
        layer.count.zero_()
        (x_grad,) = torch.autograd.grad(call(x).square().sum(), x) if not reentrant else (x,)
        if reentrant:
            x.grad = None
            call(x).square().sum().backward()
            x_grad = x.grad
        grads.append([x_grad, layer.count.clone(), *(p.grad for p in layer.parameters() if reentrant)])
    assert (layer.route(x).expert_count == 0).any()
    for plain, checkpointed in zip(*grads, strict=True):
        torch.testing.assert_close(checkpointed, plain)


def test_dynmoe_adds_and_removes_experts():
    layer = make("dynmoe", LayerOptions(num_experts=3, max_experts=4, adapt_every=2)).train()
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(12)[:4])
        layer.router.thresholds.zero_()
    x = -torch.eye(12)[[5, 6]]  # orthogonal to all, and 0 is not above 0
    x = torch.cat([x, torch.eye(12)[[0, 0, 1]]])
    layer(x)
    assert layer.after_step(applied(1)) == [] and layer.active.tolist() == [True, True, True, False]
    layer.eval()(torch.eye(12)[2:3])  # evaluation counts for nothing
    changes = layer.train().after_step(applied(2))
    assert layer.active.tolist() == [True, True, True, False]  # expert 2 was not used, and its slot is taken again
    assert [(c.parameter is layer.router.weight, c.rows, c.forget) for c in changes] == [
        (True, [2], True),
        (False, [2], True),
    ]
    want = -(torch.eye(12)[5] + torch.eye(12)[6]) / 2**0.5
    torch.testing.assert_close(layer.router.weight[2], want)
    layer(x)
    assert layer.after_step(applied(4)) == [] and layer.active.sum() == 3  # all are used and no token is lost
    layer(torch.eye(12)[7:8])
    layer.after_step(applied(6))
    assert layer.active.all()  # no token used any expert: none is removed for that, and one is added
    torch.testing.assert_close(layer.router.weight[3], torch.eye(12)[7])


def test_dynmoe_diversity_is_over_the_experts_in_use_and_simplicity_over_all_slots():
    layer = make("dynmoe")
    with torch.no_grad():
        layer.router.weight.copy_(2 * torch.eye(12)[:6])
    assert float(layer.auxiliary_loss()) == pytest.approx(2)  # orthogonal, of length 2
    layer.auxiliary_loss().backward()
    grad = layer.router.weight.grad
    assert grad.isfinite().all()
    torch.testing.assert_close(grad, torch.eye(12)[:6] / 6)
    with torch.no_grad():
        layer.router.weight[1] = 2 * layer.router.weight[0]
        layer.router.weight[5] = layer.router.weight[4]  # neither is in use
    assert float(layer.auxiliary_loss()) == pytest.approx(2**0.5 + (5 * 2 + 4) / 6)


def test_statistics_stay_float32():
    layer = make("dynmoe").to(torch.bfloat16)
    assert layer.count.dtype == layer.lost.dtype == torch.float32 and layer.router.weight.dtype == torch.bfloat16
    assert layer(torch.randn(3, 12, dtype=torch.bfloat16)).dtype == torch.bfloat16


# -- MASS -------------------------------------------------------------------------------------------------------------


def test_mass_takes_the_smallest_prefix():
    layer = make("mass").eval()
    x = torch.randn(50, 12)
    decision = layer.route(x)
    assert len(set(decision.expert_count.tolist())) > 1
    for scores, gates in zip(decision.scores, decision.gates, strict=True):
        kept = scores[gates != 0]
        assert kept.sum() >= 0.6 and kept.sum() - kept.min() < 0.6 and kept.min() >= scores[gates == 0].max()
    assert (decision.scores[:, 4:] == 0).all() and decision.gates.sum(-1).allclose(torch.ones(50))
    assert reaching_mass(torch.tensor([[0.25, 0.25, 0.5]]), 0.5).tolist() == [[False, False, True]]
    assert reaching_mass(torch.tensor([[0.25, 0.25, 0.5]]), 0.75).tolist() == [[True, False, True]]


def small_mass(**options):
    torch.manual_seed(1)
    config = MASSConfig(**SHAPE, num_experts=4, initial_experts=2, mass_threshold=1.0, **options)
    return MASSLayer(config).train()


def test_mass_drift_by_hand():
    layer = small_mass(window=4, warmup=2)
    series = [1.0, 2.0, 4.0, 4.0, 9.0, 1.0]
    z = []
    for step, norm in enumerate(series):
        layer._note(torch.tensor([norm, 2 * norm, 0, 0]))
        seen = np.array(series[max(0, step - 3) : step + 1])
        z.append((norm - seen.mean()) / seen.std(ddof=1) if step >= 1 else 0.0)
        np.testing.assert_allclose(layer.drift[0], ([0.0] * 4 + z)[-4:], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(layer.drift[0], layer.drift[1])
    assert not layer.norms[2:].any() and not layer.drift[2:].any()
    tail = 1 - torch.distributions.Normal(0, 1).cdf(torch.tensor(sum(z[-4:]) / 2))
    for limit, found in ((float(tail) * 1.01, 0), (float(tail) * 0.99, None)):
        object.__setattr__(layer.config, "p_limit", limit)
        assert layer._drifting(torch.zeros(4)) == found
        assert layer._drifting(torch.full((4,), 0.5)) is None  # the gradient points along the weights


def train_step(layer, x, target, lr=0.1):
    layer.zero_grad()
    (layer(x) - target).square().sum().backward()
    with torch.no_grad():
        for p in layer.parameters():
            p -= lr * p.grad


def test_mass_splits_the_step_between_source_and_copy():
    layer = small_mass(window=2, warmup=1, p_limit=1.1, similarity_limit=1.1, expansion_steps=50, patience=1)
    x, target = torch.randn(8, 12), torch.randn(8, 12)
    for step in (1, 2):
        before, router = layer.experts.keys.detach().clone(), layer.router.weight.detach().clone()
        train_step(layer, x, target, lr=0.01)
        after, stepped = layer.experts.keys.detach().clone(), layer.router.weight.detach().clone()
        changes = layer.after_step(applied(step))
        assert bool(changes) == (step == 2)  # once the window is full
    assert layer.active.tolist() == [True, True, True, False] and layer.source.tolist() == [-1, -1, 0, -1]
    torch.testing.assert_close(layer.experts.keys[2], after[0])
    torch.testing.assert_close(layer.router.weight[2], stepped[0])
    for own, old, new in (
        (layer.experts.keys[0], before[0], after[0]),
        (layer.router.weight[:1], router[:1], stepped[:1]),
    ):
        along = own.detach() - old
        torch.testing.assert_close((along * old).sum(-1), ((new - old) * old).sum(-1), rtol=1e-3, atol=1e-6)
        cosine = F.cosine_similarity(along, old, dim=-1).abs()
        assert cosine.min() > 0.99 or along.norm() < 1e-6
    torch.testing.assert_close(layer.experts.keys[1], after[1])
    copies = {(id(c.parameter), *c.rows) for c in changes if c.forget}
    shares = {id(p): len(p) // 4 for p in layer.parameters()}  # rows of an expert: several of a bias
    assert copies == {(each, *range(2 * share, 3 * share)) for each, share in shares.items()}

    similarity = F.cosine_similarity(layer.router.weight[0], layer.router.weight[2], dim=0)
    assert float(layer.auxiliary_loss()) == pytest.approx(float(similarity) ** 2)
    difference = layer.experts.keys[0] - layer.experts.keys[2]
    train_step(layer, x, target)
    assert not torch.allclose(difference, layer.experts.keys[0] - layer.experts.keys[2])  # they part


def test_mass_takes_back_copies_that_do_not_help():
    layer = small_mass(window=2, warmup=0, p_limit=1.1, similarity_limit=1.1, expansion_steps=50, patience=1)
    x, target, history = torch.randn(8, 12), torch.randn(8, 12), []

    def no_loss_without():  # the loss is the same whether the copy is used or not
        history.append(int(layer.active.sum()))
        return 1.0

    for step in range(1, 20):
        train_step(layer, x, target, lr=0.001)
        layer.after_step(applied(step, no_loss_without))
        if layer.progress[2]:
            break
    assert history == [3, 2, 3, 2]  # tried twice, taken back twice; patience was 1
    assert layer.active.sum() == 2 and (layer.source == -1).all()
    late = small_mass(window=2, warmup=0, p_limit=1.1, similarity_limit=1.1, expansion_steps=1)
    for step in (1, 2, 3):
        train_step(late, x, target, lr=0.001)
        assert late.after_step(applied(step)) == []  # the window fills when the time is over


# -- ranks ------------------------------------------------------------------------------------------------------------


def shard(whole, method, dispatcher):
    layer = MOE_LAYERS[method](SHAPE, OPTIONS, dist.group.WORLD, dispatcher)
    own = layer.state_dict()
    layer.load_state_dict({n: own[n] if n.startswith("experts.") else t for n, t in whole.state_dict().items()})
    for expert in range(whole.config.num_experts):
        layer.load_ffn(expert, *whole.ffn_weights(expert))
    return layer


def sharded_equals_whole(rank, world, dispatcher):
    """Outputs, gradients and changes between steps, on uneven ranks and with none on one of them."""
    all_sum = lambda t: (t := t.detach().double(), dist.all_reduce(t))[0]  # noqa: E731
    for method in METHODS:
        whole = make(method)
        if method == "dynmoe":  # so that some tokens pass none
            with torch.no_grad():
                whole.router.thresholds.add_(0.3)
        layer = shard(whole, method, dispatcher)
        for each in (whole, layer):
            each.train().gate_noise = 0.0
        parts = [torch.randn(n, 12, generator=torch.Generator().manual_seed(n)) for n in (5, 9, 0, 2)[:world]]
        x, everything = parts[rank].clone().requires_grad_(), torch.cat(parts).requires_grad_()
        y, want = layer(x), whole(everything)
        y.square().sum().backward()
        want.square().sum().backward()
        sizes = [len(p) for p in parts]
        torch.testing.assert_close(y, want.split(sizes)[rank], **CLOSE)
        torch.testing.assert_close(x.grad, everything.grad.split(sizes)[rank], **CLOSE)
        for (name, got), expected in zip(layer.named_parameters(), whole.parameters(), strict=True):
            if not got.requires_grad:
                continue
            if name.startswith("experts."):
                torch.testing.assert_close(got.grad, held_here(expected.grad, layer), **CLOSE)
                continue
            grad = got.grad
            dist.all_reduce(grad)
            torch.testing.assert_close(grad, expected.grad, **CLOSE)
        with torch.no_grad():
            for each in (whole, layer):
                for p in each.parameters():
                    p -= 0.1 * (p.grad if p.grad is not None else 0)
        if method == "mass":  # the windows are full and every expert drifts
            for each in (whole, layer):
                each.norms.fill_(1.0)
                each.drift.fill_(1.0)
                each.seen.fill_(1000)
                object.__setattr__(each.config, "p_limit", 0.5)
                object.__setattr__(each.config, "similarity_limit", 1.1)
        changed = [(c.rows, c.forget) for c in whole.after_step(applied())]
        assert changed or method not in ("dynmoe", "mass")
        layer.after_step(AppliedStep(1, all_sum, lambda: 0.0))
        for name, tensor in layer.state_dict().items():
            expected = whole.state_dict()[name]
            expected = held_here(expected, layer) if name.startswith("experts.") else expected
            torch.testing.assert_close(tensor, expected, **CLOSE)
    return True


@pytest.mark.parametrize("dispatcher", EXCHANGES)
def test_sharded_equals_one_rank(dispatcher):
    assert all(run_ranks(2, sharded_equals_whole, dispatcher))


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_each_method_learns_a_toy_task(method):
    """Two kinds of tokens that want opposite outputs."""
    torch.manual_seed(0)
    layer = MOE_LAYERS[method](SHAPE, OPTIONS, None, "auto").train()
    optimizer = torch.optim.Adam([p for p in layer.parameters() if p.requires_grad], lr=0.01)
    kind = torch.arange(64) % 2
    x = torch.randn(64, 12) + 3 * torch.eye(12)[kind]
    target = torch.where(kind[:, None] == 0, x, -x)
    losses = []
    for step in range(1, 121):
        optimizer.zero_grad()
        task = (layer(x) - target).square().mean()
        (task + layer.auxiliary_weight * layer.auxiliary_loss()).backward()
        optimizer.step()
        layer.after_step(applied(step))
        losses.append(float(task))
    assert np.mean(losses[-5:]) < 0.3 * losses[0]


def small_config(folder, method, steps=3, optimizer="adamw", **parallel):
    options = dict(num_experts=4, num_blocks=8, layers=[1, 3])
    return TrainConfig(
        output=str(folder),
        steps=steps,
        eval_every=steps,
        log_every=1,
        baseline=False,
        progress=False,
        model=ModelConfig(moe=method, **options),
        optim=OptimConfig(name=optimizer, lr=1e-3, warmup_steps=0),
        parallel=ParallelConfig(**parallel),
    )


def run_all(rank, world, folder):
    """Every method on two ranks that share its experts, the summary of each."""
    training_plots.plot_run = lambda folder: []
    results = {}
    with running_ranks(2) as ranks:
        for method in METHODS:
            config = small_config(folder / method, method, expert_parallel_size=2)
            config.data.batch_size = 4
            config.validate(world)
            results[method] = Trainer(config, ranks, folder / method).fit()
        results["statistics"] = saved_between_decisions(folder / "between", ranks)
    return results


def saved_between_decisions(folder, ranks):
    """What DynMoE has counted on all ranks when a run is saved, and when it goes on."""
    config = small_config(folder, "dynmoe", expert_parallel_size=2)
    config.data.batch_size, config.model.adapt_every = 4, 100
    counted = []
    for config.resume in (False, True):
        trainer = Trainer(config, ranks, folder)
        if not config.resume:
            trainer.train_step()
            trainer._save(0.0, better=False)
        layers = trainer.layers.values()
        counted.append([ranks.all_sum(torch.cat([layer.count, layer.lost])) for layer in layers])
    return counted


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_ranks(2, run_all, folder, fresh=True)[0]


def test_dynmoe_goes_on_with_what_all_ranks_have_counted(runs):
    saved, resumed = runs[1]["statistics"]
    for before, after in zip(saved, resumed, strict=True):
        assert before[:4].sum() > 0
        torch.testing.assert_close(after, before)


@pytest.mark.parametrize("method", METHODS)
def test_each_method_trains_sharded_and_opens_on_one_rank(method, runs, tmp_path):
    folder, summaries = runs
    summary, run = summaries[method], folder / method
    cost = summary["mean_expert_count"] * 8 / (4 if "emoe" in method else 1)
    assert summary["moe"] == method and summary["mean_block_compute"] == pytest.approx(cost)
    assert method in ("dynmoe", "mass") or summary["mean_expert_count"] == 2
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    weight = 0.01 if method != "mass" else 0.0  # there is no copy yet
    for line in train:
        assert line["loss"] == pytest.approx(line["task_loss"] + weight * line["div_loss"], abs=1e-6)
        assert (line["div_loss"] > 0) == (method != "mass")

    config = load_train_config(str(run / "config.yaml"))
    model = build.build_model(config, build.build_task(config))
    checkpoint.load_weights(checkpoint.latest(run, "best"), model)
    plain = export.load_consolidated(export.consolidate(run, tmp_path / "model.safetensors"))
    exported = export.load_exported(export.export(run, tmp_path / "exported"))
    x = torch.randn(3, 1, 16, 16)
    with torch.no_grad():
        want = model.eval()(x)
        assert torch.equal(plain(x), want) and torch.equal(exported(x), want)
    kinds = [[type(layer) for layer in moe_layers(each).values()] for each in (plain, model)]
    assert kinds[0] == kinds[1] and len(kinds[0]) == 2


def expand_under(rank, world, folder, zero, size, optimizer):
    """MASS, made to copy an expert at its second step: weights by global name, and whether moments were dropped."""
    config = small_config(folder, "mass", steps=40, optimizer=optimizer, zero_stage=zero, expert_parallel_size=size)
    config.data.batch_size, config.optim.grad_clip = 4, 0.0
    with running_ranks(size) as ranks:
        trainer = Trainer(config, ranks, folder)
        for layer in trainer.layers.values():
            for name, value in dict(p_limit=1.1, similarity_limit=1.1, warmup=0, expansion_steps=2).items():
                object.__setattr__(layer.config, name, value)
            layer.norms, layer.drift = layer.norms[:, :2].clone(), layer.drift[:, :2].clone()
            object.__setattr__(layer.config, "window", 2)
        trainer.train_step()
        for layer in trainer.layers.values():
            layer.active[1] = False  # a slot whose weights the optimiser has moved already
        trainer.train_step()
        forgotten = []
        if optimizer == "adamw":
            for layer in trainer.layers.values():
                moments = layer.router.weight.get_full_hp_param("exp_avg")
                forgotten.append([not bool(row.any()) for row in moments])
        for _ in range(2):
            trainer.train_step()
        active = [layer.active.tolist() for layer in trainer.layers.values()]
        weights = {n: t.detach().clone() for n, t in trainer.model.state_dict().items()}
        return checkpoint.split_by_expert(trainer.model, weights), active, forgotten


def assert_close_but(got, want, leave_out=()):
    for name, tensor in got.items():
        if not name.endswith(leave_out):
            torch.testing.assert_close(tensor, want[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_the_optimiser_takes_over_what_a_layer_rewrites(tmp_path):
    want, active, _ = run_ranks(1, expand_under, tmp_path / "0", 0, 1, "sgd")[0]
    assert active == [[True] * 4 + [False] * 2] * 2
    for got, now, _ in run_ranks(2, expand_under, tmp_path / "2", 2, 2, "sgd", fresh=True):
        assert now == active
        assert_close_but(got, want, (".norms", ".drift"))
    _, _, forgotten = run_ranks(1, expand_under, tmp_path / "adam", 1, 1, "adamw")[0]
    assert forgotten == [[False, True, False, False, True, True]] * 2


def test_dynmoe_resumes_on_another_number_of_ranks(tmp_path):
    """Through the commands: two ranks, then one, against one rank that was never interrupted."""
    base = [*SMALL, "--model.moe", "dynmoe", "--model.max_experts", "6", "--optim.name", "sgd", "--eval_every", "4"]
    base += ["--optim.schedule", "constant"]
    sharded = [*base, "--steps", "2", "--parallel.expert_parallel_size", "2"]
    whole, broken = tmp_path / "whole" / "run", tmp_path / "broken" / "run"
    assert run_job(whole.parent, 1, [*base, "--steps", "4", "--output", str(whole)]).statuses == [0]
    assert run_job(broken.parent, 2, [*sharded, "--output", str(broken)]).statuses == [0, 0]
    resumed = ["--resume", "--steps", "4", "--output", str(broken), "--parallel.expert_parallel_size", "1"]
    assert run_job(broken.parent, 1, resumed).statuses == [0]
    config = load_train_config(str(whole / "config.yaml"))
    states = []
    for run in (whole, broken):
        model = build.build_model(config, build.build_task(config))
        checkpoint.load_weights(checkpoint.latest(run), model)
        states.append(model.state_dict())
    assert states[0]["blocks.1.mlp.active"].sum() > 4  # experts were added
    assert_close_but(states[1], states[0])
    job = run_job(broken.parent, 1, [str(broken), "--checkpoint", "latest"], script="evaluate")
    assert job.statuses == [0] and '"moe": "dynmoe"' in job.output


@pytest.mark.parametrize("family", ["timm", "transformers"])
def test_auxiliary_losses_reach_the_gate_under_gradient_checkpointing(family):
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        if family == "timm":
            from unifmoe_dist.data.digits import build_digits_vit

            model, inputs = build_digits_vit(), {"x": torch.linspace(-1, 1, 1024).view(4, 1, 16, 16)}
        else:
            from transformers import BertConfig, BertForSequenceClassification

            small = BertConfig(
                vocab_size=40,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=4,
                num_attention_heads=2,
                hidden_dropout_prob=0.0,
            )
            model, inputs = BertForSequenceClassification(small), {"input_ids": torch.arange(36).view(3, 12)}
        upcycle_baseline(model, "topk", [1, 3], LayerOptions(num_experts=4))
        if checkpointing:
            build.checkpoint_activations(model)
        model.train()(**inputs)
        loss = sum(layer.auxiliary_loss() for layer in moe_layers(model).values())
        loss.backward()
        grads.append([layer.router.weight.grad for layer in moe_layers(model).values()])
    for plain, checkpointed in zip(*grads, strict=True):
        assert plain.abs().sum() > 0
        torch.testing.assert_close(checkpointed, plain)


@pytest.mark.parametrize("method", ["dynmoe", "emoe", "mass"])
def test_a_saved_transformers_model_comes_back(method, tmp_path):
    from transformers import BertConfig, BertForSequenceClassification

    small = BertConfig(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    model = BertForSequenceClassification(small)
    upcycle_baseline(model, method, [1], LayerOptions(num_experts=4, max_experts=6, mass_threshold=0.7))
    (layer,) = moe_layers(model).values()
    if method != "emoe":
        layer.active[0], layer.active[5] = False, True
    model.save_pretrained(tmp_path)
    same = BertForSequenceClassification.from_pretrained(tmp_path)
    assert all(torch.equal(t, same.state_dict()[n]) for n, t in model.state_dict().items())
    (back,) = moe_layers(same).values()
    assert back.config == layer.config
    tokens = torch.arange(24).view(2, 12)
    torch.testing.assert_close(same(tokens).logits, model.eval()(tokens).logits)


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
    config = TrainConfig(model=ModelConfig(**options), parallel=ParallelConfig(expert_parallel_size=2))
    with pytest.raises(UserError, match=message):
        config.validate(2)


def test_layers_that_do_not_fit():
    with pytest.raises(UserError, match="24.*5"):
        MOE_LAYERS["emoe"](SHAPE, LayerOptions(num_experts=5), None, "auto")
    with pytest.raises(UserError, match="switch.*topk"):
        upcycle_baseline(SimpleNamespace(), "switch", [0])
    with pytest.raises(UserError, match="0 experts.*6"):
        MOE_LAYERS["dynmoe"](SHAPE, LayerOptions(num_experts=0, max_experts=6), None, "auto")
    with pytest.raises(UserError, match="expert 'shared' does not exist; use a whole number from 0 to 3"):
        make("topk").ffn_weights("shared")
