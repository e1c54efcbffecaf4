"""MegaBlocks' dropless mixture (https://github.com/databricks/megablocks)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unifmoe_dist.studies.benchmark.peers.peer import need_gpu
from unifmoe_dist.studies.benchmark.shapes import Shape


def arguments(shape: Shape, top_k: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Fields of `megablocks.layers.arguments.Arguments`; without biases, which its experts do not have."""
    return {
        "hidden_size": shape.dim,
        "ffn_hidden_size": shape.hidden,
        "activation_fn": nn.functional.gelu,
        "bias": False,
        "return_bias": False,
        "moe_num_experts": shape.experts,
        "moe_top_k": top_k,
        "moe_normalize_expert_weights": 1,
        "moe_loss_weight": 0.0,  # above 0 it would keep every pass's scores in a global list
        "mlp_type": "mlp",
        "mlp_impl": "grouped",
        "fp16": dtype == torch.float16,
        "bf16": dtype == torch.bfloat16,
        "device": device,
    }


class MegaBlocksMoE(nn.Module):
    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__()
        from megablocks.layers.arguments import Arguments
        from megablocks.layers.dmoe import dMoE

        self.moe = dMoE(Arguments(**fields))

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x[None])[0]


def megablocks_dmoe(shape: Shape, top_k: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    import megablocks  # noqa: F401

    need_gpu(device)
    return MegaBlocksMoE(arguments(shape, top_k, device, dtype)).to(device, dtype)
