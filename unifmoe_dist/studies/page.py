"""Reports as one HTML page that needs nothing beside it, with every figure and table as files for other uses.

A report's template (templates/) holds its headings, prose and captions, and hands rows and figures to the macros of
templates/blocks.html. The page holds its images, loads nothing, and runs no script. All strings are plain text: the
templates escape them.
"""

import base64
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from unifmoe_dist.data.metrics import metric_named
from unifmoe_dist.files import write_text
from unifmoe_dist.studies import templating
from unifmoe_dist.studies.figures.style import save
from unifmoe_dist.studies.records import csv_text

PAGE = "report.html"


@dataclass(frozen=True)
class Number:
    """A number as a reader sees it; the page also carries its full value."""

    value: float | None  # None or NaN where there is none
    form: str = ".2f"  # format specification
    beside: str = ""  # small print behind it, for example the paper's number

    @property
    def exists(self) -> bool:
        return self.value is not None and math.isfinite(self.value)

    @property
    def text(self) -> str:
        return format(self.value, self.form).replace("%", " %") if self.exists else "–"


def numbers(start: str, values: Sequence[float], form: str) -> dict[str, Number]:
    """Numbered columns: start0, start1, ..."""
    return {f"{start}{index}": Number(value, form) for index, value in enumerate(values)}


@dataclass(frozen=True)
class Table:
    """Rows of cells by column, as a template adds them; a row may lack some, and its first cell names it."""

    name: str
    rows: list[Mapping[str, str | Number]] = field(default_factory=list)

    def row(self, cells: Mapping[str, str | Number], more: Mapping[str, Number] | None = None) -> None:
        """One row more."""
        self.rows.append({**cells, **(more or {})})

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(column for row in self.rows for column in row))

    def csv(self) -> str:
        """Numbers at full precision."""
        cells = [{column: row.get(column, "") for column in self.columns} for row in self.rows]
        return csv_text(
            [{c: v if isinstance(v, str) else v.value if v.exists else "" for c, v in row.items()} for row in cells]
        )


@dataclass(frozen=True)
class Blocks:
    """What the macros of blocks.html ask for while a page is made."""

    folder: Path
    head: dict[str, Any] = field(default_factory=dict)  # title, subtitle, and label, number and note of key numbers
    titles: list[str] = field(default_factory=list)

    def section(self, title: str) -> int:
        """The number of a new section."""
        self.titles.append(title)
        return len(self.titles)

    def save(self, table: Table) -> None:
        """tables/NAME.csv."""
        write_text(self.folder / "tables" / f"{table.name}.csv", table.csv())

    def data_uri(self, name: str, figure: Figure) -> str:
        """A figure as an SVG image inside the page: sharp at any size, and without anything that could run. It is
        written as figures/NAME.png and .pdf too."""
        for suffix in ("png", "pdf"):
            save(figure, self.folder / "figures" / f"{name}.{suffix}")  # laid out by the first
        buffer = io.BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": "unifmoe"}):  # the same figure gives the same bytes
            figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def write_page(folder: Path, template: str, **context: Any) -> Path:
    """Write PAGE, figures/ and tables/; each file appears whole. Returns the page's path.

    Args:
        folder: Of the page and of what belongs to it.
        template: Name of the page's template: it updates `blocks.head`, and shows what stands below the key numbers.
        context: What that template names.
    """
    for name in ("figures", "tables"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    environment = templating.environment()
    environment.filters["prose"] = prose
    blocks = Blocks(folder)
    environment.globals |= {
        "blocks": blocks,
        "number": Number,
        "numbers": numbers,
        "table": Table,
        "metric_named": metric_named,
    }
    body = Markup(environment.get_template(template).render(context))  # noqa: S704  escaped by the template
    page = environment.get_template("page.html").render(body=body, titles=blocks.titles, **blocks.head)
    write_text(folder / PAGE, page)
    return folder / PAGE


def prose(text: str) -> Markup:
    """Text for readers: subscripts of the paper's symbols, and command-line options that break nowhere."""
    safe = str(escape(text))
    safe = re.sub(r"\b(C|N)_(A|B)\b|\bk_(ε)", lambda m: f"{m[1] or 'k'}<sub>{m[2] or m[3]}</sub>", safe)
    return Markup(re.sub(r"(?<![\w-])--[a-z]+(-[a-z]+)*", r"<code>\g<0></code>", safe))  # noqa: S704  escaped above
