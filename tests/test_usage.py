"""What a layer counts of its tokens, and when it counts nothing."""

from __future__ import annotations

import pytest
import torch

from tests.support.layers import make_layer
from unifmoe_dist.kernels import use_kernels


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


@pytest.mark.parametrize("choices", [dict(), dict(gated=True, activation="silu")], ids=["plain", "gated"])
def test_forward_mode_and_gradients_per_token_by_torch_func(choices):
    """Both modes of differentiation agree, also of second order; per-token gradients add up to the batch's."""
    layer, x, tangent = make_layer(**choices), torch.randn(5, 16), torch.randn(5, 16)
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}

    def loss(weights, x):
        return torch.func.functional_call(layer, weights, (x,)).square().sum()

    _, forward = torch.func.jvp(lambda x: loss(weights, x), (x,), (tangent,))
    gradient = torch.func.grad(loss, argnums=1)(weights, x)
    torch.testing.assert_close(forward, (gradient * tangent).sum(), rtol=1e-4, atol=1e-4)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x[:, None])
    whole = torch.func.grad(loss)(weights, x)
    for name in weights:
        torch.testing.assert_close(each[name].sum(0), whole[name], rtol=1e-4, atol=1e-4)
    hessian = torch.func.hessian(lambda x: loss(weights, x))(x[:1]).view(16, 16)
    assert hessian.any() and torch.allclose(hessian, hessian.T, atol=1e-3)
