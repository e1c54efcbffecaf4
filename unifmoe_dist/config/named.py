"""Options by dotted name, such as optim.lr, as command lines and files have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any, TypeVar, get_type_hints

Options = TypeVar("Options")


def by_dotted_name(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Options in groups, as a configuration holds them, by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        flat |= by_dotted_name(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def kinds_of(cls: Any, prefix: str = "") -> dict[str, Any]:
    """Types of the options of a class, by dotted name."""
    flat: dict[str, Any] = {}
    for name, kind in get_type_hints(cls).items():
        flat |= kinds_of(kind, f"{prefix}{name}.") if is_dataclass(kind) else {prefix + name: kind}
    return flat


def as_word(value: Any) -> str:
    """A value as YAML has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def made_of(cls: type[Options], options: Mapping[str, Any]) -> Options:
    """An object of a class of options with these, by dotted name, and defaults for the rest.

    Raises:
        UserError: they do not fit.
    """
    own: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for dotted, value in options.items():
        name, dot, rest = dotted.partition(".")
        if dot:
            groups.setdefault(name, {})[rest] = value
        else:
            own[name] = value
    kinds = get_type_hints(cls) if groups else {}
    return cls(**own, **{name: made_of(kinds[name], inner) for name, inner in groups.items()})


def with_options(config: Options, options: Mapping[str, Any]) -> Options:
    """A copy of a configuration with options changed by dotted name, all at once.

    Raises:
        KeyError: an option does not exist.
        UserError: they do not fit.
    """
    flat = by_dotted_name(asdict(config))  # type: ignore[call-overload]
    if unknown := options.keys() - flat.keys():
        raise KeyError(min(unknown))
    return made_of(type(config), {**flat, **options})
