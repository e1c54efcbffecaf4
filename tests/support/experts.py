"""Experts of known and of random weights."""

from __future__ import annotations

import torch

from unifmoe_dist.studies.diagnostics.residual_router import RouterTraining
from unifmoe_dist.studies.diagnostics.shared_channels import FrozenExperts

FAST = RouterTraining(steps=60, batch_size=256)


def identity_experts(values: list, bias: list | None = None) -> FrozenExperts:
    """Experts without activation whose H = d channels read one input each: E_e(x) = x @ values[e] (+ bias[e])."""
    down = [torch.tensor(v, dtype=torch.float64) for v in values]
    size = len(down[0])
    ffns = [
        (torch.eye(size), None, v.T, None if bias is None else torch.tensor(bias[e], dtype=torch.float64))
        for e, v in enumerate(down)
    ]
    return FrozenExperts.from_ffns(ffns, "identity")


def random_experts(num_experts=4, hidden=6, dim=5, bias=True, seed=0) -> FrozenExperts:
    g = torch.Generator().manual_seed(seed)

    def r(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    ffns = []
    base = r(dim, hidden)
    for _ in range(num_experts):
        near = torch.rand(hidden, generator=g) < 0.5  # about half of the channels stay aligned
        down = torch.where(near, base, r(dim, hidden))
        ffns.append((r(hidden, dim), r(hidden) if bias else None, down, r(dim) if bias else None))
    return FrozenExperts.from_ffns(ffns, "gelu")
