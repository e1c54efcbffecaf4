"""Noisy top-k choice with the importance and load losses of Shazeer et al. (2017), as Tutel has them.

GMoE, EMoE and the top-k layers of DynMoE's GLUE scripts train with it: Tutel's `moe_layer` with is_gshard_loss False
and gate_noise 1.0. docs/fidelity.md compares the numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unifmoe_dist.config import checked
from unifmoe_dist.config.layers import LoadLoss
from unifmoe_dist.methods.gated import largest
from unifmoe_dist.methods.topk import TopKConfig


@checked(frozen=True)
class NoisyTopKConfig(TopKConfig):
    """Shape of a top-k layer whose choice is noisy in training.

    Args:
        load_loss: What the load loss compares with the weakest chosen logit: tutel the probabilities, as Tutel and with
            it the authors of GMoE and EMoE do; shazeer the logits, as the paper that the loss comes from does.
    """

    load_loss: LoadLoss = "tutel"

    @classmethod
    def former_options(cls, expansion_steps: int | None) -> Mapping[str, Any]:
        return {"load_loss": "shazeer"}


@dataclass(frozen=True)
class NoisyChoice:
    """scores: (N, K) softmax of the noisy logits. chosen: (N, K) bool. auxiliary: the loss, None in evaluation."""

    scores: Tensor
    chosen: Tensor
    auxiliary: Tensor | None


def noisy_top_k(
    logits_NK: Tensor, top_k: int, gate_noise: float, training: bool, load_loss: LoadLoss = "tutel"
) -> NoisyChoice:
    """Choose the top_k experts of every token; in training after adding noise of deviation gate_noise / K."""
    if not training or gate_noise == 0:
        scores = torch.softmax(logits_NK, dim=-1)
        return NoisyChoice(scores, largest(scores, top_k), None)
    deviation = gate_noise / logits_NK.shape[1]
    noisy_NK = logits_NK + deviation * torch.randn_like(logits_NK)
    scores = torch.softmax(noisy_NK, dim=-1)
    chosen = largest(scores, top_k)
    weakest_N1 = noisy_NK.masked_fill(~chosen, float("inf")).amin(-1, keepdim=True)
    return NoisyChoice(scores, chosen, load_importance_loss(logits_NK, weakest_N1, deviation, load_loss))


def renormalised(scores_NK: Tensor, chosen_NK: Tensor, top_k: int) -> Tensor:
    """The chosen experts' scores, 0 elsewhere; of several experts they are divided by their sum."""
    gates_NK = torch.where(chosen_NK, scores_NK, 0)
    return gates_NK / gates_NK.sum(-1, keepdim=True) if top_k > 1 else gates_NK


def load_importance_loss(
    logits_NK: Tensor, weakest_N1: Tensor, deviation: float, load_loss: LoadLoss = "tutel"
) -> Tensor:
    """Half the sum of the squared coefficients of variation of importance and load, over experts.

        importance_e = sum over tokens of softmax(logits)_e
        load_e = sum over tokens of Phi((v_e - w) / deviation),    v = softmax(logits) or logits

    w is the weakest chosen noisy logit, Phi the normal distribution function. With v the logits (shazeer), load_e sums
    the probabilities that new noise would have expert e chosen again. Tutel's v are probabilities (tutel), compared
    with a logit: load_e is then no probability of being chosen, and is the same for all e where w lies far from [0, 1].
    """
    probabilities_NK = torch.softmax(logits_NK, dim=-1)
    value_NK = probabilities_NK if load_loss == "tutel" else logits_NK
    load_K = torch.special.ndtr((value_NK - weakest_N1) / deviation).sum(0)
    return (_variation(probabilities_NK.sum(0)) + _variation(load_K)) / 2


def _variation(totals_K: Tensor) -> Tensor:
    if totals_K.shape[0] == 1:  # one expert is balanced
        return totals_K.sum() * 0
    return totals_K.var() / (totals_K.mean().square() + 1e-10)
