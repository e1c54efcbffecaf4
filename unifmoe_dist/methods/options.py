"""What a method does with the model options of a run: those that it lacks must be left out, the others must fit."""

from __future__ import annotations

from typing import Any

from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.registry import UNIF, Method


def check_options(method: Method, model: Any, auxiliary_weight: float | None) -> None:
    """Refuse options that the method does not have, or that contradict each other.

    Args:
        method: What `model.moe` names; it has a layer.
        model: The `ModelConfig`.
        auxiliary_weight: `optim.auxiliary_weight`.

    Raises:
        UserError: with one sentence.
    """
    if auxiliary_weight is not None and not 0 <= auxiliary_weight < float("inf"):
        raise UserError(f"optim.auxiliary_weight must be at least 0 or null, not {auxiliary_weight}.")
    if auxiliary_weight is not None and method.shared:
        raise UserError(
            f"optim.auxiliary_weight {auxiliary_weight} belongs to the other MoE layers; the loss of model.moe "
            f"{method.name} is weighted by optim.lambda_div."
        )
    for name in UNIF.options:
        value = getattr(model, name)
        if name in method.options or value == getattr(type(model), name):
            continue
        if name == "capacity_factor":
            raise UserError(f"model.{name} {value} belongs to model.moe {UNIF.name}; {method.name} drops no token.")
        raise UserError(
            f"model.{name} {value} is an ablation of model.moe {UNIF.name} and would change nothing in {method.name}; "
            "leave it out."
        )
    for name in method.options:
        if words := _misfit(name, method, model):
            raise UserError(f"model.{name} {words}")


def _misfit(name: str, method: Method, model: Any) -> str | None:
    """What is wrong with the value of an option, or None."""
    experts: int = model.num_experts
    value: Any = getattr(model, name, None)
    if name == "top_k" and not 1 <= value <= experts:
        return f"{value} must be from 1 to model.num_experts {experts}."
    if name == "max_experts" and model.most_experts() < experts:
        return f"{value} is below model.num_experts {experts}, the experts that {method.name} starts with."
    if name == "adapt_every" and value != "epoch" and value < 0:
        return f"must be at least 0 or epoch, not {value}."
    if name == "mass_threshold" and not 0 < value <= 1:
        return f"must be above 0 and at most 1, not {value}."
    least = {"mass_window": 2, "mass_warmup": 0}.get(name)
    if least is not None and value is not None and value < least:
        return f"must be at least {least} or null, not {value}."
    return None
