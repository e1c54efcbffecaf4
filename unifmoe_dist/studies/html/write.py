"""A page as files: page.html, whole in itself, and beside it every figure and table."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import matplotlib
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from unifmoe_dist.studies.figures.style import save
from unifmoe_dist.studies.html.page import Page, Picture, Table
from unifmoe_dist.studies.records import csv_text
from unifmoe_dist.train.checkpoint import write_text

PAGE = "report.html"


def write_page(page: Page, folder: Path) -> Path:
    """Write PAGE, figures/NAME.png and .pdf, and tables/NAME.csv; each file appears whole. Returns the page's path."""
    for name in ("figures", "tables"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for picture in page.blocks(Picture):
        settle(picture.figure)
        for suffix in ("png", "pdf"):
            save(picture.figure, folder / "figures" / f"{picture.name}.{suffix}")
    for table in page.blocks(Table):
        write_text(folder / "tables" / f"{table.name}.csv", csv_text(table.plain_rows()))
    write_text(folder / PAGE, render(page))
    return folder / PAGE


def render(page: Page) -> str:
    """The page as HTML, images included."""
    environment = Environment(
        loader=PackageLoader("unifmoe_dist.studies.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data_uri"] = data_uri
    environment.filters["prose"] = prose
    environment.tests["kind"] = lambda block, kind: type(block).__name__ == kind
    return environment.get_template("page.html").render(page=page)


def prose(text: str) -> Markup:
    """Text for readers: subscripts of the paper's symbols, and command-line options that break nowhere."""
    safe = str(escape(text))
    safe = re.sub(r"\b(C|N)_(A|B)\b|\bk_(ε)", lambda m: f"{m[1] or 'k'}<sub>{m[2] or m[3]}</sub>", safe)
    return Markup(re.sub(r"(?<![\w-])--[a-z]+(-[a-z]+)*", r"<code>\g<0></code>", safe))  # noqa: S704  escaped above


def settle(figure: Figure) -> None:
    """Lay a figure out once, not anew for every format."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def data_uri(figure: Figure) -> str:
    """A figure as an SVG image inside a page: sharp at any size, and without anything that could run."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "unifmoe"}):  # the same figure gives the same bytes
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
