"""A dense FFN found in a model, what of it may be copied into experts, and what an adapter of a model family provides.

What is copied are plain nn.Linear maps whose weights are numbers and whose product is all they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from unifmoe_dist.errors import UserError
from unifmoe_dist.lending import is_dtensor

CONV1D = "transformers.pytorch_utils.Conv1D"
"""GPT-2's linear map, whose weight is (in, out)."""
FALCON_LINEAR = "transformers.models.falcon.modeling_falcon.FalconLinear"
"""A linear map in a forward of its own."""
_ADAPTED = (
    "which carries an adapter; merge the adapters first (merge_and_unload), or upcycle the model before it gets "
    "adapters."
)
_NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SPELLINGS = {
    "gelu": "GELU GELUActivation gelu",
    "gelu_tanh": "GELUTanh NewGELUActivation PytorchGELUTanh gelu_tanh",
    "quick_gelu": "QuickGELU QuickGELUActivation quick_gelu",
    "relu": "ReLU relu",
    "relu_squared": "ReLUSquaredActivation",
    "silu": "SiLU SiLUActivation Swish silu",
    "tanh": "Tanh tanh",
    "identity": "Identity LinearActivation",
}
"""Names in UniFMoEConfig, and how classes and functions of torch, timm and Transformers spell them."""


def activation_name(activation: nn.Module | Callable[[Tensor], Tensor]) -> str:
    """Name of an activation module or function. Raises UserError where it has no counterpart in the layer."""
    if isinstance(activation, nn.GELU) and activation.approximate == "tanh":
        return "gelu_tanh"
    if activation is functional.gelu:
        return "gelu"
    spelled = getattr(activation, "__name__", type(activation).__name__)
    for name, spellings in _SPELLINGS.items():
        if spelled in spellings.split():
            return name
    known = ", ".join(sorted(_SPELLINGS))
    raise UserError(f"The FFN's activation {spelled} is not supported; a UniF-MoE layer offers {known}.")


@dataclass(frozen=True)
class DenseFFN:
    """A dense FFN found in a model: up (d -> H), activation by name, down (H -> d).

    Of a gated one, down(act(gate(x)) * up(x)), also its gate (d -> H).
    """

    up: nn.Linear
    down: nn.Linear
    activation: str
    gate: nn.Linear | None = None
    held_by: tuple[Any, ...] = ()

    @property
    def sources(self) -> tuple[Any, ...]:
        """The modules of the model that hold the projections' weights: the projections, unless `held_by` names others.

        One module may hold gate and up, or hold a weight transposed.
        """
        return self.held_by or self.projections

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        """Up and down, and the gate if there is one: in the order in which layers take their weights."""
        return (self.up, self.down) if self.gate is None else (self.up, self.down, self.gate)

    def shape(self) -> dict[str, Any]:
        """Its part of an `ExpertLayerConfig`."""
        return {
            "model_dim": self.up.in_features,
            "hidden_dim": self.up.out_features,
            "activation": self.activation,
            "bias": any(part.bias is not None for part in self.projections),
            "gated": self.gate is not None,
        }

    @classmethod
    def of(cls, up: Any, activation: nn.Module | Callable[[Tensor], Tensor], down: Any, gate: Any = None) -> DenseFFN:
        """The parts of an FFN; whether its projections can be copied is checked by `upcycle`, for every adapter."""
        return cls(up, down, activation_name(activation), gate)


class Adapter(Protocol):
    """Knows one model family."""

    name: str  # as shown to people

    def matches(self, model: Any) -> bool:
        """Whether this adapter can handle the model."""
        ...

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        """The transformer layers, in order."""
        ...

    def read(self, block: Any) -> DenseFFN:
        """The dense FFN of one transformer layer. Raises UserError where it is of an unsupported kind."""
        ...

    def install(self, block: Any, layer: nn.Module) -> None:
        """Put a UniF-MoE layer in place of the FFN, keeping what surrounds it (dropout, norms, residual)."""
        ...


def check_projections(ffn: DenseFFN, model: nn.Module) -> None:
    """Refuse an FFN whose maps hold or compute more than their weights say: it would be lost without a word.

    Raises:
        UserError: a projection carries an adapter, is quantised, or has a forward or a weight of its own making.
    """
    for part in ffn.sources:
        if reason := unfit(part):
            raise UserError(f"{_place(part, model)} is a {kind_of(part)}, {reason}")


def refuse_adapted(model: nn.Module) -> None:
    """Refuse a model into which PEFT has put modules: it finds them by names and shapes that upcycling changes.

    Raises:
        UserError: naming the first.
    """
    for name, module in model.named_modules():
        if type(module).__module__.startswith("peft."):
            raise UserError(f"{name} is a {kind_of(module)}, {_ADAPTED}")


def _place(part: nn.Module, model: nn.Module) -> str:
    return next((name for name, module in model.named_modules() if module is part), "a projection of the FFN")


def kind_of(part: Any) -> str:
    return f"{type(part).__module__}.{type(part).__qualname__}"


def unfit(part: Any) -> str | None:
    """Why a projection cannot be copied, as the rest of a sentence that names it; None where it can."""
    if hasattr(part, "base_layer"):
        return _ADAPTED
    if not isinstance(part, nn.Linear) and kind_of(part) != CONV1D:
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
    linear = type(part).forward is nn.Linear.forward or kind_of(part) in (CONV1D, FALCON_LINEAR)
    if not linear or (own is not None and not hooked):
        return "which computes more than a linear map in a forward of its own; that would be lost in the experts."
    if parametrize.is_parametrized(part) or "weight" not in part._parameters:
        return (
            "whose weight is computed from other tensors (a parametrisation, weight norm or pruning); make it "
            "permanent first, with torch.nn.utils.parametrize.remove_parametrizations or its like."
        )
    return None
