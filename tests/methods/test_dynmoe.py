"""DynMoE: how many experts a token has, and how many there are."""

from __future__ import annotations

import pytest
import torch

from tests.support.methods import applied, make

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
    layer = make("dynmoe", dict(num_experts=3, max_experts=4, adapt_every=2)).train()
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
