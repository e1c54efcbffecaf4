"""PC-MoE: an interpretation, a mixture of environment experts with consistent predictions.

The original (Nguyen et al., 2025) could not be found in public: no paper under that name on domain generalisation, no
code. Other work of the name (privacy-preserving training or serving of language models) is not it. The UniF-MoE paper
says that PC-MoE is a domain-generalisation method and gives its accuracies, nothing more. What follows is therefore
this project's own design, which assumes that PC stands for prediction consistency; what it scores says nothing of the
original, and must not be reported as its result.

A linear expert h_e per training environment learns from its own items; a gate weighs experts. Each item is predicted
by the mixture of the *other* environments' experts, as if its environment were unseen, and the model f must agree:

    p(x)  =  sum over e' != e of g_e'(x) * softmax(h_e'(z)),        g(x) = softmax over e' != e of G z
    L     =  CE(f(x), y) + v * CE(h_e(z), y) - log p_y + w * KL(sg(p) || softmax f(x))

with z the features below f's own classifier, e the item's environment and sg(.) no gradient. The third term trains the
gate alone: it sees the experts' probabilities and z without gradient, so an expert learns from its own environment
only. Mixtures of the other sources' experts are known from Guo, Shah and Barzilay, "Multi-Source Domain Adaptation with
Mixture of Experts", EMNLP 2018, and consistency with them from Zhou, Yang, Qiao and Xiang, "Domain Adaptive Ensemble
Learning", IEEE TIP 2021. Only f is deployed. v = w = 1 by default.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unifmoe_dist.algorithms.algorithm import Algorithm, classifier_of, pooled_features
from unifmoe_dist.config import AlgorithmConfig


class PCMoE(Algorithm):
    """The model, a linear expert per training environment, and a gate over them."""

    def build(self, num_classes: int, options: AlgorithmConfig, make_model: Callable[[], nn.Module]) -> None:
        self.options = options.pcmoe
        channels = classifier_of(self.model, "pcmoe").in_features
        self.extra["experts"] = nn.ModuleList(nn.Linear(channels, num_classes) for _ in range(self.environments))
        self.extra["gate"] = nn.Linear(channels, self.environments)

    def forward(self, inputs: dict[str, Tensor], labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
        features = pooled_features(self.model, inputs)
        logits = classifier_of(self.model, "pcmoe")(features)
        task_loss = F.cross_entropy(logits.float(), labels)
        own = self.environment_of(labels)
        experts = self.extra["experts"].children()
        expert_logits = torch.stack([expert(features) for expert in experts], dim=1).float()  # (N, E, C)
        expert_loss = F.cross_entropy(expert_logits[torch.arange(len(own), device=own.device), own], labels)
        log_mixture = self.mixture_of_others(features, expert_logits, own)
        gate_loss = F.nll_loss(log_mixture, labels)
        consistency = F.kl_div(
            logits.float().log_softmax(-1), log_mixture.detach(), reduction="batchmean", log_target=True
        )
        options = self.options
        extra_loss = options.expert_weight * expert_loss + options.consistency_weight * consistency
        return task_loss + gate_loss + extra_loss, logits

    def mixture_of_others(self, features: Tensor, expert_logits: Tensor, own: Tensor) -> Tensor:
        """Log-probabilities (N, C) of the experts of the environments that are not `own` (N,).

        Trains the gate alone: features (N, D) and expert_logits (N, E, C) get no gradient.
        """
        is_own = F.one_hot(own, self.environments).bool()
        log_gates = self.extra["gate"](features.detach()).float().masked_fill(is_own, -torch.inf).log_softmax(-1)
        return torch.logsumexp(log_gates[:, :, None] + expert_logits.detach().log_softmax(-1), dim=1)
