"""Cross-entropy of classes and of next tokens, in float32 without a float32 copy of all logits.

A vocabulary of 49,152 makes 100 MB of logits of 512 tokens; the log-probabilities and gradients of all of them at once
would take three times that. So rows are taken some at a time, and computed again in the backward pass.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_AT_ONCE = 1 << 25
"""Logits of a chunk: 128 MiB in float32."""


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean of -log p(label), a float32 scalar: of items, logits (N, C), or of all positions, logits (N, T, V)."""
    if labels.ndim == 1:
        return F.cross_entropy(logits.float(), labels)
    return token_losses(logits, labels).mean()


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p(label) (N, T) float32, of logits (N, T, V) and labels (N, T)."""
    rows, wanted = logits.flatten(0, -2), labels.flatten()
    size = max(1, _AT_ONCE // logits.shape[-1])
    parts = [
        checkpoint(_losses, part, label, use_reentrant=False, preserve_rng_state=False)
        for part, label in zip(rows.split(size), wanted.split(size), strict=True)
    ]
    return torch.cat(parts).view(labels.shape)


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="none")
