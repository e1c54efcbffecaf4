"""Results as JSON, CSV and Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def plain(value: Any) -> Any:
    """Nested dataclasses, dicts, lists and tensors as JSON holds them; a number that does not exist (NaN) is None."""
    if hasattr(value, "tolist"):  # a tensor or an array; a command's help need not import either
        value = value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def csv_text(rows: pd.DataFrame | Sequence[Mapping[str, Any]]) -> str:
    """CSV with a header, numbers at full precision, nothing for None; empty without rows."""
    import pandas as pd

    frame = pd.DataFrame(rows, dtype=object).map(lambda value: "" if value is None else value)
    return "" if frame.empty else frame.to_csv(index=False, lineterminator="\n", na_rep="nan")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All records of a run; what a crash cut short or spoilt at the end is left out."""
    records = []
    with (folder / "metrics.jsonl").open(errors="replace") as handle:
        for line in handle:
            try:
                records.append({**json.loads(line)})
            except (ValueError, TypeError):
                break
    return records


def read_summary(folder: Path, *needed: str) -> dict[str, Any] | None:
    """A run's summary.json; None if there is none, or what is there is no record with the needed entries."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) and all(name in summary for name in needed) else None


def markdown(rows: Sequence[Mapping[str, Any]], left: Collection[str] | None = None) -> str:
    """A Markdown table with a head from the first row's keys; columns not `left` (the first) stand to the right."""
    head = list(rows[0])
    rule = ["---" if name in (head[:1] if left is None else left) else "---:" for name in head]
    lines = (head, rule, *(row.values() for row in rows))
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
