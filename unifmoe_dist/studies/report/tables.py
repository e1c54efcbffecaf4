"""The paper's tables from a sweep's runs, beside the paper's own numbers, as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from unifmoe_dist.data.registry import TASKS, find_task
from unifmoe_dist.methods.registry import METHODS, STUDIES, find_method, in_order
from unifmoe_dist.studies import paper_numbers as paper
from unifmoe_dist.studies.paper_numbers import AVERAGE, STANDARD_AVERAGE, STANDARD_BEST, Score
from unifmoe_dist.studies.report import results as runs
from unifmoe_dist.studies.report.results import Cell, Result, average, cell, grid_of
from unifmoe_dist.studies.tables import DOMAINBED, GLUE, TABLES

HERE, PAPER = "here", "paper"
_COSTS = ("C_B", "C_B / B", "k")
"""Heads of the last columns: blocks per token and layer, the same in dense FFNs, and (residual) experts per token."""
_STUDIED = {"diversity": STUDIES["lambda"], "blocks": STUDIES["blocks"]}
"""Tables that vary one parameter."""
_STANDARD = [name for name in METHODS if name.startswith("top")]
_LABELS = {STANDARD_AVERAGE: "Standard MoE, average", STANDARD_BEST: "Standard MoE, best"}


@dataclass(frozen=True)
class Entry:
    """What stands in one place of a table.

    Args:
        mean: Value; None is a missing one.
        deviation: Standard deviation, if there is one.
        done, wanted: Runs that are there and that are needed; both 0 for the paper's numbers.
        decimals: Decimal places.
        best: Whether it is the best of its column.
    """

    mean: float | None
    deviation: float | None = None
    done: int = 0
    wanted: int = 0
    decimals: int = 1
    best: bool = False

    def text(self, plus_minus: str, missing: str) -> str:
        if self.mean is None:
            return f"{missing} ({self.done}/{self.wanted})" if self.wanted else missing
        spread = "" if self.deviation is None else f"{plus_minus}{self.deviation:.{self.decimals}f}"
        return f"{self.mean:.{self.decimals}f}{spread}"


@dataclass(frozen=True)
class Row:
    """One line: the method (or a row over several), its label, whose numbers these are, and the entries."""

    method: str
    label: str
    source: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Table:
    """A table of the report.

    Args:
        name: Stem of its files.
        title: Caption.
        columns: Heads of the entries.
        rows: Lines.
        notes: Sentences below it.
        scores: Number of columns, from the left, whose best entry is marked.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    scores: int

    @property
    def complete(self) -> bool:
        return all(e.mean is not None for row in self.rows if row.source == HERE for e in row.entries)


def build_tables(results: Sequence[Result]) -> list[Table]:
    """Every table for which there are runs: the paper's, then one for each data set by environment."""
    tasks = {r.task for r in results}
    tables = []
    for name, numbers in (("domainbed", paper.DOMAINBED), ("glue", paper.GLUE)):
        if tasks & set(TABLES[name].tasks):
            tables.append(_scores(name, results, numbers))
    if any(r.method in paper.GLUE_COSINE and r.task in TABLES["glue-cosine"].tasks for r in results):
        tables.append(_scores("glue-cosine", results, paper.GLUE_COSINE))
    for name in _STUDIED:
        methods = [method for method in TABLES[name].methods if find_method(method).family != "unif"]
        if any(r.method in methods and r.task in TABLES[name].tasks for r in results):
            tables.append(_scores(name, results, {}))
    decisions = [method for method in TABLES["ablation"].methods if find_method(method).family == "ablation"]
    if any(r.method in decisions and r.task in TABLES["ablation"].tasks for r in results):
        tables.append(_ablation(results))
    by_environment = [task for task in dict.fromkeys((*DOMAINBED, *TASKS)) if task in tasks - set(GLUE)]
    tables += [_by_environment(task, results) for task in by_environment]
    return [_marked(table) for table in tables]


