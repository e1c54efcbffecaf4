"""Options of training algorithms."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from unifmoe_dist.algorithms.registry import REGISTRY
from unifmoe_dist.config.checked import Fraction, Positive, Weight, Whole, checked

AlgorithmName: TypeAlias = Literal[tuple(REGISTRY)]  # type: ignore[valid-type]
Width: TypeAlias = Annotated[int, Field(ge=4)]


@checked(group="algorithm.lfme.")
class LFMEConfig:
    """Learning from multiple experts.

    Args:
        guidance_weight: Weight of the squared distance of the model's logits from the experts' probabilities.
    """

    guidance_weight: Weight = 1.0


@checked(group="algorithm.dmda.")
class DMDAConfig:
    """Discriminative microscopic distribution alignment.

    Args:
        channel_ratio: Fraction of the feature channels that selective channel pruning keeps.
        scorer_weight: Weight of the loss of the classifier whose weights choose the channels.
        temperature: Temperature of the class expert's probabilities, which are the latent semantics.
        expert_dim: Width of the class expert's first hidden layer; the second has a quarter of it.
        approximator_dim: Width of the hidden layers that tell environments apart.
        warmup_steps: Scale, in steps, on which the reversed gradient of the alignment grows to its full strength.
    """

    channel_ratio: Fraction = 0.5
    scorer_weight: Weight = 5.0
    temperature: Positive = 4.0
    expert_dim: Width = 512
    approximator_dim: Width = 256
    warmup_steps: Whole = 1000


@checked(group="algorithm.pcmoe.")
class PCMoEConfig:
    """Mixture of environment experts with consistent predictions.

    Args:
        expert_weight: Weight of the loss of each environment's expert on its own items.
        consistency_weight: Weight of the divergence of the model's prediction from that of the other environments'
            experts.
    """

    expert_weight: Weight = 1.0
    consistency_weight: Weight = 1.0


@checked(group="algorithm.")
class AlgorithmConfig:
    """What is minimised besides the layers' own losses.

    Args:
        name: erm is the plain task loss; lfme, dmda and pcmoe are training algorithms for domain generalisation.
        lfme: Options of lfme.
        dmda: Options of dmda.
        pcmoe: Options of pcmoe.
    """

    name: AlgorithmName = "erm"
    lfme: LFMEConfig = field(default_factory=LFMEConfig)
    dmda: DMDAConfig = field(default_factory=DMDAConfig)
    pcmoe: PCMoEConfig = field(default_factory=PCMoEConfig)
