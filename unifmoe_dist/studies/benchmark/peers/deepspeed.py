"""DeepSpeed's mixture layer (https://github.com/deepspeedai/DeepSpeed), all experts on one rank: no process group."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unifmoe_dist.studies.benchmark.shapes import Shape


class DeepSpeedMoE(nn.Module):
    def __init__(self, shape: Shape, top_k: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        expert = nn.Sequential(nn.Linear(shape.dim, shape.hidden), nn.GELU(), nn.Linear(shape.hidden, shape.dim))
        self.moe = MoE(
            shape.dim,
            expert,
            num_experts=shape.experts,
            k=top_k,
            drop_tokens=False,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)[0]


def deepspeed_moe(shape: Shape, top_k: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    return DeepSpeedMoE(shape, top_k).to(device, dtype)
