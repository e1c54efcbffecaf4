"""The standard top-k MoE layer."""

from typing import Self

import torch
from pydantic import model_validator
from torch import Tensor, nn

from unifmoe_dist.config import ExpertLayerConfig, checked
from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.gated import GatedExpertLayer, Gating, largest


@checked(frozen=True)
class TopKConfig(ExpertLayerConfig):
    """Shape of a layer that sends every token to the same number of experts.

    Args:
        top_k: Experts per token, from 1 to num_experts.
    """

    top_k: int = 2

    @model_validator(mode="after")
    def _so_many_are_there(self) -> Self:
        if not 1 <= self.top_k <= self.num_experts:
            raise UserError(f"top_k {self.top_k} must be a whole number from 1 to num_experts {self.num_experts}.")
        return self


class TopKLayer(GatedExpertLayer[TopKConfig]):
    """The paper's conventional MoE: y = sum over the k largest s_j(x) of s_j(x) E_j(x), s = softmax(x W_g).

    As in that equation the scores are not renormalised over the chosen experts (Tutel and GMoE do that for k > 1).

    The auxiliary loss is the balance loss K sum_e f_e P_e of GShard (Lepikhin et al. 2021) and Switch (Fedus et al.
    2022): f_e is the fraction of tokens whose first choice is e, P_e the mean of s_e. The paper does not say whether
    its top-k models have one. The code that its GLUE baselines come from (EMoE, DynMoE) trains top-k layers with a
    balance loss of weight 0.01, so that is the default; `auxiliary_weight = 0` turns it off.

    Attributes:
        router: `router.weight` is (K, model_dim), W_g transposed, initialised as torch and Tutel do.
    """

    config_type = TopKConfig

    def build(self) -> None:
        self.router = nn.Linear(self.config.model_dim, self.config.num_experts, bias=False)
        self.auxiliary_weight = 0.01

    def _gate(self, x: Tensor) -> Gating:
        scores = torch.softmax(x @ self.router.weight.float().T, dim=-1)
        gates = torch.where(largest(scores, self.config.top_k), scores, 0)
        return Gating(scores, gates, balance_loss(scores) if self.training else None)


def balance_loss(scores_NK: Tensor) -> Tensor:
    """K sum_e f_e P_e: 1 when first choices are even, up to K when all go to one expert; 0 without tokens."""
    tokens, num_experts = scores_NK.shape
    first_K = largest(scores_NK, 1).float().sum(0) / max(tokens, 1)
    return num_experts * (first_K * scores_NK.sum(0) / max(tokens, 1)).sum()