def planned_methods(results: Sequence[Result], tasks: Sequence[str]) -> list[str]:
    """Methods that were planned for any of the data sets, in the tables' order."""
    return in_order({r.method for r in results if r.task in tasks})


def study_value(results: Sequence[Result], method: str, option: str, tasks: Sequence[str]) -> float | None:
    """Value of an option in a method's runs; None if none has finished or they differ."""
    values = {r.options[option] for r in results if r.method == method and r.task in tasks and r.options}
    return float(values.pop()) if len(values) == 1 else None


# -- the tables -------------------------------------------------------------------------------------------------------


def _scores(name: str, results: Sequence[Result], numbers: dict[str, dict[str, Score]]) -> Table:
    """One of the paper's tables of methods by data sets, with their mean."""
    tasks = TABLES[name].tasks
    present = [
        method for method in TABLES[name].methods if any(r.method == method and r.task in tasks for r in results)
    ]
    decimals = 2 if tasks == GLUE else 1
    rows = []
    here = {method: [cell(results, task, method) for task in tasks] for method in present}
    for method in present:
        label = _study_label(results, method, name) if name in _STUDIED else _label(method)
        rows.append(_row(method, label, here[method], average(here[method]), decimals))
        rows += _paper_row(method, tasks, numbers, decimals)
    standard = [method for method in _STANDARD if method in here]
    if name == "glue" and standard:
        for key, combine in ((STANDARD_AVERAGE, runs.mean_over_methods), (STANDARD_BEST, runs.best_of_methods)):
            rows += _over_standard(key, combine, [here[method] for method in standard], tasks, decimals)
    notes = [_SEEDS_NOTE, *_environment_notes(results, tasks)]
    if numbers:
        notes.append("Lines marked paper repeat the paper's table; it gives no deviation of means over data sets.")
    else:
        notes.append("The paper shows this study as a figure, without numbers.")
    planned = {r.task for r in results}
    if left_out := [find_task(task).title for task in tasks if task not in planned]:
        notes.append(f"No runs of {', '.join(left_out)} were planned, so that there is no mean over data sets.")
    if tasks == GLUE:
        notes.append("The learning rate is chosen for each task and seed by validation.")
    columns = (*(find_task(task).title for task in tasks), "Avg", *_COSTS)
    return Table(name, TABLES[name].title, columns, tuple(rows), tuple(notes), len(tasks) + 1)


def _row(method: str, label: str, cells: Sequence[Cell], total: Cell, decimals: int) -> Row:
    costs = [_cost(value) for value in (total.block_compute, total.ffns, total.expert_count)]
    scores = (replace(_entry(c), decimals=decimals) for c in (*cells, total))
    return Row(method, label, HERE, (*scores, *costs))


def _over_standard(
    key: str,
    combine: Callable[[Sequence[Cell]], Cell],
    cells: Sequence[Sequence[Cell]],
    tasks: Sequence[str],
    decimals: int,
) -> list[Row]:
    """A line over the fixed top-k methods; its mean is that of the line, since the best k differs between tasks."""
    by_task = [combine(column) for column in zip(*cells, strict=True)]
    means = [c.mean for c in by_task]
    whole = None if None in means else sum(m for m in means if m is not None) / len(means)
    total = runs.lacking(by_task) if whole is None else Cell(whole, None, 0, 0)
    row = _row(key, _LABELS[key], by_task, total, decimals)
    costs = (Entry(None),) * len(_COSTS)  # those of several methods together mean nothing
    return [replace(row, entries=(*row.entries[: -len(costs)], *costs)), *_paper_row(key, tasks, paper.GLUE, decimals)]


def _paper_row(method: str, tasks: Sequence[str], numbers: dict[str, dict[str, Score]], decimals: int) -> list[Row]:
    if method not in numbers:
        return []
    scores = [numbers[method].get(task, (None, None)) for task in (*tasks, AVERAGE)]
    entries = [Entry(value, spread, decimals=decimals) for value, spread in scores]
    return [Row(method, _label(method), PAPER, (*entries, *(Entry(None),) * len(_COSTS)))]


