"""Layers whose experts differ."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from unifmoe_dist import UniFMoEConfig, UniFMoELayer

ABLATIONS = st.sampled_from(
    [
        dict(),
        dict(shared_demand=0.4),
        dict(fixed_experts=2),
        dict(block_choice="prefix"),
        dict(shared_demand=0.01, fixed_experts=1),
        dict(shared_demand=0.99, fixed_experts=3, block_choice="prefix"),
    ]
)


def make_layer(
    d=16, hidden=24, experts=3, blocks=4, activation="gelu", bias=True, seed=0, spread=1.0, **choices
) -> UniFMoELayer:
    """A layer whose experts differ, so that mixing them up shows."""
    torch.manual_seed(seed)
    layer = UniFMoELayer(UniFMoEConfig(d, hidden, experts, blocks, activation, bias, **choices))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        layer.router.weight.mul_(spread)
    return layer
