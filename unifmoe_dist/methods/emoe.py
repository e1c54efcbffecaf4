"""EMoE: Qiu et al., "Unlocking Emergent Modularity in Large Language Models", NAACL 2024.

Facts from the paper and its code (github.com/qiuzh20/EMoE, `Vision/domainbed/moe_utils.py` and its Tutel). The authors'
DomainBed setting is 24 experts, top 4, in two layers of a ViT-S.
"""

from typing import Self

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from unifmoe_dist.config import checked
from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_layer import AppliedStep, ChangedRows
from unifmoe_dist.experts import FFN
from unifmoe_dist.methods.gated import GatedExpertLayer, Gating
from unifmoe_dist.methods.noisy_top_k import NoisyTopKConfig, noisy_top_k, renormalised
from unifmoe_dist.runtime.extras import explained


@checked(frozen=True)
class EMoEConfig(NoisyTopKConfig):
    """Shape of a layer that splits the dense FFN; num_experts must divide its hidden_dim."""

    @model_validator(mode="after")
    def _splits_evenly(self) -> Self:
        if self.hidden_dim % self.num_experts:
            raise UserError(
                f"hidden_dim {self.hidden_dim} is not divisible by num_experts {self.num_experts}, but EMoE splits the "
                "dense FFN evenly; choose a num_experts that divides it."
            )
        return self


class EMoELayer(GatedExpertLayer[EMoEConfig]):
    """The dense FFN's own channels as K experts of H / K channels; the gate is the mean key of an expert (avg-k).

        y = sum over the k experts with the largest x . mean(keys_e) of E_e(x)

    The split is a balanced k-means of the keys, normalised to length 1. The gate's score is not multiplied in and the
    gate is not trained: it follows the keys, and is renewed by `after_step`. The down bias is shared out as 1 / k to
    every expert, so that with k = K the layer is the dense FFN. Of a gated FFN the keys are those under the activation,
    which decide whether a channel fires.

    In training the original adds noise of deviation 1 / K to the logits and an auxiliary loss of importance and load
    with weight 0.01 (which here trains what comes before the layer), and so does this one: see `load_importance_loss`
    for what load is. No token is dropped; the original has a capacity factor of 1.5.

    Attributes:
        router: `router.weight` is (K, model_dim), the experts' mean keys as of the last step.
    """

    config_type = EMoEConfig
    gate_noise = 1.0

    def build(self) -> None:
        self.router = nn.Linear(self.config.model_dim, self.config.num_experts, bias=False).requires_grad_(False)
        self.auxiliary_weight = 0.01

    @property
    def expert_dim(self) -> int:
        return self.config.hidden_dim // self.config.num_experts

    def reset_parameters(self) -> None:
        """A random dense FFN, whose channels are cut in order, as there is nothing to cluster."""
        channels = torch.arange(self.config.hidden_dim).view(self.config.num_experts, -1)
        self._split(channels, self._random_dense())

    def _start_from(self, dense: FFN) -> None:
        """Split a dense FFN by its keys. Takes some seconds for thousands of channels; the same on every rank."""
        try:
            from unifmoe_dist.methods.balanced_kmeans import balanced_kmeans
        except ModuleNotFoundError as error:
            raise explained(error) from None
        keys = F.normalize(_activated(dense).detach().float(), dim=-1).cpu().numpy()
        self._split(torch.from_numpy(balanced_kmeans(keys, self.config.num_experts)), dense)

    @torch.no_grad()
    def _split(self, channels: Tensor, dense: FFN) -> None:
        """Give every expert its row of channels (K, H / K)."""
        activated, down_bias = _activated(dense), dense[3]
        part_bias = None if down_bias is None else down_bias / self.config.top_k
        for expert, own in enumerate(channels.to(activated.device)):
            self._load_channels(expert, dense, own, part_bias)
            self.router.weight[expert] = activated[own].float().mean(0).to(self.router.weight.dtype)

    def after_step(self, applied: AppliedStep) -> list[ChangedRows]:
        """Let the gate follow the keys."""
        self._renew_gate()
        return []

    @torch.no_grad()
    def _renew_gate(self) -> None:
        mean = self.experts.activated_keys.mean(1, dtype=torch.float32)
        self.router.weight.copy_(mean if self.share is None else self.share.by_number(mean))

    def _gate(self, x: Tensor) -> Gating:
        logits = x @ self.router.weight.float().T
        config = self.config
        choice = noisy_top_k(logits, config.top_k, self.gate_noise, self.training, config.load_loss)
        return Gating(choice.scores, self._coefficients(choice.scores, choice.chosen), choice.auxiliary)

    def _coefficients(self, scores: Tensor, chosen: Tensor) -> Tensor:
        return chosen.float()


def _activated(dense: FFN) -> Tensor:
    """(H, d) keys under the activation: the gate's, if there is one."""
    up, _, _, _, *gate = dense
    return up if not gate or gate[0] is None else gate[0]


class EMoELearnLayer(EMoELayer):
    """EMoE-learn: the same split, with a gate that starts at the mean keys and is then trained.

    The coefficients are its softmax scores, renormalised over the chosen experts if k > 1, as in the original.
    """

    def build(self) -> None:
        super().build()
        self.router.requires_grad_(True)

    def after_step(self, applied: AppliedStep) -> list[ChangedRows]:
        return []

    def _coefficients(self, scores: Tensor, chosen: Tensor) -> Tensor:
        return renormalised(scores, chosen, self.config.top_k)