def _ablation(results: Sequence[Result]) -> Table:
    rows = []
    for method in TABLES["ablation"].methods:
        entries: list[Entry] = []
        for tasks in (DOMAINBED, GLUE):
            total = average([cell(results, task, method) for task in tasks])
            entries += [replace(_entry(total), decimals=2), _cost(total.block_compute)]
        rows.append(Row(method, _label(method), HERE, tuple(entries)))
        numbers = [Entry(value, decimals=2) for value in paper.ABLATION[method].values()]
        rows.append(Row(method, _label(method), PAPER, tuple(numbers)))
    notes = (
        _SEEDS_NOTE,
        "C_B is out of 56 blocks on DomainBed and 272 on GLUE.",
        *_environment_notes(results, (*DOMAINBED, *GLUE)),
    )
    columns = ("DomainBed", "DomainBed C_B", "GLUE", "GLUE C_B")
    return Table("ablation", TABLES["ablation"].title, columns, tuple(rows), notes, 0)


def _by_environment(task: str, results: Sequence[Result]) -> Table:
    """Methods by held-out environment of one data set."""
    benchmark, planned = find_task(task), grid_of(results, task).environments
    environments = [name for name in benchmark.environments if name in planned]
    rows = []
    for method in planned_methods(results, [task]):
        total = cell(results, task, method)
        cells = [cell(results, task, method, environment) for environment in environments]
        rows.append(_row(method, _label(method), cells, total, 1))
    head = "Mean" if environments else "Score"
    notes = [_SEEDS_NOTE]
    if environments:
        notes.append("Columns are held-out environments. A seed's mean is taken over them, then mean and deviation.")
        notes += _environment_notes(results, [task])
    name = f"{benchmark.family}-{task}" if benchmark.family else task
    what = "by held-out environment (%)" if environments else "score (%)"
    return Table(
        name,
        f"{benchmark.title}: {what}",
        (*environments, head, *_COSTS),
        tuple(rows),
        tuple(notes),
        len(environments) + 1,
    )


_SEEDS_NOTE = (
    "Mean ± standard deviation (n - 1) over seeds; an entry with a fraction is missing, and says how many of its runs "
    "have finished."
)


def _environment_notes(results: Sequence[Result], tasks: Sequence[str]) -> list[str]:
    """Where not every environment was planned to be held out, an entry is another number than the paper's."""
    notes = []
    for task in tasks:
        planned, every = grid_of(results, task).environments, find_task(task).environments
        if planned and set(every) - set(planned):
            names = ", ".join(str(name) for name in every if name in planned)
            notes.append(
                f"{find_task(task).title}: only {names} of {len(every)} environments were planned to be held out."
            )
    return notes


def _label(method: str) -> str:
    return _LABELS.get(method) or find_method(method).label


def _study_label(results: Sequence[Result], method: str, table: str) -> str:
    """The value that a parameter has in a method's runs, which for `unif` the base configuration says."""
    study = _STUDIED[table]
    value = study_value(results, method, study.option, TABLES[table].tasks)
    return _label(method) if value is None else f"UniF-MoE, {study.symbol} = {value:g}"


def _entry(value: Cell) -> Entry:
    return Entry(value.mean, value.deviation, value.done, value.wanted)


def _cost(value: float | None) -> Entry:
    return Entry(value, decimals=2)


def _marked(table: Table) -> Table:
    """The table with the best measured score of each column marked; only where there is something to compare."""
    rows = list(table.rows)
    for column in range(table.scores):
        mine = [
            (i, row.entries[column])
            for i, row in enumerate(rows)
            if row.source == HERE and row.method in METHODS or row.source == HERE and row.method.startswith("unif-")
        ]
        shown = {i: round(e.mean, e.decimals) for i, e in mine if e.mean is not None}
        if len(shown) < 2:
            continue
        for i, value in shown.items():
            if value == max(shown.values()):
                entries = list(rows[i].entries)
                entries[column] = replace(entries[column], best=True)
                rows[i] = replace(rows[i], entries=tuple(entries))
    return replace(table, rows=tuple(rows))


