"""Tutel's mixture layer (https://github.com/microsoft/tutel)."""

from __future__ import annotations

import torch
from torch import nn

from unifmoe_dist.studies.benchmark.peers.peer import Unavailable
from unifmoe_dist.studies.benchmark.shapes import Shape


def tutel_moe(shape: Shape, top_k: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    from tutel import moe

    if device.type == "cpu" and dtype not in (torch.float32, torch.float64):
        raise Unavailable("its CPU kernels take float32 and float64 only")
    experts = {
        "type": "ffn",
        "num_experts_per_device": shape.experts,
        "hidden_size_per_expert": shape.hidden,
        "activation_fn": nn.functional.gelu,
    }
    gate = {"type": "top", "k": top_k, "capacity_factor": 0.0}  # 0: as much room as the busiest expert needs
    return moe.moe_layer(gate_type=gate, model_dim=shape.dim, experts=experts).to(device, dtype)
