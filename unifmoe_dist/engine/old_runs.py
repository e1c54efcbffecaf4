"""What runs of earlier versions did where the options that their config.yaml lacks have another default by now."""

from __future__ import annotations

from pathlib import Path

import yaml


def unwritten_options(path: Path) -> list[str]:
    """Words that complete a run's config.yaml.

    Every run writes out all options it knows; a file that lacks one, or that cannot be read, says nothing here.
    """
    try:
        written = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return []  # whoever parses it says what is wrong
    model = written.get("model") if isinstance(written, dict) else None
    if not isinstance(model, dict) or "adapt_every" not in model:  # written by hand
        return []
    if model.get("moe") == "dynmoe" and "gate_temperature" not in model:
        return ["--model.gate_temperature=true"]
    return []
