"""Gradient clipping by the true global norm: every expert counted once, wherever it lives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unifmoe_dist.runtime.ranks import Ranks


@torch.no_grad()
def global_norm(model: nn.Module, ranks: Ranks) -> Tensor:
    """L2 norm of all gradients, after they were averaged over replicas; collective. A float32 scalar.

    Dense gradients are the same on every rank and count once; those of sharded experts are summed over the ranks of
    this rank's expert-parallel group, which together hold every expert once.
    """
    squares = {False: torch.zeros((), device=ranks.device), True: torch.zeros((), device=ranks.device)}
    for parameter in model.parameters():
        if parameter.grad is not None:
            sharded = not getattr(parameter, "allreduce", True)
            squares[sharded] += torch.linalg.vector_norm(parameter.grad.float()).square()
    if ranks.expert_group is not None:
        dist.all_reduce(squares[True], group=ranks.expert_group)
    return (squares[False] + squares[True]).sqrt()


@torch.no_grad()
def clip(model: nn.Module, max_norm: float, ranks: Ranks) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`. Returns the norm before."""
    norm = global_norm(model, ranks)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
    return norm


def use_true_norm(engine: Any, model: nn.Module, ranks: Ranks) -> None:
    """Make an engine without ZeRO clip by the true norm.

    DeepSpeed's own clipping there averages the ranks' norms, and each rank sees only its own experts. With ZeRO 1 and
    2 its norm sums the squares of all partitions over all ranks, which counts every expert once.
    """

    def clip_fp32_gradients() -> None:
        engine._global_grad_norm = clip(model, engine.gradient_clipping(), ranks)

    if not engine.zero_optimization():
        engine.clip_fp32_gradients = clip_fp32_gradients
