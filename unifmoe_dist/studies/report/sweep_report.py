"""A folder with every table of a sweep in three formats, its plots, and one page that holds them all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from unifmoe_dist.files import write_text
from unifmoe_dist.studies.paper_tables import TABLES
from unifmoe_dist.studies.report.entries import Result, collect
from unifmoe_dist.studies.report.evidence import write_evidence
from unifmoe_dist.studies.report.report_plots import plot_table
from unifmoe_dist.studies.report.report_tables import as_csv, build_tables, latex, markdown
from unifmoe_dist.studies.sweep.run_folder import last_words
from unifmoe_dist.train.options import writing_to


def write_report(runs: Path, output: Path) -> str:
    """Write the report of the runs in a folder; returns its page as Markdown, and says where it is.

    Raises:
        UserError: the folder holds no runs, or the output folder cannot be written.
    """
    results = collect(runs)
    page = [f"{sum(r.finished for r in results)} of {len(results)} planned runs have finished."]
    with writing_to(output):
        for table in build_tables(results):
            for suffix, text in (("md", markdown(table) + "\n"), ("tex", latex(table)), ("csv", as_csv(table))):
                write_text(output / f"{table.name}.{suffix}", text)
            page += [markdown(table), *plot_table(table, results, output)]
        for task in TABLES["evidence"].tasks:
            page += write_evidence(results, task, output)
        page += _missing_runs([result for result in results if not result.finished], len(results))
        text = "\n\n".join(page)
        write_text(output / "report.md", text + "\n")
    return f"{text}\n\nreport: {output / 'report.md'}"


def _missing_runs(missing: Sequence[Result], planned: int) -> list[str]:
    """A Markdown list of runs that have not finished, with the last line of their logs; nothing if there are none."""
    lines = [f"### {len(missing)} of {planned} planned runs have not finished\n"]
    for run in missing:
        words = last_words(run.folder)
        lines.append(f"- {run.name}: " + (f"`{words}` ({run.folder / 'log.txt'})" if words else "not begun"))
    return ["\n".join(lines)] if missing else []
