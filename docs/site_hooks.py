"""What mkdocs does to pages while it builds the site: above all, it makes the option reference from the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from docstring_parser import parse

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.config.checked import words_of

MARKER = "<!-- options -->"
TITLES = {
    "": "The run",
    "model": "The model",
    "data": "The data",
    "algorithm": "Training algorithms",
    "optim": "Optimisation",
    "parallel": "Ranks, precision and memory",
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables where a page asks for them."""
    return markdown.replace(MARKER, option_tables()) if MARKER in markdown else markdown


def on_page_content(html: str, **_: Any) -> str:
    """Keep short code on one line: a browser would break `--held-out` after any hyphen."""
    return re.sub(r"<code>(?=[^<]{1,32}</code>)", '<code class="short">', html)


def option_tables() -> str:
    """Every option of a training run, a table for each group."""
    groups: dict[str, list[Option]] = {}
    for option in options(TrainConfig):
        groups.setdefault(option.name.split(".")[0] if "." in option.name else "", []).append(option)
    parts = []
    for group, members in groups.items():
        heading = TITLES.get(group, group)
        rows = [f"| `--{o.name}` | {_cell(o.values)} | {_default(o.default)} | {_cell(o.text)} |" for o in members]
        table = "\n".join(["| option | values | default | what it does |", "| --- | --- | --- | --- |", *rows])
        parts.append(f"## {heading}{f' (`{group}`)' if group else ''}\n\n{table}")
    return "\n\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _default(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value) if isinstance(value, tuple) else value)


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
