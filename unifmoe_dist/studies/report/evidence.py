"""The evidence table: methods compared run by run, with intervals, from the seeds that all of them have finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from unifmoe_dist.data.metrics import Metric
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.files import write_text
from unifmoe_dist.methods.registry import find_method
from unifmoe_dist.studies import records
from unifmoe_dist.studies.figures.style import label, panels, save
from unifmoe_dist.studies.paired import CONFIDENCE, FEWEST, POINT, POWER, Paired, compare
from unifmoe_dist.studies.paper_tables import TABLES
from unifmoe_dist.studies.report.entries import Result, chosen_runs
from unifmoe_dist.studies.report.report_plots import family_colour


@dataclass(frozen=True)
class Comparison:
    """One line of the table: a method, what it is compared with, and the differences (S, D) of their runs."""

    method: str
    against: str
    differences: pd.DataFrame  # a row for each seed, a column for each domain
    block_compute: float  # mean C_B of the method

    @property
    def paired(self) -> Paired:
        return compare(self.differences.to_numpy())


def comparisons(results: Sequence[Result], task: str) -> list[Comparison]:
    """Every pair of the evidence table that was planned, over seeds of which every method has all runs."""
    planned = [r for r in results if r.task == task]
    unfinished = {r.seed for r in planned if not r.finished}
    whole = [r for r in planned if r.seed not in unfinished]
    runs = {m: chosen_runs([r for r in whole if r.method == m]) for m in dict.fromkeys(r.method for r in whole)}
    scores = {method: own.pivot(index="seed", columns="held_out", values="score") for method, own in runs.items()}
    environments = [str(name) for name in find_task(task).environments] or ["None"]
    lines = []
    for method, against in TABLES["evidence"].pairs:
        if method in scores and against in scores:
            differences = (scores[method] - scores[against]).dropna()
            columns = [name for name in environments if name in differences]
            lines.append(Comparison(method, against, differences[columns], runs[method]["block_compute"].mean()))
    return [line for line in lines if line.differences.size]


def write_evidence(results: Sequence[Result], task: str, folder: Path) -> list[str]:
    """Write the table, its figure and every run's numbers; returns them as Markdown, nothing without a comparison."""
    if not (lines := comparisons(results, task)):
        return []
    metric = find_task(task).metric
    name, title = f"evidence-{task}", f"{find_task(task).title}: differences, run by run"
    rows = [_row(line) for line in lines]
    text = f"### {title}\n\n{records.markdown(rows, left=('method', 'against'))}\n\n{_note(lines, metric)}"
    own = [r for r in results if r.task == task and r.finished]
    kept = ("task", "held_out", "method", "seed", "score", "validation", "block_compute", "expert_count")
    runs = [{name: getattr(r, name) for name in kept} | {"lr": (r.options or {}).get("optim.lr")} for r in own]
    order = list(dict.fromkeys(TABLES["evidence"].methods))
    runs.sort(key=lambda run: (run["seed"], str(run["held_out"]), (*order, run["method"]).index(run["method"])))
    for suffix, content in (
        (".md", text + "\n"),
        (".csv", records.csv_text(rows)),
        ("-runs.csv", records.csv_text(runs)),
    ):
        write_text(folder / f"{name}{suffix}", content)
    path = save(_figure(lines, title, metric), folder / f"{name}.png", dpi=150)
    return [text, f"![{title}]({path.name})"]


def _row(line: Comparison) -> dict[str, str]:
    paired = line.paired
    row = {"method": find_method(line.method).label, "against": find_method(line.against).label}
    named = line.differences.columns if len(line.differences.columns) > 1 else ()
    row |= {name: f"{value:+.1f}" for name, value in zip(named, paired.by_domain, strict=False)}
    row["mean difference"] = f"{paired.mean:+.2f}"
    row[f"{CONFIDENCE:.0%} interval"] = "" if paired.interval is None else "{:+.2f} to {:+.2f}".format(*paired.interval)
    row["runs above, below"] = "{}, {}".format(*paired.above)
    row[f"seeds for {POINT:g}"] = "" if paired.seeds_needed is None else str(paired.seeds_needed)
    return row | {"C_B": f"{line.block_compute:.2f}"}


def _note(lines: Sequence[Comparison], metric: Metric) -> str:
    seeds = sorted({int(seed) for line in lines for seed in line.differences.index})
    return (
        f"Seeds {', '.join(map(str, seeds))}, whose planned runs have all finished. A difference is that of "
        f"two runs of one seed and held-out domain; its interval, from {FEWEST} seeds on, is a bootstrap over seeds in "
        f"each domain. With as many seeds as the last but one column says, a difference of {POINT:g} is found with a "
        f"chance of {POWER:.0%}." + (f" Of {metric.name} less is better." if metric.lower_is_better else "")
    )


def _figure(lines: Sequence[Comparison], title: str, metric: Metric) -> Figure:
    """Differences to what most methods are compared with: the mean with its interval, then every domain and seed."""
    base = max((line.against for line in lines), key=[line.against for line in lines].count)
    shown = [line for line in reversed(lines) if line.against == base]
    domains = list(shown[0].differences.columns)
    heads = ["mean over domains", *domains] if len(domains) > 1 else ["all runs"]
    figure, (axes,) = panels(1, len(heads), 2.6 + 2.6 * len(heads), 1.6 + 0.27 * len(shown), sharey=True)
    for number, (axis, head) in enumerate(zip(axes, heads, strict=True)):
        for y, line in enumerate(shown):
            colour, table = family_colour(line.method), line.differences
            points, paired = table[head] if number else table.mean(axis=1), line.paired
            axis.plot(points, [y] * len(points), "o", color=colour, ms=3.5, alpha=0.45, mec="none")
            axis.plot(points.mean(), y, "D", color=colour, ms=5.5)
            if not number and paired.interval is not None:
                axis.plot(paired.interval, [y, y], color=colour, lw=1.6)
        axis.axvline(0, color="black", lw=0.8)
        axis.set_yticks(range(len(shown)), [find_method(line.method).label for line in shown], fontsize=8)
        label(axis, f"difference ({'points' if metric.unit == '%' else metric.name})", "", head)
    bars = f", bars: {CONFIDENCE:.0%} interval" if any(line.paired.interval for line in shown) else ""
    figure.suptitle(f"{title}, against {find_method(base).label} (dots: seeds{bars})", fontsize=11)
    return figure
