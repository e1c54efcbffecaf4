"""One layer held whole, and the same layer with its experts spread over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from unifmoe_dist import UniFMoEConfig, UniFMoELayer

EXCHANGES = ["alltoall", pytest.param("tutel", marks=pytest.mark.tutel)]
CLOSE = dict(rtol=1e-4, atol=1e-5, equal_nan=True)


def whole_layer(config: UniFMoEConfig, seed: int = 1) -> UniFMoELayer:
    """A layer whose experts differ, so that mixing them up shows."""
    torch.manual_seed(seed)
    layer = UniFMoELayer(config)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def sharded_layer(whole: UniFMoELayer, group: dist.ProcessGroup | None, dispatcher: str, **options) -> UniFMoELayer:
    """The weights of `whole`, the experts spread over `group`."""
    layer = UniFMoELayer(whole.config, expert_group=group, dispatcher=dispatcher, **options)
    layer.router.load_state_dict(whole.router.state_dict())
    for expert in ["shared", *range(whole.config.num_experts)]:
        layer.load_ffn(expert, *whole.ffn_weights(expert))
    return layer


def dense_parameters(layer: UniFMoELayer) -> list[torch.nn.Parameter]:
    """Parameters that every rank holds."""
    return [*layer.router.parameters(), *layer.shared.parameters()]


def held_here(whole: torch.Tensor, layer: UniFMoELayer) -> torch.Tensor:
    """The part of a tensor of all experts, one after another, that belongs to this rank."""
    return whole.unflatten(0, (layer.config.num_experts, -1))[list(layer.held)].flatten(0, 1)


def assert_equals_whole(layer, whole, parts, place, group, **close):
    """One step of a sharded layer on parts[place] against a whole layer on all parts, checked on this rank."""
    x = parts[place].clone().requires_grad_()
    y = layer(x)
    grads = [torch.randn(p.shape, generator=torch.Generator().manual_seed(7), dtype=p.dtype) for p in parts]
    y.backward(grads[place])
    everything = torch.cat(parts).requires_grad_()
    want = whole(everything)
    want.backward(torch.cat(grads))
    sizes = [len(p) for p in parts]
    torch.testing.assert_close(y, want.split(sizes)[place], **close)
    torch.testing.assert_close(x.grad, everything.grad.split(sizes)[place], **close)
    for got, expected in zip(dense_parameters(layer), dense_parameters(whole), strict=True):
        dist.all_reduce(got.grad, group=group)
        torch.testing.assert_close(got.grad, expected.grad, **close)
    for got, expected in zip(layer.experts.parameters(), whole.experts.parameters(), strict=True):
        torch.testing.assert_close(got.grad, held_here(expected.grad, layer), **close)
