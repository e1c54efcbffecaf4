"""The mixture block of Transformers' Mixtral (https://github.com/huggingface/transformers)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unifmoe_dist.studies.benchmark.shapes import Shape


class MixtralBlock(nn.Module):
    def __init__(self, shape: Shape, top_k: int, implementation: str) -> None:
        super().__init__()
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        # Its experts have three matrices: at two thirds of the width they cost as much as the dense FFN. Grouped
        # products want rows of whole 16 bytes.
        config = MixtralConfig(
            hidden_size=shape.dim,
            intermediate_size=8 * round(shape.hidden / 12),
            hidden_act="silu",
            num_local_experts=shape.experts,
            num_experts_per_tok=top_k,
        )
        config._experts_implementation = implementation
        self.block = MixtralSparseMoeBlock(config)
        for parameter in self.block.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x[None])[0]


def mixtral_block(shape: Shape, top_k: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    implementation = "grouped_mm" if device.type == "cuda" else "eager"
    return MixtralBlock(shape, top_k, implementation).to(device, dtype)