# -- their forms ------------------------------------------------------------------------------------------------------


def markdown(table: Table) -> str:
    """A Markdown table with its notes; the paper's lines in italics."""
    lines = [
        f"### {table.title}\n",
        "| method | " + " | ".join(f"`{c}`" if c.startswith("rot") else c for c in table.columns) + " |",
        "| --- |" + " ---: |" * len(table.columns),
    ]
    for row in table.rows:
        if row.source == PAPER:
            cells = [f"*{e.text(' ± ', '–')}*" if e.mean is not None else "" for e in row.entries]
            lines.append("| *paper* | " + " | ".join(cells) + " |")
        else:
            texts = [e.text(" ± ", "–") if e.wanted or e.mean is not None else "" for e in row.entries]
            cells = [f"**{text}**" if e.best else text for text, e in zip(texts, row.entries, strict=True)]
            lines.append(f"| {row.label} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", " ".join(table.notes)])


_TEX = {"α": r"$\alpha$", "λ": r"$\lambda$", "±": r"$\pm$", "%": r"\%", "_": r"\_", "&": r"\&", "–": "--"}


def latex(table: Table) -> str:
    """A LaTeX table for the packages booktabs and graphicx."""
    lines = [
        r"\begin{table*}[t]",
        r"\centering",
        rf"\caption{{{_tex(table.title)}. {_tex(' '.join(table.notes))}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{@{{}}l{'c' * len(table.columns)}@{{}}}}",
        r"\toprule",
        " & ".join(["Method", *("$k$" if c == "k" else _tex(c) for c in table.columns)]) + r" \\",
        r"\midrule",
    ]
    for row in table.rows:
        cells = [_tex_entry(e) for e in row.entries]
        label = r"\quad\textit{paper}" if row.source == PAPER else _tex(row.label)
        lines.append(" & ".join([label, *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table*}", ""])


def _tex_entry(entry: Entry) -> str:
    if entry.mean is None:
        return rf"-- {{\scriptsize({entry.done}/{entry.wanted})}}" if entry.wanted else ""
    number = f"{entry.mean:.{entry.decimals}f}"
    spread = "" if entry.deviation is None else rf"\pm{entry.deviation:.{entry.decimals}f}"
    return rf"$\mathbf{{{number}}}{spread}$" if entry.best else f"${number}{spread}$"


def _tex(text: str) -> str:
    parts = text.replace("C_B", "$C_B$").split("$")  # every second part is mathematics
    return "$".join("".join(_TEX.get(c, c) for c in part) if i % 2 == 0 else part for i, part in enumerate(parts))


def as_csv(table: Table) -> str:
    """One line for each entry, unrounded: method, source, column, mean, deviation, runs there and runs needed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["table", "method", "label", "source", "column", "mean", "deviation", "runs", "of"])
    for row in table.rows:
        for column, e in zip(table.columns, row.entries, strict=True):
            if e.mean is None and not e.wanted:
                continue
            counts = ["", ""] if row.source == PAPER else [e.done, e.wanted]
            writer.writerow(
                [table.name, row.method, row.label, row.source, column, _blank(e.mean), _blank(e.deviation), *counts]
            )
    return text.getvalue()


def _blank(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def missing_runs(results: Sequence[Result]) -> str:
    """Markdown list of runs that have not finished, with the last line of their logs; empty if there are none."""
    missing = [r for r in results if not r.finished]
    if not missing:
        return ""
    lines = [f"### {len(missing)} of {len(results)} planned runs have not finished\n"]
    for r in missing:
        words = r.last_words
        lines.append(f"- {r.name}: " + (f"`{words}` ({r.folder / 'log.txt'})" if words else "not begun"))
    return "\n".join(lines)
