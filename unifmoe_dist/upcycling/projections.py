"""What may be copied into experts: plain nn.Linear maps whose weights are numbers and whose product is all they do."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from unifmoe_dist.errors import UserError
from unifmoe_dist.lending import is_dtensor
from unifmoe_dist.upcycling.adapter import DenseFFN

_NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_projections(ffn: DenseFFN, model: nn.Module) -> None:
    """Refuse an FFN whose maps hold or compute more than their weights say: it would be lost without a word.

    Raises:
        UserError: a projection carries an adapter, is quantised, or has a forward or a weight of its own making.
    """
    for part in (ffn.up, ffn.down):
        if reason := _unfit(part):
            kind = f"{type(part).__module__}.{type(part).__qualname__}"
            raise UserError(f"{_place(part, model)} is a {kind}, {reason}")


def _place(part: nn.Module, model: nn.Module) -> str:
    return next((name for name, module in model.named_modules() if module is part), "a projection of the FFN")


def _unfit(part: nn.Module) -> str | None:
    if hasattr(part, "base_layer"):
        return (
            "which carries an adapter; merge the adapters first (merge_and_unload), or upcycle the model before it "
            "gets adapters."
        )
    if not isinstance(part, nn.Linear):
        return "where upcycling needs torch.nn.Linear; put one with the same weights in its place."
    weight = part.weight
    plain = type(weight) in (nn.Parameter, Tensor) or is_dtensor(weight)
    if weight.dtype not in _NUMBERS or not plain:
        return (
            f"whose weights are quantised ({type(weight).__name__} of {str(weight.dtype).removeprefix('torch.')}); "
            "load the model without quantisation, and upcycle it before it is quantised."
        )
    own = part.__dict__.get("forward")
    hooked = hasattr(part, "_hf_hook")  # Accelerate's, which only brings weights and inputs together
    if type(part).forward is not nn.Linear.forward or (own is not None and not hooked):
        return "which computes more than a linear map in a forward of its own; that would be lost in the experts."
    if parametrize.is_parametrized(part) or "weight" not in part._parameters:
        return (
            "whose weight is computed from other tensors (a parametrisation, weight norm or pruning); make it "
            "permanent first, with torch.nn.utils.parametrize.remove_parametrizations or its like."
        )
    return None
