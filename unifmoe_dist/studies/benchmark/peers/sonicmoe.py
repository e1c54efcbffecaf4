"""SonicMoE (https://github.com/Dao-AILab/sonic-moe): kernels for Hopper GPUs and later."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unifmoe_dist.studies.benchmark.peers.peer import Unavailable, need_gpu
from unifmoe_dist.studies.benchmark.shapes import Shape


def arguments(shape: Shape, top_k: int) -> dict[str, Any]:
    """Arguments of `sonicmoe.MoE` beside the activation."""
    return {
        "num_experts": shape.experts,
        "num_experts_per_tok": top_k,
        "hidden_size": shape.dim,
        "intermediate_size": shape.hidden,
        "add_bias": False,
        "std": 0.02,
    }


class SonicMoE(nn.Module):
    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__()
        from sonicmoe import MoE
        from sonicmoe.enums import ActivationType

        self.moe = MoE(activation_function=ActivationType.GELU, **fields)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x, is_inference_mode=not torch.is_grad_enabled())[0]


def sonicmoe_moe(shape: Shape, top_k: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    import sonicmoe  # noqa: F401

    need_gpu(device, (9, 0))
    if dtype not in (torch.bfloat16, torch.float16):
        raise Unavailable("its kernels take bf16 and fp16 only")
    return SonicMoE(arguments(shape, top_k)).to(device, dtype)
