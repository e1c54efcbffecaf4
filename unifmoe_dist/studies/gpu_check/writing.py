"""The folder of a check: results.json, tables.md, the page, and a summary for the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unifmoe_dist.files import write_text
from unifmoe_dist.studies.gpu_check.record import FAILED, NOTE, SKIPPED, one_line
from unifmoe_dist.studies.records import markdown, plain

Results = dict[str, Any]
_LINES, _WIDTH, _CHARACTERS = 96, 180, 10_500  # of the summary: a log may keep no more of its end


def write_results(folder: Path, results: Results) -> None:
    """results.json and tables.md, each whole."""
    write_text(folder / "results.json", json.dumps(plain(results), indent=1))
    write_text(folder / "tables.md", "\n\n".join([_head(results), *_tables(results)]) + "\n")


def write_page(folder: Path, results: Results) -> bool:
    """The page, where its libraries are there; a page that cannot be made spoils no result."""
    try:
        from unifmoe_dist.studies.gpu_check import figures
        from unifmoe_dist.studies.page import write_page as write

        data: Any = dict(where=where(results), tables=tables_of(results), figures=figures)
        write(folder, "gpu_check.html", results=plain(results), **data)
        return True
    except Exception as error:  # a missing library; the results are on the disk
        print(f"no page ({one_line(error)}); elsewhere: python launch/gpu_check.py --report {folder}", flush=True)
        return False


def read_results(folder: Path) -> Results:
    return json.loads((folder / "results.json").read_text())


def where(results: Results) -> str:
    """What every line of a table was measured on."""
    return f"{results['card'] or 'no card (interpreter)'}, {results['date']}"


def failed_parts(results: Results) -> list[str]:
    return [part["name"] for part in results["parts"] if part["status"] == FAILED]


def tables_of(results: Results) -> dict[str, tuple[str, list[dict[str, str]]]]:
    """Title and rows of every table by name; parts that fill the same table do so in their order."""
    found: dict[str, tuple[str, list[dict[str, str]]]] = {}
    for part in results["parts"]:
        for name, table in part["tables"].items():
            found.setdefault(name, (table["title"], []))[1].extend(table["rows"])
    return found


def _head(results: Results) -> str:
    if results["card"]:
        return f"Measured by `make gpu` on {where(results)}."
    return "No card was there: Triton's interpreter ran tiny sizes, and times mean nothing."


def _tables(results: Results) -> Iterator[str]:
    for title, rows in tables_of(results).values():
        yield f"**{title}**\n\n" + markdown([{**row, "measured on": where(results)} for row in rows])


def summary(folder: Path, results: Results) -> str:
    """Verdicts and the main tables, in at most a hundred lines."""
    lines = [f"{'':2}{part['status']:8}{part['seconds']:6.1f} s  {part['title']}" for part in results["parts"]]
    told = [(part, f) for part in results["parts"] for f in part["findings"] if f["verdict"] != "ok"]
    for verdict, most in ((FAILED, 25), (NOTE, 25), (SKIPPED, 10)):
        some = [f"{verdict}: {part['name']}: {f['what']}: {f['text']}" for part, f in told if f["verdict"] == verdict]
        lines += [line[:_WIDTH] for line in some[:most]]
        lines += [f"... and {len(some) - most} more {verdict}"] if len(some) > most else []
    for name, (title, rows) in tables_of(results).items():
        more = [title, *(" | ".join(_short(row)) for row in rows)]
        fits = len(lines) + len(more) < _LINES - 3 and len("\n".join(lines + more)) < _CHARACTERS
        if fits and name.startswith(("own, ", "peers, ", "launches", "DeiT-S")):
            lines += more
    failed = failed_parts(results)
    lines.append(f"failed: {', '.join(failed)}" if failed else "all parts that ran passed")
    if not results["card"]:
        lines.append("no card was there: this proves the script and the kernels' logic, and no time")
    return "\n".join([*lines, f"results: {folder} (report.html, results.json, tables.md)"])


def _short(row: dict[str, str]) -> list[str]:
    """A row with the words of its columns that a reader cannot guess."""
    return [value if not key else f"{key} {value}" for key, value in row.items() if value and not key.endswith("dense")]
