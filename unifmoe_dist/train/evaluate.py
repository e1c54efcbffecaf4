"""Scores of a model on data sets, over all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from unifmoe_dist.data.task import TaskData, logits_of
from unifmoe_dist.runtime.ranks import Ranks
from unifmoe_dist.train.batches import evaluation_batches
from unifmoe_dist.train.feed import Feed
from unifmoe_dist.train.nested import to_device
from unifmoe_dist.upcycling import moe_layers
from unifmoe_dist.usage import UsageSummary


@dataclass(frozen=True)
class Score:
    """Scores of one pass over data sets: the metric over all and of each, the mean accuracy, and usage by layer."""

    metric: str
    value: float
    accuracy: float
    per_dataset: list[float]
    usage: dict[str, UsageSummary]


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
    """The task's metric on each data set, in evaluation mode; collective. Leaves the training mode as it was.

    What the metric keeps of the items of all ranks is brought together, each item's once, so that every rank computes
    it on the whole data set and gets the same value. `workers` processes of this rank read ahead.
    """
    was_training = model.training
    model.eval()
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    for layer in moe_layers(model).values():
        layer.usage.reset()
    own = []
    for dataset in datasets:
        parts = []  # of every batch, what the metric keeps of its items
        pin = ranks.device.type == "cuda"
        batches = evaluation_batches(dataset, task, batch_size, ranks.rank, ranks.world_size, workers, pin)
        feed = Feed(((batch, weight.numpy()) for batch, weight in batches), ranks.device)
        for (inputs, labels), weight in feed:
            logits = logits_of(model(**to_device(inputs, ranks.device, dtype)))
            rows = task.metric.observe(logits, labels.to(logits.device))
            feed.fetch()
            parts.append(rows.cpu().numpy()[:, weight > 0])
        own.append(np.concatenate(parts, axis=1) if parts else np.zeros((0, 0)))
    whole = [np.concatenate(shares, axis=1) for shares in zip(*ranks.gather(own), strict=True)]
    metric = task.metric
    values = metric.each(whole)
    accuracies = [metric.accuracy(*rows) if rows.size else 0.0 for rows in whole]
    usage = collect_usage(model, ranks)
    model.train(was_training)
    return Score(metric.name, metric.overall(whole, values), sum(accuracies) / len(datasets), values, usage)
