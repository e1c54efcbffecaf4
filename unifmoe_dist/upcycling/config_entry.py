"""What a saved Transformers model tells about its upcycling: `config.unif_moe`, one entry per call.

`save_pretrained` writes it into config.json, together with an activation's name that only this package knows: see
`saving`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import distributed, nn
from torch.distributed import ProcessGroup

KEY = "unif_moe"
_MARK = ", in UniF-MoE layers: call unifmoe_dist.enable_from_pretrained() first"
_FORMER_MARK = ", in UniF-MoE layers: import unifmoe_dist first"


def note(model: nn.Module, entry: dict[str, Any], group: ProcessGroup | None) -> bool:
    """Add an entry to a Transformers model's config; whether the model has one (of others, nothing happens).

    The model gets a config of its own, so that a dense twin built from the same object stays dense.
    """
    old = getattr(model, "config", None)
    size = 1 if group is None else distributed.get_world_size(group)
    if not hasattr(old, "to_json_string"):
        return False
    _extend(model, [{**entry, "expert_parallel_size": size, "flat_biases": True}])
    return True


def adopt(model: nn.Module, entries: list[dict[str, Any]]) -> None:
    """Add those entries of a part of the model that tell of layers of which the model's config does not."""
    told = {index for entry in getattr(model.config, KEY, None) or [] for index in entry["layers"]}
    if new := [entry for entry in entries if not told.intersection(entry["layers"])]:
        _extend(model, new)


def _extend(model: nn.Module, entries: list[dict[str, Any]]) -> None:
    old: Any = model.config
    new = copy.deepcopy(old)
    setattr(new, KEY, [*(getattr(old, KEY, None) or []), *entries])
    mark(new)
    module: Any
    for module in model.modules():
        if module.__dict__.get("config") is old:
            module.config = new


def without_notes(config: Any) -> Any:
    """A copy of a config as the dense model's: no notes, and the activation by its own name."""
    dense = copy.deepcopy(config)
    if hasattr(dense, KEY):
        delattr(dense, KEY)
        _rename(dense, unmarked)
    return dense


def mark(config: Any) -> None:
    """Name the activation of an upcycled model's config so that Transformers alone cannot build it."""
    _rename(config, marked)


def _rename(config: Any, change: Callable[[str], str]) -> None:
    for attribute in ("hidden_act", "activation", "activation_function", "hidden_activation"):
        name = getattr(config, attribute, None)
        if isinstance(name, str):
            setattr(config, attribute, change(name))


def unmarked(name: str) -> str:
    """An activation's own name, of the name that an upcycled model's config has."""
    return name.removesuffix(_MARK).removesuffix(_FORMER_MARK)


def marked(name: str) -> str:
    """An activation's name as an upcycled model's config has it."""
    return unmarked(name) + _MARK


def marked_as_before(name: str) -> str:
    """An activation's name as the configs of earlier versions have it."""
    return unmarked(name) + _FORMER_MARK
