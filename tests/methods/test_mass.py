"""MASS: its prefix of experts, the drift that splits one, and the copies that it takes back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.methods import SHAPE, applied, make
from unifmoe_dist.methods.mass import MASSConfig, MASSLayer, reaching_mass

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
