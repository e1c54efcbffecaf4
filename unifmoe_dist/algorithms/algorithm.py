"""What every training algorithm shares: the model that is deployed, what only training needs, and the loss.

Shapes: N items of one rank's (micro-)batch, E training environments, C classes, D feature channels. A batch holds N / E
items of every environment, grouped, in the order of the task's environments, on every rank: so a mean over a rank's
items, averaged over ranks, is the mean over the global batch, and no algorithm depends on the number of ranks.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from unifmoe_dist.config import AlgorithmConfig
from unifmoe_dist.errors import UserError


class Algorithm(nn.Module):
    """One training algorithm around one model.

    Evaluation, export and consolidation see `model` alone. `extra` holds the modules that only training needs: they
    are trained, saved and resumed like the model, under names of their own.

    Args:
        model: The model to train; `adapt` has been applied to it.
        environments: Number E of training environments.
        num_classes: Number C of classes.
        options: Options of all algorithms; each reads its own.
        make_model: Makes another model like `model`, with new random parts.
    """

    needs_environments: ClassVar[bool] = True
    """Whether it compares environments, and so needs at least two."""

    def __init__(
        self,
        model: nn.Module,
        environments: int,
        num_classes: int,
        options: AlgorithmConfig,
        make_model: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        self.model = model
        self.environments = environments
        self.extra = nn.ModuleDict()
        self.build(num_classes, options, make_model)

    def build(self, num_classes: int, options: AlgorithmConfig, make_model: Callable[[], nn.Module]) -> None:
        """Read its options and fill `extra`; by default, nothing."""

    @classmethod
    def deployed(cls, options: AlgorithmConfig) -> dict[str, Any]:
        """What `adapt` needs to know, by names of its own; exported models tell it."""
        return {}

    @classmethod
    def adapt(cls, model: nn.Module, deployed: Mapping[str, Any]) -> nn.Module:
        """The model with what this algorithm deploys besides the backbone; by default, nothing. In place."""
        return model

    def forward(self, inputs: dict[str, Tensor], labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The loss of one batch, and the logits of the model that is deployed.

        Args:
            inputs: The model's keyword arguments, each (N, ...).
            labels: (N,) int64.
            step: Optimiser steps done before this one.

        Returns:
            A float32 scalar, a mean over the batch, and logits (N, C).
        """
        raise NotImplementedError

    def environment_of(self, labels: Tensor) -> Tensor:
        """Index (N,) of each item's environment, which follows from its place in the batch."""
        return torch.arange(self.environments, device=labels.device).repeat_interleave(self._share(labels))

    def per_environment(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """A tensor (N, ...) in E parts (N / E, ...), one per environment."""
        return tensor.split(self._share(tensor))

    def _share(self, tensor: Tensor) -> int:
        if len(tensor) == 0 or len(tensor) % self.environments:
            raise ValueError(f"a batch of {len(tensor)} items does not hold {self.environments} environments equally")
        return len(tensor) // self.environments


def pooled_features(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Features (N, D) that the classifier of a timm model sees; checked by `classifier_of`."""
    (images,) = inputs.values()
    timm_model: Any = model
    return timm_model.forward_head(timm_model.forward_features(images), pre_logits=True)


def classifier_of(model: nn.Module, algorithm: str) -> nn.Linear:
    """The linear classifier of a timm model, which maps `pooled_features` to logits.

    Raises:
        UserError: the model does not give its features, or has another classifier.
    """
    for method in ("forward_features", "forward_head", "get_classifier"):
        if not hasattr(model, method):
            raise UserError(
                f"algorithm.name {algorithm} works on features that it takes through timm's {method}, which "
                f"{type(model).__name__} lacks; use a timm backbone, or algorithm.name erm."
            )
    classifier = model.get_classifier()  # type: ignore[operator]
    if not isinstance(classifier, nn.Linear):
        raise UserError(
            f"algorithm.name {algorithm} needs a linear classifier on one vector of features, but that of "
            f"{type(model).__name__} is {type(classifier).__name__}; use another backbone, or algorithm.name erm."
        )
    return classifier
