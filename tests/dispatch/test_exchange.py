"""Backward passes that could leave a rank waiting: frozen parts, differing needs, checkpointing, abandoned graphs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests.support.ranks import run_ranks
from tests.support.sharded import CLOSE, EXCHANGES, dense_parameters, held_here, sharded_layer, whole_layer
from unifmoe_dist import UniFMoEConfig, diversity_loss, upcycle
from unifmoe_dist.errors import UserError
from unifmoe_dist.upcycling import moe_layers

CONFIG = UniFMoEConfig(10, 24, 4, 6)
PARTS = ("x", "router", "shared", "experts")
COUNTS = (5, 3)


def train_under_ddp(rank, world):
    """A step of a checkpointed BERT with the Gram loss: its routers' gradients, or the sentence that refuses it."""
    from tests.support.small_models import build
    from tests.support.small_models import inputs as batch

    outcomes = {}
    for reentrant, static in ((False, False), (True, False), (True, True)):
        torch.manual_seed(0)
        model = upcycle(build("bert"), [0, 2], 3, 4, router_seed=1).train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        ddp = torch.nn.parallel.DistributedDataParallel(model, static_graph=static)
        try:
            loss = ddp(**batch("bert")).logits.square().mean() + 0.1 * diversity_loss(model)
            loss.backward()
            outcomes[reentrant, static] = [layer.router.weight.grad for layer in moe_layers(model).values()]
        except UserError as error:
            outcomes[reentrant, static] = str(error)
    model.gradient_checkpointing_disable()
    for training in (False, True):  # an evaluation or a teacher's pass is no checkpointing
        model.train(training)
        with torch.no_grad():
            ddp(**batch("bert"))
        diversity_loss(model).backward()
    return outcomes


def test_reentrant_checkpointing_with_the_gram_loss_under_ddp():
    for outcomes in run_ranks(2, train_under_ddp):
        plain = outcomes[False, False]
        assert all(grad.abs().sum() > 0 for grad in plain)
        assert all("use_reentrant=False" in outcomes[True, static] for static in (False, True))


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(n, CONFIG.model_dim, generator=generator) for n in COUNTS]


def needs_by_rank() -> list[tuple[str, str]]:
    """What rank 0 and rank 1 want gradients for."""
    alike = ["router shared experts", "x shared", "x", "experts", "shared", "router", ""]
    return [(a, a) for a in alike] + [("", "x"), ("", "router"), ("", "experts"), ("x", "experts"), ("shared", "x")]


def differing_needs(rank, world, dispatcher):
    for needs in needs_by_rank():
        whole = whole_layer(CONFIG)
        layer = sharded_layer(whole, dist.group.WORLD, dispatcher)
        wanted = needs[rank].split()
        for part in PARTS[1:]:
            getattr(layer, part).requires_grad_(part in wanted)
        x = inputs()[rank].requires_grad_("x" in wanted)
        y = layer(x)
        # Another rank's tokens and experts need this rank's part in the backward pass.
        concerned = bool(wanted) or bool({"x", "router", "experts"} & set(" ".join(needs).split()))
        assert y.requires_grad == concerned, needs
        if concerned:
            y.square().sum().backward()
        everything = torch.cat(inputs()).requires_grad_()
        whole(everything).square().sum().backward()
        got_and_want = {
            "x": [(x.grad, everything.grad.split(COUNTS)[rank])],
            "experts": [
                (p.grad, held_here(q.grad, layer))
                for p, q in zip(layer.experts.parameters(), whole.experts.parameters(), strict=True)
            ],
        }
        for part, pairs in got_and_want.items():
            for got, want in pairs:
                if part in wanted:
                    torch.testing.assert_close(got, want, **CLOSE)
                else:
                    assert got is None
    return True


@pytest.mark.parametrize("dispatcher", EXCHANGES)
def test_needs_may_differ_between_ranks(dispatcher):
    assert all(run_ranks(2, differing_needs, dispatcher, timeout=60))


def two_layers(rank, world, dispatcher, reentrant, needs_x):
    wholes = [whole_layer(CONFIG, seed) for seed in (1, 2)]
    for frozen in ((), ("experts",), ("router",), ("router", "experts"), ("shared", "experts")):
        grads = []
        for checkpointed in (False, True):
            layers = [sharded_layer(w, dist.group.WORLD, dispatcher) for w in wholes]
            x = inputs()[rank].requires_grad_(needs_x)
            y = x
            for layer in layers:
                for part in frozen:
                    getattr(layer, part).requires_grad_(False)
                y = y + (checkpoint(layer, y, use_reentrant=reentrant) if checkpointed else layer(y))
            y.square().sum().backward()
            grads.append([x.grad, *(p.grad for layer in layers for p in layer.parameters())])
        assert (grads[0][0] is None) == (not needs_x)
        for plain, recomputed in zip(*grads, strict=True):
            assert plain is None and recomputed is None or torch.equal(plain, recomputed)
    return True


@pytest.mark.parametrize("dispatcher", EXCHANGES)
@pytest.mark.parametrize("reentrant,needs_x", [(True, True), (False, True), (False, False)])
def test_activation_checkpointing(reentrant, needs_x, dispatcher):
    assert all(run_ranks(2, two_layers, dispatcher, reentrant, needs_x, timeout=60))


def odd_graphs(rank, world, dispatcher):
    whole = whole_layer(CONFIG)
    layer = sharded_layer(whole, dist.group.WORLD, dispatcher)

    def gradients(y, **options):
        return torch.autograd.grad(y.square().sum(), [x, *layer.parameters()], **options)

    x = inputs()[rank].requires_grad_()
    want = gradients(layer(x))
    with torch.no_grad():
        quiet = layer(x)
    assert not quiet.requires_grad
    layer(x)  # its backward pass never runs
    y = layer(x)
    torch.testing.assert_close(quiet, y)
    first, second = gradients(y, retain_graph=True), gradients(y)
    for a, b, c in zip(want, first, second, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    # Asking for some gradients only: whole crossings are left out, on every rank.
    for index, leaf in enumerate([x, *layer.parameters()]):
        (some,) = torch.autograd.grad(layer(x).square().sum(), leaf)
        assert torch.equal(some, want[index])
    # Two layers side by side: neither's gradients depend on the other's.
    twin = sharded_layer(whole_layer(CONFIG, 9), dist.group.WORLD, dispatcher)
    twin.experts.requires_grad_(False)
    (layer(x).square().sum() + twin(x).square().sum()).backward()
    for parameter, expected in zip(layer.parameters(), want[1:], strict=True):
        torch.testing.assert_close(parameter.grad, expected)
    assert all(p.grad is None for p in twin.experts.parameters())
    assert all(p.grad is not None for p in dense_parameters(twin))
    return True


@pytest.mark.parametrize("dispatcher", EXCHANGES)
def test_abandoned_repeated_and_partial_backward_passes(dispatcher):
    assert all(run_ranks(2, odd_graphs, dispatcher, timeout=60))
