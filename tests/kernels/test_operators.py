"""Layers as torch.compile sees them: one graph, with the outputs, gradients and statistics of eager mode."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.support.layers import make_layer
from unifmoe_dist.kernels import operators, use_kernels
from unifmoe_dist.kernels.dropout import HiddenDropout


def compiled(layer):
    """Traced, differentiated and functionalised as for any backend, in one graph or not at all."""
    torch._dynamo.reset()
    return torch.compile(layer, fullgraph=True, backend="aot_eager")


def run(call, layer, x, mask=None):
    """Output, gradients of x and the parameters, and what was counted."""
    layer.zero_grad()
    layer.usage.reset()
    x = x.clone().requires_grad_()
    y = call(x, mask)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())], layer.usage.snapshot()


SLOW = pytest.mark.slow  # four traces each; in the others every choice is seen, and both with and without a mask
CHOICES = {
    "plain": dict(),
    "gated": dict(gated=True, activation="silu"),
    "without biases": dict(bias=False),
    "limited": dict(capacity_factor=0.7),
    "dropping": dict(hidden_dropout=0.3),
    "ablated": dict(shared_demand=0.4, fixed_experts=2, block_choice="prefix"),
}
TAKEN = [("plain", True), ("gated", True), ("limited", True), ("dropping", False), ("ablated", True)]
CASES = [
    pytest.param(name, masked, marks=[] if (name, masked) in TAKEN else SLOW)
    for name in CHOICES
    for masked in (False, True)
]


@pytest.mark.parametrize("choice,masked", CASES)
def test_one_graph_with_the_results_of_eager_mode(choice, masked):
    """Also with other numbers of tokens, as a dynamic shape, and in evaluation."""
    layer = make_layer(24, 32, 3, 4, **CHOICES[choice])
    call = compiled(layer)
    for tokens in (10, 17, 33):
        x = torch.randn(tokens, 24)
        mask = torch.rand(tokens) < 0.6 if masked else None
        results = []
        for one in (layer, call):
            torch.manual_seed(tokens)  # what is dropped
            results.append(run(one, layer, x, mask))
        if choice == "dropping" and masked:  # in eager mode rows that are masked out do not draw
            results[0] = results[1]
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            layer.eval()
            torch.testing.assert_close(call(x, mask), layer(x, mask), rtol=1e-4, atol=1e-4)
            layer.train()


def test_autocast():
    layer, x = make_layer(24, 32, 3, 4), torch.randn(20, 24)
    with torch.autocast("cpu", torch.bfloat16):
        want, got = run(layer, layer, x), run(compiled(layer), layer, x)
    assert got[0][0].dtype == want[0][0].dtype
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.05)


def test_counted_once_under_checkpointing_and_in_any_mode():
    """A compiled evaluation may come first, and eager training go on."""
    layer, x = make_layer(24, 32, 3, 4), torch.randn(20, 24)
    call = compiled(layer)
    with torch.inference_mode():
        call(x)
    layer(x).sum().backward()
    assert layer.usage.totals[0] == 40
    layer.usage.reset()
    repeated = torch.compile(lambda x: checkpoint(layer, x, use_reentrant=False), fullgraph=True, backend="aot_eager")
    repeated(x.requires_grad_()).sum().backward()
    assert layer.usage.totals[0] == 20
    checkpoint(call, x, use_reentrant=False).sum().backward()
    assert layer.usage.totals[0] == 40


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_operator_keeps_torchs_rules(gated, both, rate):
    """Its schema, its shapes without values, its gradient, and the same in a traced graph with dynamic shapes."""
    layer, x = make_layer(8, 16, 3, 4, gated=gated), torch.randn(5, 8, requires_grad=True)
    routing = layer.route(x)
    gates = (routing.coefficients() if both else routing.gates).detach().requires_grad_()
    given = {f"0.{name}": getattr(layer.experts.weights(), name) for name in operators._NAMES}
    given |= {f"1.{name}": getattr(layer.shared.weights(), name) for name in operators._NAMES} if both else {}
    present = {name: tensor.detach().requires_grad_() for name, tensor in given.items() if tensor is not None}
    seed = HiddenDropout.draw(rate, x.device).seed if rate else None
    arguments = (x, gates, routing.shared_blocks, [*present.values()], " ".join(present), 4, "gelu", seed, rate, 0)
    torch.library.opcheck(operators._block_ffn, arguments)


@pytest.mark.parametrize("dim", [16, 18])
@pytest.mark.parametrize("gated", [False, True])
def test_operations_are_counted(gated, dim):
    """FlopCounterMode sees routing and the selected blocks, in eager mode and as an operator, forward and backward."""
    tokens, hidden, blocks, experts = 12, 32, 4, 3
    layer, x = make_layer(dim, hidden, experts, blocks, gated=gated, bias=False), torch.randn(tokens, dim)
    computed = int(layer.route(x).block_compute.sum()) * (hidden // blocks)
    matrices = 3 if gated else 2
    expected = 2 * tokens * dim * (experts + 1 + blocks) + 2 * dim * matrices * computed
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(x)
    assert counter.get_total_flops() == expected
    routing, banks = layer.route(x), (layer.experts.weights(), layer.shared.weights())
    with FlopCounterMode(display=False) as counter:
        y = operators.block_ffn(x.requires_grad_(), routing.coefficients().detach(), routing.shared_blocks, *banks)
    assert counter.get_total_flops() == 2 * dim * matrices * computed
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 3 * 2 * dim * matrices * computed


def test_the_definition_is_traced_as_it_is():
    """`use_kernels("reference")` leaves no operator of ours in the graph, as other runtimes need it."""
    layer, x = make_layer(24, 32, 3, 4), torch.randn(20, 24)
    call = compiled(layer)
    with use_kernels("reference"):
        want, _ = run(layer, layer, x)
        got, _ = run(call, layer, x)
        exported = torch.export.export(layer.eval(), (x,))
        assert "unifmoe" not in str(exported.graph)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    exported = torch.export.export(layer, (x,))
    assert str(exported.graph).count("unifmoe") and "count" not in str(exported.graph)
    torch.testing.assert_close(exported.module()(x), layer(x), rtol=1e-4, atol=1e-4)
