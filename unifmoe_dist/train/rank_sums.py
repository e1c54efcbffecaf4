"""Buffers to which every rank adds what its own tokens give: a checkpoint, which knows no ranks, holds their sums."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unifmoe_dist.runtime.ranks import Ranks
from unifmoe_dist.upcycling import moe_layers


def sum_over_ranks(model: nn.Module, weights: dict[str, Tensor], ranks: Ranks) -> None:
    """Replace such buffers among a model's `weights`, by name, by their sums; collective."""
    for name in _names(model):
        weights[name] = ranks.all_sum(weights[name]).to(weights[name].dtype)


@torch.no_grad()
def keep_on_first_rank(model: nn.Module, ranks: Ranks) -> None:
    """Clear them on all ranks but the first, after the sums were loaded on every rank."""
    if ranks.rank != 0:
        for name in _names(model):
            model.get_buffer(name).zero_()


def _names(model: nn.Module) -> list[str]:
    return [f"{name}.{each}".lstrip(".") for name, layer in moe_layers(model).items() for each in layer.rank_sums]
