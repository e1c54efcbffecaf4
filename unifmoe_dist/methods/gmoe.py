"""GMoE: Li et al., "Sparse Mixture-of-Experts are Domain Generalizable Learners", ICLR 2023.

Facts from the paper, its code (github.com/Luodian/Generalizable-Mixture-of-Experts) and Tutel's `cosine_top` gate.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unifmoe_dist.methods.gated import GatedExpertLayer, Gating
from unifmoe_dist.methods.noisy_top_k import NoisyTopKConfig, noisy_top_k, renormalised

PROJECTION_DIM = 256
LARGEST_SCALE = 100.0


class CosineRouter(nn.Module):
    """logit_e = exp(temperature) cos(P x + c, w_e), the factor at most 100.

    Args:
        model_dim: Token width.
        num_experts: Number K of experts.

    Attributes:
        projection: P and c, to 256 dimensions.
        weight: (K, 256), the experts' embeddings, initialised with deviation 0.01.
        temperature: (1,), log of the factor, which starts at 2.
    """

    def __init__(self, model_dim: int, num_experts: int) -> None:
        super().__init__()
        self.projection = nn.Linear(model_dim, PROJECTION_DIM)
        self.weight = nn.Parameter(torch.empty(num_experts, PROJECTION_DIM))
        self.temperature = nn.Parameter(torch.full((1,), math.log(2.0)))
        nn.init.normal_(self.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        """(N, model_dim) float32 -> (N, K) logits."""
        projected = F.linear(x, self.projection.weight.float(), self.projection.bias.float())
        cosine = F.normalize(projected, dim=-1) @ F.normalize(self.weight.float(), dim=-1).T
        return cosine * self.temperature.float().clamp(max=math.log(LARGEST_SCALE)).exp()


class GMoELayer(GatedExpertLayer[NoisyTopKConfig]):
    """Cosine routing to the top k experts, whose softmax scores are renormalised over the chosen ones if k > 1.

    In training, noise of deviation `gate_noise` / K is added to the logits, and the auxiliary loss is
    (importance + load) / 2 with weight 0.01, both as in the original: see `load_importance_loss` for what load is. The
    paper's setting is 6 experts, k = 2, in layers 8 and 10 of 12; the released code has k = 1, and dropout of 0.1 on
    the experts' hidden channels, which is `hidden_dropout`. No token is dropped, where the original has a capacity
    factor of 1.5.

    With K = 16 and k of 1, 2, 4 or 8 in BERT-large it is the "MoE" of DynMoE's GLUE scripts (`--gate_type cosine_top`).
    """

    config_type = NoisyTopKConfig
    gate_noise = 1.0

    def build(self) -> None:
        self.router = CosineRouter(self.config.model_dim, self.config.num_experts)
        self.auxiliary_weight = 0.01

    def _gate(self, x: Tensor) -> Gating:
        choice = noisy_top_k(self.router(x), self.config.top_k, self.gate_noise, self.training, self.config.load_loss)
        return Gating(choice.scores, renormalised(choice.scores, choice.chosen, self.config.top_k), choice.auxiliary)
