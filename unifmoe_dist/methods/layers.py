"""The paper's other layers by name, and `upcycle` with one of them as earlier versions had it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, TypeVar

from torch import nn
from torch.distributed import ProcessGroup

from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_layer import ExpertLayer
from unifmoe_dist.methods.registry import EVERY_LAYER, REGISTRY, UNIF, method_of
from unifmoe_dist.upcycling.convert import build_layer, saved_options
from unifmoe_dist.upcycling.upcycle import upcycle

Model = TypeVar("Model", bound=nn.Module)


class LayerOptions(SimpleNamespace):
    """Options of layers by name, as `ModelConfig` has them; each method takes those that it reads.

    What is not given here is the method's own default.
    """

    def __init__(self, num_experts: int = 6, num_blocks: int = 8, **options: Any) -> None:
        known = {name for method in REGISTRY.values() for name in (*EVERY_LAYER, *method.options)}
        if unknown := options.keys() - known:
            raise UserError(f"{min(unknown)} is no option of a layer; choose from {', '.join(sorted(known))}.")
        super().__init__(num_experts=num_experts, num_blocks=num_blocks, **options)

    @classmethod
    def from_saved(cls, method: str, saved: Mapping[str, Any]) -> LayerOptions:
        """The options that a model was saved with; those that its version did not know are what it did without them."""
        return cls(**saved_options(method, saved))


Builder = Callable[[Mapping[str, Any], LayerOptions, ProcessGroup | None, str], ExpertLayer]


def _builder(method: str) -> Builder:
    return lambda shape, options, group, dispatcher: build_layer(method, shape, vars(options), group, dispatcher)


MOE_LAYERS: dict[str, Builder] = {
    name: _builder(name) for name, method in REGISTRY.items() if method.layer and method is not UNIF
}
"""What builds the layers of every method but UniF-MoE, by name."""


def upcycle_baseline(
    model: Model, method: str, layers: Iterable[int], options: LayerOptions | None = None, **more: Any
) -> Model:
    """`upcycle(model, layers, method=method, ...)` with options of which the method takes those that it reads."""
    return upcycle(model, layers, method=method, **method_of(method).taken(vars(options or LayerOptions())), **more)
