"""The one shape every task takes, whatever its source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from unifmoe_dist.data.metrics import ACCURACY, Metric

Batch = tuple[dict[str, Tensor], Tensor]
"""Model keyword arguments and the labels ``(N,) int64``."""


@dataclass(frozen=True)
class TaskData:
    """Data, collation and dense backbone of one task.

    Model selection sees ``validation`` only; ``test`` is for the final number. The lists hold map-style
    datasets, one per environment, all sized.

    Attributes:
        name: short name for logs and run folders.
        num_classes: width of the logits.
        train: one dataset per training environment (exactly one for language tasks).
        validation: the out-splits of the training environments.
        test: the held-out environment's in-split, or the test split.
        environments: names of the training environments, in the order of ``train``.
        collate: list of items -> ``(inputs, labels)``; call the model as ``model(**inputs)``.
        build_model: ``build_model()`` -> the dense backbone. It draws its new parameters from torch's global
            generator, so seed that first.
        augment: optional ``augment(item, generator) -> item`` for items of ``train``, before they are collated. The
            item is not changed in place. The generator is on the CPU and the only source of randomness.
        metric: what selects the checkpoint and is reported, computed on each data set as a whole and averaged over
            them.
    """

    name: str
    num_classes: int
    train: list[Dataset]
    validation: list[Dataset]
    test: list[Dataset]
    environments: tuple[str, ...]
    collate: Callable[[list[Any]], Batch]
    build_model: Callable[[], nn.Module]
    augment: Callable[[Any, torch.Generator], Any] | None = None
    metric: Metric = ACCURACY


def logits_of(output: Any) -> Tensor:
    """Logits of a timm model (a tensor) or a Hugging Face one (an output with .logits)."""
    return output if torch.is_tensor(output) else output.logits


def collate_images(items: Sequence[tuple[Tensor, int]]) -> Batch:
    """Stack ``(image (C, H, W), label)`` pairs into ``({"x": (N, C, H, W)}, (N,))``."""
    images, labels = zip(*items, strict=True)
    return {"x": torch.stack(images)}, torch.tensor(labels, dtype=torch.int64)
