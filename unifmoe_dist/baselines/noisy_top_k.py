"""Noisy top-k choice with the importance and load losses of Shazeer et al. (2017), in Tutel's form.

GMoE and EMoE train with it: Tutel's `moe_layer` with is_gshard_loss False, gate_noise 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unifmoe_dist.baselines.gated import largest


@dataclass(frozen=True)
class NoisyChoice:
    """scores: (N, K) softmax of the noisy logits. chosen: (N, K) bool. auxiliary: the loss, None in evaluation."""

    scores: Tensor
    chosen: Tensor
    auxiliary: Tensor | None


def noisy_top_k(logits_NK: Tensor, top_k: int, gate_noise: float, training: bool) -> NoisyChoice:
    """Choose the top_k experts of every token; in training after adding noise of deviation gate_noise / K."""
    if not training or gate_noise == 0:
        scores = torch.softmax(logits_NK, dim=-1)
        return NoisyChoice(scores, largest(scores, top_k), None)
    deviation = gate_noise / logits_NK.shape[1]
    noisy_NK = logits_NK + deviation * torch.randn_like(logits_NK)
    scores = torch.softmax(noisy_NK, dim=-1)
    chosen = largest(scores, top_k)
    weakest_N1 = noisy_NK.masked_fill(~chosen, float("inf")).amin(-1, keepdim=True)
    return NoisyChoice(scores, chosen, load_importance_loss(logits_NK, weakest_N1, deviation))


def load_importance_loss(logits_NK: Tensor, weakest_N1: Tensor, deviation: float) -> Tensor:
    """Half the sum of the squared coefficients of variation of importance and load, over experts.

    importance_e = sum over tokens of softmax(logits)_e
    load_e = sum over tokens of P(logit_e + noise >= the weakest chosen logit)
    """
    importance_K = torch.softmax(logits_NK, dim=-1).sum(0)
    load_K = torch.special.ndtr((logits_NK - weakest_N1) / deviation).sum(0)
    return (_variation(importance_K) + _variation(load_K)) / 2


def _variation(totals_K: Tensor) -> Tensor:
    if totals_K.shape[0] == 1:  # one expert is balanced
        return totals_K.sum() * 0
    return totals_K.var() / (totals_K.mean().square() + 1e-10)
