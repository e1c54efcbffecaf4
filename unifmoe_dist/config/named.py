"""Options by dotted name, such as optim.lr, as command lines and files have them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from unifmoe_dist.config.checked import words_of

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


@dataclass(frozen=True)
class Option:
    """One option for readers: its dotted name, type and default, and what its class says of it and of itself."""

    name: str
    kind: Any
    default: Any
    text: str
    group: str

    @property
    def may_be_null(self) -> bool:
        return type(None) in get_args(self.kind)

    @property
    def values(self) -> str:
        """What it may be, in words."""
        return " or ".join(words_of(self.kind))


def described(cls: Any, prefix: str = "") -> Iterator[Option]:
    """The options of a class, group by group, in the order in which they are written there."""
    title, _, rest = cls.__doc__.partition("\n")
    texts = dict(re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", rest, re.M))
    kinds, groups = get_type_hints(cls), []
    for field in fields(cls):
        name, kind = prefix + field.name, kinds[field.name]
        if is_dataclass(kind):
            groups.append((kind, f"{name}."))
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        yield Option(name, kind, default, " ".join(texts[field.name].split()), title.rstrip("."))
    for kind, name in groups:
        yield from described(kind, name)


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
