"""Options as a flat list of names and words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def by_dotted_name(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Options in groups, as a configuration holds them, by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        flat |= by_dotted_name(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def as_word(value: Any) -> str:
    """A value as YAML has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
