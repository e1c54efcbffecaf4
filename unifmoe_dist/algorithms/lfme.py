"""LFME: learning from multiple experts.

Chen, Zhang, Song, Shen and Liu, "LFME: A Simple Framework for Learning from Multiple Experts in Domain
Generalization", NeurIPS 2024 (arXiv 2410.17020); code at github.com/liangchen527/LFME, domain_generalization/.

One expert f_e per training environment learns from that environment alone, beside the model f that learns from all.
The probabilities of an item's own expert guide the model's *logits*:

    L = CE(f(x), y) + w * mean over items and classes of (f(x) - sg(softmax f_e(x)))^2 + sum_e CE(f_e(x_e), y_e)

with sg(.) no gradient, e the item's environment, x_e the items of environment e, and w = 1 as in the authors' code
(their search draws 10^U(-2, 1)). Only f is deployed.

The experts have the model's architecture, start from the same pretrained weights and are updated in the same step,
with the probabilities from before it, as in that code. Two things are the run's own: the optimiser and its settings
are shared, and so is gradient clipping, which limits the norm over the model and all experts together
(optim.grad_clip 0 clips nothing, like the original).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unifmoe_dist.algorithms.algorithm import Algorithm
from unifmoe_dist.config import AlgorithmConfig
from unifmoe_dist.data.task import logits_of
from unifmoe_dist.data.token_loss import cross_entropy


class LFME(Algorithm):
    """The model and one expert like it per training environment: (E + 1) times ERM's parameters and 2 times its work.

    Works with any model, whatever its inputs.
    """

    def build(self, num_classes: int, options: AlgorithmConfig, make_model: Callable[[], nn.Module]) -> None:
        self.experts = [make_model() for _ in range(self.environments)]
        self.extra["experts"] = nn.ModuleList(self.experts)
        self.guidance_weight = options.lfme.guidance_weight

    def forward(self, inputs: dict[str, Tensor], labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
        parts = {name: self.per_environment(value) for name, value in inputs.items()}
        expert_losses, guides = [], []
        for e, (expert, own_labels) in enumerate(zip(self.experts, self.per_environment(labels), strict=True)):
            expert_logits = logits_of(expert(**{name: part[e] for name, part in parts.items()})).float()
            expert_losses.append(cross_entropy(expert_logits, own_labels))
            guides.append(expert_logits.detach().softmax(-1))
        logits = logits_of(self.model(**inputs))
        task_loss = cross_entropy(logits, labels)
        guidance = F.mse_loss(logits.float(), torch.cat(guides))
        return task_loss + self.guidance_weight * guidance + torch.stack(expert_losses).sum(), logits
