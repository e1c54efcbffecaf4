"""From a method's name and its options to its layer, and what a saved model tells of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from torch.distributed import ProcessGroup

from unifmoe_dist.config import ModelConfig
from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_layer import ExpertLayer
from unifmoe_dist.lazy import load
from unifmoe_dist.methods.registry import EVERY_LAYER, UNIF, method_of


def layer_class(name: str) -> type[ExpertLayer]:
    """The class of a method's layer.

    Raises:
        UserError: there is no such method, or it has no layer.
    """
    method = method_of(name)
    if method.layer is None:
        raise UserError(f"method {name} is {method.title.lower()} and has no layer; choose another.")
    return load(f"unifmoe_dist.{method.layer}")


def build_layer(
    method: str, shape: Mapping[str, Any], options: Mapping[str, Any], group: ProcessGroup | None, dispatcher: str
) -> ExpertLayer:
    """A new layer.

    Args:
        method: Its name in the registry.
        shape: `DenseFFN.shape()` of the FFN in whose place it comes.
        options: Options by name, of which it takes the method's; those that are left out are its defaults.
        group: Ranks that share the experts; None keeps all of them here.
        dispatcher: How tokens reach experts on other ranks.
    """
    layer = layer_class(method)
    config = layer.config_type.from_options({**method_of(method).taken(options), **shape})
    return layer(config, group, dispatcher)


def check_taken(method: str, options: Iterable[str]) -> None:
    """Refuse options that the method does not have."""
    own = (*EVERY_LAYER, *method_of(method).options)
    for name in options:
        if name not in own:
            raise UserError(f"{name} is no option of method {method}; it has {', '.join(own)}.")


def noted(method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a saved model tells of its layers: the method but UniF-MoE, and options that are not the default.

    Options that are another default in earlier versions are told in any case. `saved_arguments` reads it.
    """
    defaults = {field.name: field.default for field in fields(ModelConfig)}
    former = layer_class(method).config_type.former_options(500)
    told = {**{name: defaults[name] for name in former}, **options}
    always = {"num_experts", "num_blocks", *former}
    entry = {n: v for n, v in told.items() if n in always or n not in defaults or v != defaults[n]}
    return entry if method == UNIF.name else {"method": method, **entry}


def saved_arguments(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `upcycle`, without its layers, for layers like those of which a saved model tells."""
    method = entry.get("method", UNIF.name)
    return {"method": method, **saved_options(method, entry)}


def saved_options(method: str, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a model was saved with; those that its version did not know are what it did without them."""
    former = layer_class(method).config_type.former_options(saved.get("expansion_steps", 500))
    return {**former, **method_of(method).taken(saved)}
