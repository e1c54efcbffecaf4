"""What mkdocs does to pages while it builds the site: above all, it makes the option reference from the code."""

from __future__ import annotations

import re
from typing import Any

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.config.named import Option, described

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
    for option in described(TrainConfig):
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
