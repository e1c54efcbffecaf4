"""Reports of runs of two steps: words for such a run, and its report, whose page is checked."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest

from launch import analyze
from tests.support.faults import SMALL
from tests.support.pages import Reader
from unifmoe_dist.studies import page as page_module

WORDS = [*SMALL, "--steps", "2", "--model.layers", "[3]"]


@pytest.fixture(name="empty_files")
def no_figure_files(monkeypatch):
    """Figures beside the page without content: other tests draw them, and here they only take time."""
    monkeypatch.setattr(page_module, "save", lambda figure, path: path.touch())


def make(run: Path, *words: str) -> tuple[Reader, dict, Path]:
    """The report of a run: its page, its numbers, its folder."""
    folder = run.parent / f"report-of-{len(list(run.parent.glob('report-of-*')))}"
    analyze.main([str(run), "--output", str(folder), *words])
    page = (folder / "report.html").read_text()
    return check_page(page, folder), json.loads((folder / "numbers.json").read_text()), folder


def check_page(page: str, folder: Path) -> Reader:
    """Well formed, whole without anything beside it, no script, and every figure and table is there as files too."""
    read = Reader(page)
    assert not read.named("script") and not read.named("link") and not re.search(r"\son\w+=", page)
    assert not re.search(r"@import|url\(|(src|srcset|action)=\"(?!data:)", page)
    for image in read.named("img"):
        kind, _, data = image["src"].partition(";base64,")
        assert kind == "data:image/svg+xml" and image["alt"]
        svg = base64.b64decode(data).decode()
        assert "<svg" in svg and not re.search(r"<script|href=\"(?!#|data:)", svg)
    figures = {path.stem for path in (folder / "figures").glob("*.png")}
    assert figures == {path.stem for path in (folder / "figures").glob("*.pdf")}
    assert figures == {f["id"].removeprefix("figure-") for f in read.named("figure") if f["id"].startswith("figure-")}
    assert len(read.named("img")) == len(figures) > 0
    assert read.tables.keys() == {path.stem for path in (folder / "tables").glob("*.csv")}
    for link in read.named("a"):
        if not link["href"].startswith("#"):
            assert (folder / link["href"]).is_file(), link
    assert '<meta name="viewport"' in page and "@media print" in page
    return read
