"""The paper's tables from a sweep's runs, beside the paper's own numbers, as Markdown, LaTeX and CSV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import pandas as pd

from unifmoe_dist.data.metrics import ACCURACY, Metric
from unifmoe_dist.data.registry import TASKS, find_task
from unifmoe_dist.methods.registry import METHODS, STUDIES, find_method, in_order
from unifmoe_dist.studies import paper_numbers as paper
from unifmoe_dist.studies import records
from unifmoe_dist.studies.paper_numbers import AVERAGE, STANDARD_AVERAGE, STANDARD_BEST, Score
from unifmoe_dist.studies.paper_tables import DOMAINBED, GLUE, TABLES
from unifmoe_dist.studies.report import entries as runs
from unifmoe_dist.studies.report.entries import COSTS, Entry, Result, average, cell, grid_of

HERE, PAPER = "here", "paper"
STUDIED = {"diversity": "lambda", "blocks": "blocks"}
"""Tables that vary one parameter, with the parameter's study."""
_STANDARD = [name for name in METHODS if name.startswith("top")]
_LABELS = {STANDARD_AVERAGE: "Standard MoE, average", STANDARD_BEST: "Standard MoE, best"}


@dataclass(frozen=True)
class Row:
    """One line: the method (or a row over several), its label, whose numbers these are, and the entries."""

    method: str
    label: str
    source: str
    entries: list[Entry]


@dataclass(frozen=True)
class Table:
    """A table of the report."""

    name: str  # stem of its files
    title: str  # caption
    columns: tuple[str, ...]  # heads of the entries
    rows: list[Row]
    notes: list[str]  # sentences below it
    scores: int  # number of columns, from the left, whose best entry is marked
    metric: Metric = ACCURACY  # of the scores


def build_tables(results: Sequence[Result]) -> list[Table]:
    """Every table for which there are runs: the paper's, then one for each data set by environment."""
    tasks = {r.task for r in results}
    planned = {(r.task, r.method) for r in results}

    def varied(name: str) -> bool:
        """Whether there are runs of a study's methods, UniF-MoE itself apart."""
        methods = [method for method in TABLES[name].methods if find_method(method).family != "unif"]
        return any((task, method) in planned for task in TABLES[name].tasks for method in methods)

    tables = []
    for name, numbers in (("domainbed", paper.DOMAINBED), ("glue", paper.GLUE)):
        if tasks & set(TABLES[name].tasks):
            tables.append(_scores(name, results, numbers))
    if varied("glue-cosine"):
        tables.append(_scores("glue-cosine", results, paper.GLUE_COSINE))
    tables += [_scores(name, results, {}) for name in STUDIED if varied(name)]
    if varied("ablation"):
        tables.append(_ablation(results))
    by_environment = [task for task in dict.fromkeys((*DOMAINBED, *TASKS)) if task in tasks - set(GLUE)]
    tables += [_by_environment(task, results) for task in by_environment]
    for table in tables:
        _mark_best(table)
    return tables


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
    tasks, planned = TABLES[name].tasks, {r.task for r in results}
    decimals = 2 if tasks == GLUE else 1
    methods = planned_methods(results, tasks)
    here = {m: [cell(results, task, m) for task in tasks] for m in TABLES[name].methods if m in methods}
    rows = []
    for method, cells in here.items():
        rows.append(_row(method, _label(method, results, name), cells, average(cells), decimals))
        rows += _paper_row(method, tasks, numbers, decimals)
    standard = [here[method] for method in _STANDARD if method in here]
    if name == "glue" and standard:
        for key, combine in ((STANDARD_AVERAGE, runs.mean_over_methods), (STANDARD_BEST, runs.best_of_methods)):
            # The line's mean is that over its entries, since the best k differs between tasks.
            combined = [combine(column) for column in zip(*standard, strict=True)]
            means = [c.mean for c in combined if c.mean is not None]
            total = Entry(fmean(means)) if len(means) == len(combined) else runs.lacking(combined)
            row = _row(key, _LABELS[key], combined, total, decimals)
            rows.append(replace(row, entries=row.entries[: -len(COSTS)] + [Entry(None)] * len(COSTS)))
            rows += _paper_row(key, tasks, numbers, decimals)
    notes = [_SEEDS_NOTE, *_environment_notes(results, tasks)]
    if numbers:
        notes.append("Lines marked paper repeat the paper's table; it gives no deviation of means over data sets.")
    else:
        notes.append("The paper shows this study as a figure, without numbers.")
    if left_out := [find_task(task).title for task in tasks if task not in planned]:
        notes.append(f"No runs of {', '.join(left_out)} were planned, so that there is no mean over data sets.")
    if tasks == GLUE:
        notes.append("The learning rate is chosen for each task and seed by validation.")
    columns = (*(find_task(task).title for task in tasks), "Avg", *COSTS)
    return Table(name, TABLES[name].title, columns, rows, notes, len(tasks) + 1)


