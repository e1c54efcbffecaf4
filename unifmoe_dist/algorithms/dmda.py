"""DMDA: discriminative microscopic distribution alignment.

Long, Zhou, Ying, Ma and Luo, "Rethinking Domain Generalization: Discriminability and Generalizability", IEEE TCSVT
34(11), 2024 (arXiv 2309.16483); code at github.com/longshaocong/DMDA, from which the losses and defaults below are
taken. With z the backbone's features:

- Selective channel pruning. A scorer g learns the classes from z. Of an item of class c only the `channel_ratio`
  of channels with the largest weights in row c of g is kept: z' = z * m(c). The classifier h sees z' alone. Training
  takes m from the label, inference from the class that g predicts.
- Micro-level alignment. A class expert q on z' gives latent semantics s = softmax(q(z') / T). An approximator a tells
  environments apart from z' + m * W s, and the features learn to prevent it, through a reversed gradient
  of strength 2 / (1 + exp(-step / warmup_steps)) - 1:

      L = CE(h(z'), y) + CE(a(reverse(z' + m * W s)), environment) + CE(q(z'), y) + scorer_weight * CE(g(z), y)

Differences from that code, so that an item's result does not depend on the batch or rank it falls to: the mask is the
item's own (there, indexing marks every channel that any item of the batch selects), and q and a use LayerNorm for
BatchNorm. The temperature is the one of the authors' example command (4); train.py's own default is 0.07. The
optimiser and its schedule are the run's.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unifmoe_dist.algorithms.algorithm import Algorithm, classifier_of, pooled_features
from unifmoe_dist.config import AlgorithmConfig


class SelectiveHead(nn.Module):
    """Classifier with selective channel pruning: features (N, D) -> logits (N, C).

    Args:
        classifier: h, a linear classifier of D channels.
        channel_ratio: Fraction of the channels that an item keeps.
    """

    def __init__(self, classifier: nn.Linear, channel_ratio: float) -> None:
        super().__init__()
        self.scorer = nn.Linear(classifier.in_features, classifier.out_features)
        self.classifier = classifier
        self.kept = max(1, int(classifier.in_features * channel_ratio))

    def forward(self, features: Tensor) -> Tensor:
        return self.classifier(features * self.mask(self.scorer(features).argmax(-1)))

    def mask(self, classes: Tensor) -> Tensor:
        """0/1 (N, D): the channels that matter most to each class (N,). Carries no gradient."""
        scores = self.scorer.weight.detach()[classes]
        return torch.zeros_like(scores).scatter_(-1, scores.topk(self.kept, dim=-1).indices, 1.0)


def add_selective_head(model: nn.Module, channel_ratio: float) -> nn.Module:
    """Put a SelectiveHead in the place of a timm model's linear classifier; in place, returned.

    Raises:
        UserError: the model does not give its features, or has no linear classifier.
    """
    classifier = classifier_of(model, "dmda")
    path = next(name for name, module in model.named_modules() if module is classifier)
    model.set_submodule(path, SelectiveHead(classifier, channel_ratio))
    return model


class DMDA(Algorithm):
    """Trains a model with a SelectiveHead; the class expert, its embedding and the approximator are for training."""

    def build(self, num_classes: int, options: AlgorithmConfig, make_model: Callable[[], nn.Module]) -> None:
        self.options = options.dmda
        channels = self.head.classifier.in_features
        wide, hidden = self.options.expert_dim, self.options.approximator_dim
        self.extra["expert"] = _mlp([channels, wide, wide // 4, num_classes], bias=False)
        self.extra["embedding"] = nn.Linear(num_classes, channels)
        self.extra["approximator"] = _mlp([channels, hidden, hidden, self.environments], bias=True)

    @classmethod
    def deployed(cls, options: AlgorithmConfig) -> dict[str, Any]:
        return {"channel_ratio": options.dmda.channel_ratio}

    @classmethod
    def adapt(cls, model: nn.Module, deployed: Mapping[str, Any]) -> nn.Module:
        ratio = deployed.get("channel_ratio")
        return model if ratio is None else add_selective_head(model, ratio)

    @property
    def head(self) -> SelectiveHead:
        model: Any = self.model
        return model.get_classifier()

    def forward(self, inputs: dict[str, Tensor], labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
        features, head = pooled_features(self.model, inputs), self.head
        mask = head.mask(labels)
        kept = features * mask
        class_loss = F.cross_entropy(head.classifier(kept).float(), labels)
        scorer_loss = F.cross_entropy(head.scorer(features).float(), labels)
        expert_logits = self.extra["expert"](kept).float()
        expert_loss = F.cross_entropy(expert_logits, labels)
        semantics = (expert_logits / self.options.temperature).softmax(-1).to(kept.dtype)
        pair = kept + self.extra["embedding"](semantics) * mask
        environment_logits = self.extra["approximator"](ReversedGradient.apply(pair, self.alignment_strength(step)))
        alignment_loss = F.cross_entropy(environment_logits.float(), self.environment_of(labels))
        with torch.no_grad():  # without the labels, as deployed
            logits = head(features)
        return class_loss + alignment_loss + expert_loss + self.options.scorer_weight * scorer_loss, logits

    def alignment_strength(self, step: int) -> float:
        """From 0 at the first step towards 1; 1 throughout without a warm-up."""
        scale = self.options.warmup_steps
        return 2.0 / (1.0 + math.exp(-step / scale)) - 1.0 if scale else 1.0


class ReversedGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by -strength (Ganin and Lempitsky, ICML 2015)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradient, None


def _mlp(widths: list[int], bias: bool) -> nn.Sequential:
    """Linear layers of these widths with LayerNorm and ReLU between them."""
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(zip(widths[:-1], widths[1:], strict=True), start=2):
        layers.append(nn.Linear(before, after, bias=bias))
        layers += [nn.LayerNorm(after), nn.ReLU()] if number < len(widths) else []
    return nn.Sequential(*layers)
