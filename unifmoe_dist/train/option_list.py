"""Every option of a training run as data, from the configuration classes: name, type, default and explanation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from docstring_parser import parse

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.config.checked import words_of


@dataclass(frozen=True)
class Option:
    """One option: its dotted name, its annotation, its default and the class's explanation."""

    name: str
    type: Any
    default: Any
    text: str

    @property
    def may_be_null(self) -> bool:
        return type(None) in get_args(self.type)

    @property
    def values(self) -> str:
        """What it may be, in words."""
        return " or ".join(words_of(self.type))


def options(cls: Any = TrainConfig, prefix: str = "") -> Iterator[Option]:
    """The options of a configuration class, group by group, in the order in which they are written there."""
    hints = get_type_hints(cls)
    explained = {parameter.arg_name: parameter.description or "" for parameter in parse(cls.__doc__ or "").params}
    groups = []
    for field in fields(cls):
        kind = hints[field.name]
        if is_dataclass(kind):
            groups.append((kind, f"{prefix}{field.name}."))
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        yield Option(prefix + field.name, kind, default, " ".join(explained[field.name].split()))
    for kind, name in groups:
        yield from options(kind, name)