def _row(method: str, label: str, cells: Sequence[Entry], total: Entry, decimals: int) -> Row:
    costs = [Entry(getattr(total, field), decimals=2) for field in COSTS.values()]
    return Row(method, label, HERE, [*(replace(c, decimals=decimals) for c in (*cells, total)), *costs])


def _paper_row(method: str, tasks: Sequence[str], numbers: dict[str, dict[str, Score]], decimals: int) -> list[Row]:
    if method not in numbers:
        return []
    scores = [numbers[method].get(task, (None, None)) for task in (*tasks, AVERAGE)]
    entries = [Entry(value, spread, decimals=decimals) for value, spread in scores]
    return [Row(method, _label(method), PAPER, entries + [Entry(None)] * len(COSTS))]


def _ablation(results: Sequence[Result]) -> Table:
    rows = []
    for method in TABLES["ablation"].methods:
        totals = [average([cell(results, task, method) for task in tasks]) for tasks in (DOMAINBED, GLUE)]
        entries = [e for t in totals for e in (replace(t, decimals=2), Entry(t.block_compute, decimals=2))]
        rows.append(Row(method, _label(method), HERE, entries))
        numbers = [Entry(value, decimals=2) for value in paper.ABLATION[method].values()]
        rows.append(Row(method, _label(method), PAPER, numbers))
    notes = [_SEEDS_NOTE, "C_B is out of 56 blocks on DomainBed and 272 on GLUE."]
    notes.append("The paper's 66.74 of two residual experts on GLUE cannot be: with B = 16 they execute 31 at most.")
    notes += _environment_notes(results, (*DOMAINBED, *GLUE))
    return Table(
        "ablation", TABLES["ablation"].title, ("DomainBed", "DomainBed C_B", "GLUE", "GLUE C_B"), rows, notes, 0
    )


def _by_environment(task: str, results: Sequence[Result]) -> Table:
    """Methods by held-out environment of one data set."""
    benchmark, planned = find_task(task), grid_of(results, task).environments
    environments = [name for name in benchmark.environments if name in planned]
    rows = []
    for method in planned_methods(results, [task]):
        cells = [cell(results, task, method, environment) for environment in environments]
        rows.append(_row(method, _label(method), cells, cell(results, task, method), 1))
    metric, notes = benchmark.metric, [_SEEDS_NOTE]
    head, what = "Score", metric.axis
    if environments:
        by = "by held-out environment"
        head, what = "Mean", f"{by} ({metric.unit})" if metric.unit else f"{metric.title} {by}"
        notes.append("Columns are held-out environments. A seed's mean is taken over them, then mean and deviation.")
        notes += _environment_notes(results, [task])
    name = f"{benchmark.family}-{task}" if benchmark.family else task
    columns = (*environments, head, *COSTS)
    title, marked = f"{benchmark.title}: {what}", len(environments) + 1
    return Table(name, title, columns, rows, notes, marked, metric)


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
            names = ", ".join(name for name in every if name in planned)
            notes.append(
                f"{find_task(task).title}: only {names} of {len(every)} environments were planned to be held out."
            )
    return notes


