"""Pages as a browser reads them."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Reader(HTMLParser):
    """Checks that tags nest, and collects what the tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "figure" and (values.get("id") or "").startswith("table-"):
            self.rows = self.tables[values["id"].removeprefix("table-")] = []
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "data" and "table" in self.open:  # in a table, a number counts by its full value
            self.rows[-1][-1] += values["value"] or ""

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.text += data
        if self.open[-1:] in (["td"], ["th"]) or self.open[-2:] in (["td", "sub"], ["th", "sub"]):
            self.rows[-1][-1] += data.strip()

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [values for name, values in self.tags if name == tag]
