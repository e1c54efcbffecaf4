"""What runs of earlier versions did where the options that their config.yaml lacks have another default by now.

Every run writes out all options that it knows, so a file that lacks one comes from a version without it. A file that
was written by hand, or that cannot be read, says nothing here.
"""

from collections.abc import Mapping
from typing import Any

from unifmoe_dist.config import ModelConfig
from unifmoe_dist.methods.registry import REGISTRY


def unwritten(written: Mapping[str, Any]) -> dict[str, Any]:
    """Options, by dotted name, that complete those that a run wrote, given by dotted name too."""
    if "model.adapt_every" not in written:  # written by hand
        return {}
    steps = written.get("steps")
    expansion = steps // 10 if isinstance(steps, int) and written.get("epochs") is None else None
    method = REGISTRY.get(str(written.get("model.moe")))
    if method is None or all(f"model.{name}" in written for name in method.options if hasattr(ModelConfig, name)):
        return {}
    from unifmoe_dist.upcycling.convert import layer_class  # PyTorch comes with it

    former = layer_class(method.name).config_type.former_options(expansion)
    return {f"model.{name}": value for name, value in former.items() if f"model.{name}" not in written}
