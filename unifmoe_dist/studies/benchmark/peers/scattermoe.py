"""ScatterMoE's MLP (https://github.com/shawntan/scattermoe), behind a plain softmax top-k router: it brings none."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from unifmoe_dist.studies.benchmark.peers.peer import need_gpu
from unifmoe_dist.studies.benchmark.shapes import Shape


class ScatterMoE(nn.Module):
    def __init__(self, shape: Shape, top_k: int) -> None:
        super().__init__()
        from scattermoe.mlp import MLP

        self.top_k = top_k
        self.router = nn.Linear(shape.dim, shape.experts, bias=False)
        self.mlp = MLP(
            input_size=shape.dim, hidden_size=shape.hidden, num_experts=shape.experts, top_k=top_k, activation=nn.GELU()
        )

    def forward(self, x: Tensor) -> Tensor:
        affinity = torch.softmax(self.router(x).float(), dim=-1)
        gates, experts = affinity.topk(self.top_k, dim=-1)
        return self.mlp(x, (gates / gates.sum(-1, keepdim=True)).to(x.dtype), experts)


def scattermoe_mlp(shape: Shape, top_k: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    layer = ScatterMoE(shape, top_k)
    if os.environ.get("TRITON_INTERPRET") != "1":  # Triton's interpreter runs it on the CPU, for tests
        need_gpu(device)
    return layer.to(device, dtype)
