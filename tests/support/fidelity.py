"""Layers of given weights, as those whose numbers the originals gave."""

from __future__ import annotations

import math

import torch

from unifmoe_dist.methods.mass import MASSConfig, MASSLayer

D, H, K, N = 12, 24, 6, 40
SHAPE = dict(model_dim=D, hidden_dim=H, num_blocks=6, activation="gelu", bias=True)


def wave(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Numbers that look random and are the same under every version of torch."""
    place = torch.arange(math.prod(shape), dtype=torch.float64) + 1
    return (scale * 1.4 * torch.cos(0.7391 * place**2 + 1.3 * seed)).float().view(shape)


def with_weights(layer, router=None):
    """The layer with the weights that the original had."""
    count = layer.experts.keys.shape[0]
    hidden = layer.experts.keys[0].numel() // D
    weights = dict(
        keys=wave(count, hidden, D, seed=1, scale=0.4),
        key_bias=wave(count, hidden, seed=2, scale=0.2),
        values=wave(count, hidden, D, seed=3, scale=0.3),
        value_bias=wave(count, D, seed=4, scale=0.2),
    )
    with torch.no_grad():
        for name, weight in weights.items():
            own = getattr(layer.experts, name)
            own.copy_(weight.view_as(own))
        for name, weight in (router or {"weight": wave(K, D, seed=5)}).items():
            layer.router.get_parameter(name).copy_(weight)
    return layer.train()


# -- MASS -------------------------------------------------------------------------------------------------------------


def mass(tau, initial=4, **options):
    return with_weights(
        MASSLayer(MASSConfig(**SHAPE, num_experts=K, initial_experts=initial, mass_threshold=tau, **options))
    )
