"""What a page is made of. All strings are plain text: the template escapes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from matplotlib.figure import Figure


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
    """One of the numbers at the top of the page.

    Args:
        label: What it is.
        value: The number.
        note: What it has to be read against.
    """

    label: str
    value: Number
    note: str = ""


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


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
        columns: Heads; the first column names the rows.
        rows: Cells.
    """

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def plain_rows(self) -> list[dict[str, object]]:
        """Rows by column, numbers at full precision, as CSV takes them."""
        return [
            {
                name: cell if isinstance(cell, str) else cell.value if cell.exists else ""
                for name, cell in zip(self.columns, row, strict=True)
            }
            for row in self.rows
        ]


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


Block = Text | Code | Table | Picture


@dataclass(frozen=True)
class Section:
    """A heading with what stands below it."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """A whole report.

    Args:
        title: Heading.
        subtitle: One line below it.
        key_numbers: What most readers came for.
        sections: The rest, in order.
    """

    title: str
    subtitle: str
    key_numbers: Sequence[KeyNumber]
    sections: Sequence[Section] = field(default_factory=list)

    def blocks(self, kind: type) -> list:
        """All blocks of a kind, in order."""
        return [block for section in self.sections for block in section.blocks if isinstance(block, kind)]