def _label(method: str, results: Sequence[Result] = (), table: str = "") -> str:
    """A method's name; in the table of a study, with the parameter's value in its runs, which for UniF-MoE itself the
    base configuration says."""
    if table in STUDIED:
        study = STUDIES[STUDIED[table]]
        if (value := study_value(results, method, study.option, TABLES[table].tasks)) is not None:
            return f"UniF-MoE, {study.symbol} = {value:g}"
    return _LABELS.get(method) or find_method(method).label


def _mark_best(table: Table) -> None:
    """Mark the best measured score of each column, where there is something to compare."""
    own = [r for r in table.rows if r.source == HERE and (r.method in METHODS or r.method.startswith("unif-"))]
    best = min if table.metric.lower_is_better else max
    for column in range(table.scores):
        shown = [(row, e, round(e.mean, e.decimals)) for row in own if (e := row.entries[column]).mean is not None]
        for row, entry, value in shown if len(shown) > 1 else ():
            row.entries[column] = replace(entry, best=value == best(other for _, _, other in shown))


# -- their forms ------------------------------------------------------------------------------------------------------


def markdown(table: Table) -> str:
    """A Markdown table with its notes; the paper's lines in italics."""
    heads = ["method", *(f"`{c}`" if c.startswith("rot") else c for c in table.columns)]
    lines = []
    for row in table.rows:
        texts = [e.text(" ± ", "–") if e.wanted or e.mean is not None else "" for e in row.entries]
        if row.source == PAPER:
            cells = ["*paper*", *(text and f"*{text}*" for text in texts)]
        else:
            marked = (f"**{text}**" if e.best else text for text, e in zip(texts, row.entries, strict=True))
            cells = [row.label, *marked]
        lines.append(dict(zip(heads, cells, strict=True)))
    return f"### {table.title}\n\n{records.markdown(lines)}\n\n{' '.join(table.notes)}"


_TEX = {"α": r"$\alpha$", "λ": r"$\lambda$", "±": r"$\pm$", "%": r"\%", "_": r"\_", "&": r"\&", "–": "--"}


def latex(table: Table) -> str:
    """A LaTeX table for the packages booktabs and graphicx."""
    heads = ["Method", *("$k$" if c == "k" else _tex(c) for c in table.columns)]
    labels = [r"\quad\textit{paper}" if row.source == PAPER else _tex(row.label) for row in table.rows]
    cells = [[name, *map(_tex_entry, row.entries)] for name, row in zip(labels, table.rows, strict=True)]
    style = pd.DataFrame(cells, columns=heads).style.hide(axis="index")
    return style.to_latex(
        environment="table*",
        position="t",
        position_float="centering",
        caption=f"{_tex(table.title)}. {_tex(' '.join(table.notes))}",
        label=f"tab:{table.name}",
        column_format=f"@{{}}l{'c' * len(table.columns)}@{{}}",
        hrules=True,
    )


def _tex_entry(entry: Entry) -> str:
    if entry.mean is None:
        return rf"-- {{\scriptsize({entry.done}/{entry.wanted})}}" if entry.wanted else ""
    number, plus_minus, spread = entry.text("±", "").partition("±")
    number = rf"\mathbf{{{number}}}" if entry.best else number
    return f"${number}" + (rf"\pm{spread}$" if plus_minus else "$")


def _tex(text: str) -> str:
    parts = text.replace("C_B", "$C_B$").split("$")  # every second part is mathematics
    return "$".join("".join(_TEX.get(c, c) for c in part) if i % 2 == 0 else part for i, part in enumerate(parts))


def as_csv(table: Table) -> str:
    """One line for each entry, unrounded: method, source, column, mean, deviation, runs there and runs needed."""
    lines = []
    for row in table.rows:
        for column, e in zip(table.columns, row.entries, strict=True):
            if e.mean is None and not e.wanted:
                continue
            line: dict[str, object] = {"table": table.name, "method": row.method, "label": row.label}
            mean, spread = ("" if value is None else f"{value:.6g}" for value in (e.mean, e.deviation))
            runs_there, needed = ("", "") if row.source == PAPER else (e.done, e.wanted)
            line |= {"source": row.source, "column": column}
            lines.append(line | {"mean": mean, "deviation": spread, "runs": runs_there, "of": needed})
    return records.csv_text(lines)
