"""A folder with every table of a sweep in three formats, its plots, and one page that holds them all."""

from __future__ import annotations

from pathlib import Path

from unifmoe_dist.errors import UserError
from unifmoe_dist.files import write_text
from unifmoe_dist.studies.report.plots import plot_table
from unifmoe_dist.studies.report.results import collect
from unifmoe_dist.studies.report.tables import as_csv, build_tables, latex, markdown, missing_runs


def write_report(runs: Path, output: Path) -> str:
    """Write the report of the runs in a folder; returns its page as Markdown, and says where it is.

    Raises:
        UserError: the folder holds no runs, or the output folder cannot be written.
    """
    results = collect(runs)
    tables = build_tables(results)
    try:
        output.mkdir(parents=True, exist_ok=True)
        page = [f"{sum(r.finished for r in results)} of {len(results)} planned runs have finished."]
        for table in tables:
            write_text(output / f"{table.name}.md", markdown(table) + "\n")
            write_text(output / f"{table.name}.tex", latex(table))
            write_text(output / f"{table.name}.csv", as_csv(table))
            page.append(markdown(table))
            if plot_table(table, results, output / f"{table.name}.png"):
                page.append(f"![{table.title}]({table.name}.png)")
                if (output / f"{table.name}-scores.png").exists():
                    page.append(f"![{table.title}: scores]({table.name}-scores.png)")
        page.append(missing_runs(results))
        text = "\n\n".join(part for part in page if part)
        write_text(output / "report.md", text + "\n")
    except OSError as error:
        raise UserError(f"--output {output} cannot be used ({error}); choose another folder.") from error
    return f"{text}\n\nreport: {output / 'report.md'}"
