"""Reports as one HTML page that needs nothing beside it, with every figure and table as files for other uses.

    page = Page("Title", "what this is", [KeyNumber("accuracy", Number(0.87, ".1%"))], [Section("Training", [picture])])
    write_page(page, folder)

The page holds its images, loads nothing, and runs no script. All strings are plain text: the template escapes them.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from unifmoe_dist.files import write_text
from unifmoe_dist.studies.figures.style import save
from unifmoe_dist.studies.records import csv_text

PAGE = "report.html"


@dataclass(frozen=True)
class Number:
    """A number as a reader sees it; the page also carries its full value.

    Args:
        value: The value; None or NaN where there is none.
        form: Format specification, for example ".1%".
        beside: Small print behind it, for example the paper's number.
    """

    value: float | None
    form: str = ".2f"
    beside: str = ""

    @property
    def exists(self) -> bool:
        return self.value is not None and math.isfinite(self.value)

    @property
    def text(self) -> str:
        return format(self.value, self.form).replace("%", " %") if self.exists else "–"


Cell = str | Number


@dataclass(frozen=True)
class KeyNumber:
    """One of the numbers at the top of the page, with a note on what it has to be read against."""

    label: str
    value: Number
    note: str = ""


@dataclass(frozen=True)
class Code:
    """Text to be copied as it is: commands, options."""

    code: str
    title: str = ""


@dataclass(frozen=True)
class Table:
    """A table, written as tables/NAME.csv too.

    Args:
        name: Name of the file, unique on the page.
        caption: What it shows and how to read it.
        rows: Cells by column; the first column names the rows, and a row may lack some.
    """

    name: str
    caption: str
    rows: Sequence[Mapping[str, Cell]]

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(column for row in self.rows for column in row))

    def plain_rows(self) -> list[dict[str, object]]:
        """Rows with numbers at full precision, as CSV takes them."""
        cells = [{column: row.get(column, "") for column in self.columns} for row in self.rows]
        return [{c: v if isinstance(v, str) else v.value if v.exists else "" for c, v in row.items()} for row in cells]


@dataclass(frozen=True)
class Picture:
    """A figure, written as figures/NAME.png and .pdf too.

    Args:
        name: Name of the files, unique on the page.
        title: What it is; also what a screen reader says.
        caption: How to read it.
        figure: The figure.
    """

    name: str
    title: str
    caption: str
    figure: Figure

    @property
    def wide(self) -> bool:
        """Whether a phone cannot show it whole with letters that can be read."""
        return self.figure.get_figwidth() > 5


Block = str | Code | Table | Picture
"""What stands below a heading; a string is a paragraph."""


@dataclass(frozen=True)
class Section:
    """A heading with what stands below it."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """A whole report: heading, one line below it, what most readers came for, and the rest in order."""

    title: str
    subtitle: str
    key_numbers: Sequence[KeyNumber]
    sections: Sequence[Section] = field(default_factory=list)


def write_page(page: Page, folder: Path) -> Path:
    """Write PAGE, figures/NAME.png and .pdf, and tables/NAME.csv; each file appears whole. Returns the page's path."""
    for name in ("figures", "tables"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for block in (block for section in page.sections for block in section.blocks):
        if isinstance(block, Picture):
            block.figure.draw_without_rendering()  # lay it out once, not anew for every format
            block.figure.set_layout_engine("none")
            for suffix in ("png", "pdf"):
                save(block.figure, folder / "figures" / f"{block.name}.{suffix}")
        elif isinstance(block, Table):
            write_text(folder / "tables" / f"{block.name}.csv", csv_text(block.plain_rows()))
    write_text(folder / PAGE, render(page))
    return folder / PAGE


def render(page: Page) -> str:
    """The page as HTML, images included."""
    environment = Environment(
        loader=PackageLoader("unifmoe_dist.studies"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"data_uri": data_uri, "prose": prose}
    environment.tests["kind"] = lambda block, kind: type(block).__name__ == kind
    return environment.get_template("page.html").render(page=page)


def prose(text: str) -> Markup:
    """Text for readers: subscripts of the paper's symbols, and command-line options that break nowhere."""
    safe = str(escape(text))
    safe = re.sub(r"\b(C|N)_(A|B)\b|\bk_(ε)", lambda m: f"{m[1] or 'k'}<sub>{m[2] or m[3]}</sub>", safe)
    return Markup(re.sub(r"(?<![\w-])--[a-z]+(-[a-z]+)*", r"<code>\g<0></code>", safe))  # noqa: S704  escaped above


def data_uri(figure: Figure) -> str:
    """A figure as an SVG image inside a page: sharp at any size, and without anything that could run."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "unifmoe"}):  # the same figure gives the same bytes
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
