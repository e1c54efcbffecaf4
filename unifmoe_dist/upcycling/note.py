"""What a saved Transformers model tells about its upcycling: `config.unif_moe`, one entry per call.

`save_pretrained` writes it into config.json.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Unpack

from torch import distributed, nn
from torch.distributed import ProcessGroup

from unifmoe_dist.config import LayerChoices, UniFMoEConfig

KEY = "unif_moe"


def record(
    model: nn.Module,
    layers: list[int],
    num_experts: int,
    num_blocks: int,
    group: ProcessGroup | None,
    **choices: Unpack[LayerChoices],
) -> None:
    """Note an upcycling to UniF-MoE layers in a Transformers model's config."""
    entry: dict[str, Any] = {"layers": layers, "num_experts": num_experts, "num_blocks": num_blocks}
    defaults = {field.name: field.default for field in dataclasses.fields(UniFMoEConfig)}
    entry.update({name: value for name, value in choices.items() if value != defaults[name]})
    note(model, entry, group)


def note(model: nn.Module, entry: dict[str, Any], group: ProcessGroup | None) -> None:
    """Add an entry to a Transformers model's config (other models have none: nothing happens).

    The model gets a config of its own, so that a dense twin built from the same object stays dense.
    """
    old = getattr(model, "config", None)
    if not hasattr(old, "to_json_string"):
        return
    new = copy.deepcopy(old)
    size = 1 if group is None else distributed.get_world_size(group)
    setattr(new, KEY, [*(getattr(old, KEY, None) or []), {**entry, "expert_parallel_size": size}])
    module: Any
    for module in model.modules():
        if module.__dict__.get("config") is old:
            module.config = new
