"""What runs of earlier versions did where the options that their config.yaml lacks have another default by now.

Every run writes out all options that it knows, so a file that lacks one comes from a version without it. A file that
was written by hand, or that cannot be read, says nothing here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

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


def unwritten_words(path: Path) -> list[str]:
    """`unwritten` of a run's config.yaml as words of a command line."""
    try:
        written = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return []  # whoever parses it says what is wrong
    if not isinstance(written, dict) or not isinstance(written.get("model"), dict):
        return []
    flat = {**written, **{f"model.{name}": value for name, value in written["model"].items()}}
    return [f"--{name}={str(value).lower()}" for name, value in unwritten(flat).items()]
