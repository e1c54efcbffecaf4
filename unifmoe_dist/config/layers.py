"""Shapes of layers of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from unifmoe_dist.config.checked import Count, CountOrNull, PositiveOrNull, Rate, Whole, checked
from unifmoe_dist.errors import UserError

ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared", "silu", "tanh", "identity")

# Options that a layer and a run share.
SharedDemand: TypeAlias = Annotated[float | None, Field(gt=0, lt=1)]
BlockChoice: TypeAlias = Literal["prototype", "prefix"]
LoadLoss: TypeAlias = Literal["tutel", "shazeer"]
AdaptEvery: TypeAlias = Whole | Literal["epoch"]
Window: TypeAlias = Annotated[int, Field(ge=2)]
WindowOrNull: TypeAlias = Annotated[int | None, Field(ge=2)]


def _known(activation: str) -> str:
    if activation not in ACTIVATIONS:
        raise UserError(f"activation {activation!r} is not known; choose one of {', '.join(ACTIVATIONS)}.")
    return activation


@checked(frozen=True)
class ExpertLayerConfig:
    """Shape of a layer of experts that takes the place of a dense FFN.

    Args:
        model_dim: Token width d.
        hidden_dim: Hidden width H of the dense FFN.
        num_experts: Number K of (residual) experts.
        num_blocks: Number B of equal parts of a dense FFN in which the cost of a token is counted.
        activation: Activation between the two projections, by name.
        bias: Whether the projections have biases.
        hidden_dropout: Rate at which activated channels of executed experts are dropped in training, before the second
            projection.
        gated: Whether the activation is that of a gate: its value is multiplied with the first projection's (SwiGLU,
            GeGLU and the like).
    """

    model_dim: Count
    hidden_dim: Count
    num_experts: Count = 6
    num_blocks: Count = 8
    activation: Annotated[str, AfterValidator(_known)] = "gelu"
    bias: bool = True
    hidden_dropout: Rate = field(default=0.0, kw_only=True)
    gated: bool = field(default=False, kw_only=True)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """From the shape of a dense FFN and the options of a method, by the names of `ModelConfig`; None is not given.

        The same names here unless a subclass says otherwise.
        """
        return cls(**options)

    @classmethod
    def run_options(cls, steps: int, family: str) -> Mapping[str, Any]:
        """Options that follow from a run's steps and the family of its task, where the user sets none."""
        return {}

    @classmethod
    def former_options(cls, expansion_steps: int | None) -> Mapping[str, Any]:
        """What layers of earlier versions did where an option that they did not know has another default by now.

        Args:
            expansion_steps: Of mass; None where it is not known.
        """
        return {}


@checked(frozen=True)
class UniFMoEConfig(ExpertLayerConfig):
    """Shape of one UniF-MoE layer; hidden_dim is the hidden width of every expert.

    Args:
        num_experts: Number K of residual experts; the shared expert comes on top.
        num_blocks: Number B of aligned blocks per expert; must divide hidden_dim and be at least 2.
        capacity_factor: Largest load of an expert in training, as a multiple of the mean load of a rank's tokens; the
            weakest assignments beyond it are dropped. None drops nothing.
        shared_demand: Fixed alpha, an ablation; b is round(B alpha). None adapts it to the token.
        fixed_experts: Fixed number k of residual experts per token, an ablation. None adapts it to the token.
        block_choice: How shared blocks are chosen: by prototype, or the first ones (prefix, an ablation).
    """

    capacity_factor: PositiveOrNull = None
    shared_demand: SharedDemand = None
    fixed_experts: CountOrNull = None
    block_choice: BlockChoice = "prototype"

    @model_validator(mode="after")
    def _blocks_and_experts_fit(self) -> Self:
        if self.num_blocks < 2:
            raise UserError(
                f"num_blocks must be a whole number of at least 2, not {self.num_blocks}: with fewer, no block is left "
                "to share or to route."
            )
        if self.hidden_dim % self.num_blocks:
            raise UserError(
                f"hidden_dim {self.hidden_dim} is not divisible by num_blocks {self.num_blocks}; "
                f"choose a num_blocks that divides {self.hidden_dim}."
            )
        if self.num_experts + 1 > self.model_dim:
            raise UserError(
                f"num_experts {self.num_experts} needs num_experts + 1 orthonormal router columns of width model_dim "
                f"{self.model_dim}; use at most {self.model_dim - 1} experts."
            )
        if self.fixed_experts is not None and self.fixed_experts > self.num_experts:
            raise UserError(
                f"fixed_experts must be from 1 to num_experts {self.num_experts}, or null to adapt it to the token, "
                f"not {self.fixed_experts}."
            )
        return self

    @property
    def block_dim(self) -> int:
        """Hidden channels M = H / B in one block."""
        return self.hidden_dim // self.num_blocks
