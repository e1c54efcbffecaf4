"""Inputs and layers for the Triton kernels, on a CUDA device or, without one, for Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.experts import BlockExperts
from unifmoe_dist.kernels.triton.interpreter import quicken
from unifmoe_dist.kernels.triton.tuning import first_tiles

if os.environ.get("TRITON_INTERPRET") == "1":
    quicken()

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module", autouse=True)
def without_tuning():
    """Trial runs of every tile for every shape here would take long."""
    with first_tiles():
        yield


def bank(experts, dim, hidden, blocks, activation="gelu", bias=True, dtype=torch.float32, gated=False) -> BlockExperts:
    made = BlockExperts(experts, dim, hidden, blocks, activation, bias, gated).to(DEVICE, dtype)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def random(*shape, dtype=torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def error(got: Tensor, want: Tensor, least: float = 1e-6) -> float:
    """Largest difference over the largest wanted value, or over `least` if that is larger."""
    if not want.numel():
        return 0.0
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).abs().max() / want.abs().max().clamp(min=least))


def random_gates(n: int, e: int) -> Tensor:
    return torch.rand(n, e, device=DEVICE) * (torch.rand(n, e, device=DEVICE) > 0.5)


def make_layer(dim=32, hidden=64, experts=3, blocks=4, seed=0, **more) -> UniFMoELayer:
    torch.manual_seed(seed)
    layer = UniFMoELayer(UniFMoEConfig(dim, hidden, experts, blocks, **more)).to(DEVICE)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer
