"""Scores of a model on data sets, over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from unifmoe_dist.data.base import TaskData
from unifmoe_dist.engine.batches import evaluation_batches
from unifmoe_dist.engine.ranks import Ranks
from unifmoe_dist.upcycling import moe_layers
from unifmoe_dist.usage import UsageSummary


@dataclass(frozen=True)
class Score:
    """accuracy: mean over the data sets of the fraction right. usage: routing statistics by layer."""

    accuracy: float
    per_dataset: list[float]
    usage: dict[str, UsageSummary]


def logits_of(output: Any) -> Tensor:
    """Logits of a timm model (a tensor) or a Hugging Face one (an output with .logits)."""
    return output if torch.is_tensor(output) else output.logits


def to_device(inputs: dict[str, Tensor], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Move model inputs; floating-point ones take the model's dtype."""
    return {k: v.to(device, dtype if v.is_floating_point() else None) for k, v in inputs.items()}


def collect_usage(model: nn.Module, ranks: Ranks) -> dict[str, UsageSummary]:
    """Routing statistics of every UniF-MoE layer since the last reset, summed over ranks; resets them."""
    result = {}
    for name, layer in moe_layers(model).items():
        config = layer.config
        totals = layer.usage.totals
        if totals is None:
            totals = torch.zeros(6 + config.num_experts + config.num_blocks)
        result[name] = UsageSummary.from_totals(ranks.all_sum(totals), config.num_experts)
        layer.usage.reset()
    return result


@torch.no_grad()
def evaluate(
    model: nn.Module, task: TaskData, datasets: Sequence[Dataset], batch_size: int, ranks: Ranks, workers: int = 0
) -> Score:
    """Accuracy on each data set, in evaluation mode; collective. Leaves the training mode as it was.

    `workers` processes of this rank read ahead.
    """
    was_training = model.training
    model.eval()
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    for layer in moe_layers(model).values():
        layer.usage.reset()
    right = torch.zeros(len(datasets), dtype=torch.float64)
    for number, dataset in enumerate(datasets):
        for (inputs, labels), weight in evaluation_batches(
            dataset, task, batch_size, ranks.rank, ranks.world_size, workers
        ):
            logits = logits_of(model(**to_device(inputs, ranks.device, dtype)))
            hits = logits.argmax(-1).cpu() == labels
            right[number] += (hits * weight).sum().double()
    sizes = torch.tensor([len(dataset) for dataset in datasets], dtype=torch.float64)  # type: ignore[arg-type]
    per_dataset = (ranks.all_sum(right) / sizes.clamp(min=1)).tolist()
    usage = collect_usage(model, ranks)
    model.train(was_training)
    return Score(sum(per_dataset) / len(per_dataset), per_dataset, usage)
