"""Results as JSON, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor


def plain(value: Any) -> Any:
    """Nested dicts, lists and tensors as JSON can hold them: a number that does not exist (NaN) becomes None."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """CSV with a header from the first row's keys; empty without rows."""
    if not rows:
        return ""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def markdown(rows: Sequence[Mapping[str, Any]], left: Collection[str] | None = None) -> str:
    """A Markdown table with a head from the first row's keys; columns not `left` (the first) stand to the right."""
    head = list(rows[0])
    rule = ["---" if name in (head[:1] if left is None else left) else "---:" for name in head]
    lines = (head, rule, *(row.values() for row in rows))
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
