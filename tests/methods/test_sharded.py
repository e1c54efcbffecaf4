"""Every method with its experts spread over ranks equals the layer that holds them all."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist

from tests.support.methods import CLOSE, METHODS, OPTIONS, SHAPE, applied, make
from tests.support.ranks import run_ranks
from tests.support.sharded import EXCHANGES, held_here
from unifmoe_dist.expert_layer import AppliedStep
from unifmoe_dist.lending import here
from unifmoe_dist.upcycling.convert import build_layer

# -- ranks ------------------------------------------------------------------------------------------------------------


def shard(whole, method, dispatcher):
    shape = {**SHAPE, "gated": whole.config.gated}
    layer = build_layer(method, shape, OPTIONS, dist.group.WORLD, dispatcher)
    own = layer.state_dict()
    layer.load_state_dict({n: own[n] if n.startswith("experts.") else t for n, t in whole.state_dict().items()})
    for expert in range(whole.config.num_experts):
        layer.load_ffn(expert, *whole.ffn_weights(expert))
    return layer


def sharded_equals_whole(rank, world, dispatcher):
    """Outputs, gradients and changes between steps, on uneven ranks and with none on one of them."""
    all_sum = lambda t: (t := t.detach().double(), dist.all_reduce(t))[0]  # noqa: E731
    for method, gated in product(METHODS, (False, True)):
        whole = make(method, gated=gated)
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
            torch.testing.assert_close(here(tensor), expected, **CLOSE)
    return True


@pytest.mark.parametrize("dispatcher", EXCHANGES)
def test_sharded_equals_one_rank(dispatcher):
    assert all(run_ranks(2, sharded_equals_whole, dispatcher))
