"""Options of what is trained."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import model_validator

from unifmoe_dist.config.checked import A_LIST, Count, CountOrNull, Fraction, PositiveOrNull, Rate, WholeOrNull, checked
from unifmoe_dist.config.layers import AdaptEvery, BlockChoice, LoadLoss, SharedDemand, WindowOrNull
from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.registry import REGISTRY, UNIF, Method, method_of

MoEName: TypeAlias = Literal[tuple(REGISTRY)]  # type: ignore[valid-type]


@checked(group="model.")
class ModelConfig:
    """What is trained.

    Args:
        backbone: Name of the dense model, in timm or on the Hugging Face hub; null takes the task's own.
        pretrained: Folder or file of the backbone's weights, or none for random ones; null takes those that the task
            names.
        dropout: Dropout throughout the backbone: of embeddings and of the outputs of attention and FFNs.
        hidden_dropout: Dropout of the hidden channels of the MoE layers' experts, after the activation.
        drop_path: Stochastic-depth rate of a vision backbone.
        train_from: First transformer layer that is trained; embeddings and the layers below stay as they are. null
            trains everything.
        moe: Which layer replaces the chosen FFNs; none trains the dense model.
        layers: Zero-based indices of the transformer layers to upcycle.
        num_experts: Number K of (residual) experts; dynmoe and mass start with so many.
        num_blocks: Number B of blocks per expert.
        top_k: Experts per token of the layers that route to a fixed number (topk, gmoe, emoe, emoe_learn).
        max_experts: Most experts of the layers that add some in training (dynmoe, mass); null takes num_experts + 2.
        load_loss: What the load loss of gmoe, emoe and emoe_learn compares with the weakest chosen logit: probabilities
            as in the authors' code (tutel), or logits as in the paper that it comes from (shazeer).
        adapt_every: Steps between decisions of dynmoe to add and remove experts; 0 makes none, epoch one each epoch.
        gate_temperature: Whether dynmoe's gate learns a temperature.
        mass_threshold: Routing mass that the experts of a token reach together in mass.
        mass_window: Steps over which mass watches gradients; null takes the authors' share of the run.
        mass_warmup: Steps before mass judges an expert's gradient; null takes the authors' share of the run.
        shared_demand: Fixed alpha of UniF-MoE, an ablation; null adapts it to the token.
        fixed_experts: Fixed number k of residual experts of UniF-MoE, an ablation; null adapts it to the token.
        block_choice: How UniF-MoE chooses shared blocks: by prototype, or the first ones (prefix, an ablation).
        dispatcher: How tokens reach experts on other ranks.
        capacity_factor: Largest load of an expert in training, as a multiple of the mean load of a rank's tokens; the
            weakest assignments beyond it are dropped. null drops nothing.
    """

    backbone: str | None = None
    pretrained: str | None = None
    dropout: Rate = 0.0
    hidden_dropout: Rate = 0.0
    drop_path: Rate = 0.0
    train_from: WholeOrNull = None
    moe: MoEName = "unif"
    layers: Annotated[list[int], A_LIST] = field(default_factory=lambda: [3, 5])
    num_experts: Count = 6
    num_blocks: Count = 8
    top_k: int = 2
    max_experts: CountOrNull = None
    load_loss: LoadLoss = "tutel"
    adapt_every: AdaptEvery = 1
    gate_temperature: bool = False
    mass_threshold: Fraction = 0.3
    mass_window: WindowOrNull = None
    mass_warmup: WholeOrNull = None
    shared_demand: SharedDemand = None
    fixed_experts: CountOrNull = None
    block_choice: BlockChoice = "prototype"
    dispatcher: Literal["auto", "local", "alltoall", "tutel", "two_level"] = "auto"
    capacity_factor: PositiveOrNull = None

    def most_experts(self) -> int:
        """max_experts, or what null stands for."""
        return self.num_experts + 2 if self.max_experts is None else self.max_experts

    @model_validator(mode="after")
    def _fits_its_method(self) -> Self:
        method = method_of(self.moe)
        if method.layer is None:
            return self
        if not self.layers:
            raise UserError("model.layers is empty; name at least one layer or set model.moe none.")
        self._refuse_others(method)
        experts = f"model.num_experts {self.num_experts}"
        if "top_k" in method.options and not 1 <= self.top_k <= self.num_experts:
            raise UserError(f"model.top_k {self.top_k} must be from 1 to {experts}.")
        if method.grows and self.most_experts() < self.num_experts:
            raise UserError(
                f"model.max_experts {self.max_experts} is below {experts}, the experts that {method.name} starts with."
            )
        if self.fixed_experts is not None and self.fixed_experts > self.num_experts:
            raise UserError(f"model.fixed_experts {self.fixed_experts} must be null or from 1 to {experts}.")
        return self

    def _refuse_others(self, method: Method) -> None:
        """Options of this project's own layer mean nothing in the others."""
        for name in UNIF.options:
            value = getattr(self, name)
            if name in method.options or value == getattr(ModelConfig, name):
                continue
            if name == "capacity_factor":
                raise UserError(f"model.{name} {value} belongs to model.moe {UNIF.name}; {method.name} drops no token.")
            raise UserError(
                f"model.{name} {value} is an ablation of model.moe {UNIF.name} and would change nothing in "
                f"{method.name}; leave it out."
            )
