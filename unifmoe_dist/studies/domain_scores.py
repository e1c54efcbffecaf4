"""Scores by domain before and after training, of runs that record both: a table and a plot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from unifmoe_dist.data.metrics import Metric, metric_named
from unifmoe_dist.methods.registry import method_of
from unifmoe_dist.studies.figures.style import label, new_figure, plain
from unifmoe_dist.studies.records import markdown, read_metrics, read_summary

MARKS = ("o", "s", "D", "^")
SEEN, HELD_OUT = "seen", "held out"


@dataclass(frozen=True)
class DomainScores:
    """What one run scored.

    Args:
        name: For readers.
        metric: By which.
        steps: After which it was scored: 0, and that of the best checkpoint.
        overall: Scores on all seen domains together and on those held out, each before and after.
        domains: By name the scores before and after, and whether the domain is held out.
    """

    name: str
    metric: Metric
    steps: tuple[int, int]
    overall: Mapping[str, tuple[float, float]]
    domains: Mapping[str, tuple[float, float, bool]]


def domain_scores(folder: Path) -> DomainScores | None:
    """A finished run's scores; None where it has no domains or was not scored before its first step."""
    summary = read_summary(folder, "per_domain", "best_step")
    if summary is None:
        return None
    records = {(r["kind"], r["step"]): r for r in read_metrics(folder) if "per_domain" in r}
    best, name = summary["best_step"], summary["metric"]
    after = {"validation": records.get(("validation", best)), "test": {**summary, name: summary["score"]}}
    overall: dict[str, tuple[float, float]] = {}
    domains: dict[str, tuple[float, float, bool]] = {}
    for kind, what in (("validation", SEEN), ("test", HELD_OUT)):
        first, last = records.get((kind, 0)), after[kind]
        if first is None or last is None:
            return None
        overall[what] = first[name], last[name]
        for domain, score in first["per_domain"].items():
            domains[domain] = score, last["per_domain"][domain], kind == "test"
    method = method_of(summary["moe"])
    title = method.title if method.layer else "dense twin"
    return DomainScores(title, metric_named(name), (0, best), overall, domains)


def domain_table(runs: Sequence[DomainScores]) -> str:
    """Markdown: a line per run, seen and held-out domains, before and after."""
    lines = []
    for run in runs:
        line = {"model": run.name, "steps": str(run.steps[1])}
        for what, scores in run.overall.items():
            for when, score in zip(("before", "after"), scores, strict=True):
                line[f"{run.metric.title}, {what}, {when}"] = run.metric.number(score)
        lines.append(line)
    return markdown(lines)


def domain_figure(runs: Sequence[DomainScores]) -> Figure:
    """A row per domain, held-out ones on top, with a hollow mark before and a full one after training of every run."""
    first = runs[0]
    order = sorted(first.domains, key=lambda name: (first.domains[name][2], -first.domains[name][0]))
    figure = new_figure(8, 1.4 + 0.3 * len(order))
    axis = figure.subplots()
    for number, (run, mark) in enumerate(zip(runs, MARKS, strict=False)):
        places = [place + 0.16 * (number - (len(runs) - 1) / 2) for place in range(len(order))]
        shown = [run.domains[name] for name in order]
        colour = f"C{number}"
        for before, after, place in ((b, a, p) for (b, a, _), p in zip(shown, places, strict=True)):
            axis.plot([before, after], [place, place], color=colour, alpha=0.4, linewidth=1)
        for values, step, fill in zip(zip(*shown, strict=True), run.steps, ("white", colour), strict=False):
            text = f"{plain(run.name)}, {'before training' if step == 0 else f'after {step} steps'}"
            axis.plot(values, places, mark, color=colour, markerfacecolor=fill, markersize=5, label=text)
    names = [f"{plain(name)} ({HELD_OUT})" if first.domains[name][2] else plain(name) for name in order]
    axis.set_yticks(range(len(order)), names)
    better = "lower" if first.metric.lower_is_better else "higher"
    label(axis, f"{first.metric.title} ({better} is better)", "", f"{first.metric.title.capitalize()} by domain")
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=2)
    return figure
