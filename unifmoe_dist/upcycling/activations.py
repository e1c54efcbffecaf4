"""Naming the activation that a dense FFN uses."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from unifmoe_dist.errors import UserError

# Class or function name, as torch, timm and Transformers spell it -> name in UniFMoEConfig.
_NAMES = {
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "gelu": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "QuickGELU": "quick_gelu",
    "QuickGELUActivation": "quick_gelu",
    "quick_gelu": "quick_gelu",
    "ReLU": "relu",
    "relu": "relu",
    "ReLUSquaredActivation": "relu_squared",
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "Swish": "silu",
    "silu": "silu",
    "Tanh": "tanh",
    "tanh": "tanh",
    "Identity": "identity",
    "LinearActivation": "identity",
}


def activation_name(activation: nn.Module | Callable[[Tensor], Tensor]) -> str:
    """Name of an activation module or function.

    Raises:
        UserError: The activation has no counterpart in the layer.
    """
    if isinstance(activation, nn.GELU) and activation.approximate == "tanh":
        return "gelu_tanh"
    if activation is functional.gelu:
        return "gelu"
    spelled = getattr(activation, "__name__", type(activation).__name__)
    if spelled not in _NAMES:
        known = ", ".join(sorted(set(_NAMES.values())))
        raise UserError(f"The FFN's activation {spelled} is not supported; a UniF-MoE layer offers {known}.")
    return _NAMES[spelled]
