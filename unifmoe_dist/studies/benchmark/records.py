"""Results as Markdown and as records for JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict

from unifmoe_dist.studies.benchmark.timing import Result, Timing

Cell = Callable[[Timing], str]


def table(result: Result) -> str:
    """Times, ratios to the dense contender and to the floor, share of a large matrix product's rate, and memory.

    Below it stand the memory against top-2 mixtures and every contender that was left out, with the reason.
    """
    columns: dict[str, Cell] = {"": lambda t: t.contender, "work / dense": lambda t: _number(t.work)}
    layer = result.shape is not None
    names = ("forward", "forward + backward") if layer else ("inference", "training step")
    for kind, title in zip(("forward", "training"), names, strict=True):
        columns |= _times(result, kind, title)
    columns["of matmul rate"] = lambda t: _share(result, t)
    columns["kept for backward (MB)"] = lambda t: _megabytes(t.kept)
    if not layer:
        columns["weights, gradients, optimiser (MB)"] = lambda t: _megabytes(t.held)
    if any(t.peak is not None for t in result.timings):
        columns["peak memory (MB)"] = lambda t: _megabytes(t.peak)
    lines = [f"**{result.name}**: {result.sizes}", ""]
    lines += _markdown(columns, result.timings)
    return "\n".join([*lines, *_notes(result)])


def _times(result: Result, kind: str, title: str) -> dict[str, Cell]:
    return {
        f"{title} (ms)": lambda t: f"{1e3 * t.median(kind):.2f} ± {1e3 * t.spread(kind):.2f}",
        f"{title} / dense": lambda t: f"{result.ratio(t, kind):.2f}",
        f"{title} / floor": lambda t: _number(result.over_floor(t, kind)),
    }


def sweep_table(swept: str, results: Iterable[Result]) -> str:
    """Time over the floor, forward and training, one line per shape and one column per contender."""
    results = list(results)
    names = list(dict.fromkeys(t.contender for result in results for t in result.timings if t.work is not None))
    lines = [
        f"**sweep of {swept}**: time over the floor, forward / forward + backward",
        "",
        "| layer | " + " | ".join(names) + " |",
        "| --- |" + " ---: |" * len(names),
    ]
    for result in results:
        found = {t.contender: t for t in result.timings}
        cells = [
            " / ".join(_number(result.over_floor(found[n], kind)) for kind in ("forward", "training"))
            if n in found
            else ""
            for n in names
        ]
        lines.append("| " + " | ".join([f"{result.name}: {result.sizes}", *cells]) + " |")
    skipped = {name: why for result in results for name, why in result.skipped.items()}
    return "\n".join([*lines, *_left_out(skipped)])


def as_record(result: Result) -> dict:
    """Everything measured, for JSON."""
    return asdict(result)


def _markdown(columns: dict[str, Cell], timings: list[Timing]) -> list[str]:
    titles = list(columns)
    lines = ["| " + " | ".join(titles) + " |", "| --- |" + " ---: |" * (len(titles) - 1)]
    return lines + ["| " + " | ".join(cell(t) for cell in columns.values()) + " |" for t in timings]


def _notes(result: Result) -> list[str]:
    lines = []
    ours = next((t for t in result.timings if t.contender == "UniF-MoE"), None)
    mixtures = [t for t in result.timings if t.contender.endswith("top-2")]
    if ours and mixtures:
        least = min(mixtures, key=lambda t: t.kept)
        lines += [
            "",
            f"UniF-MoE keeps {_megabytes(ours.kept)} MB for the backward pass, the leanest top-2 mixture, "
            f"{least.contender}, {_megabytes(least.kept)} MB: {ours.kept / least.kept:.2f} times.",
        ]
    return lines + _left_out(result.skipped)


def _left_out(skipped: dict[str, str]) -> list[str]:
    if not skipped:
        return []
    names: dict[str, list[str]] = {}
    for name, why in skipped.items():
        names.setdefault(why, []).append(name)
    return ["", "Left out:", "", *(f"- {', '.join(those)}: {why}" for why, those in names.items())]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _share(result: Result, timing: Timing) -> str:
    if timing.work is None:
        return ""
    return f"{100 * timing.work * result.flops / timing.median('forward') / result.rate:.0f} %"


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.1f}"
