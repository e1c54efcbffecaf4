"""Results as Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from unifmoe_dist.studies.benchmark.contenders import Result, Timing
from unifmoe_dist.studies.records import markdown


def table(result: Result) -> str:
    """Times, ratios to the dense contender and to the floor, share of a large matrix product's rate, and memory.

    Below it stand the memory against top-2 mixtures and every contender that was left out, with the reason.
    """
    layer = result.shape is not None
    names = ("forward", "forward + backward") if layer else ("inference", "training step")
    on_gpu = any(t.peak is not None for t in result.timings)
    rows = []
    for t in result.timings:
        row = {"": t.contender, "work / dense": _number(t.work)}
        for kind, title in zip(("forward", "training"), names, strict=True):
            row[f"{title} (ms)"] = f"{1e3 * t.median(kind):.2f} ± {1e3 * t.spread(kind):.2f}"
            row[f"{title} / dense"] = f"{result.ratio(t, kind):.2f}"
            row[f"{title} / floor"] = _number(result.over_floor(t, kind))
        share = None if t.work is None else 100 * t.work * result.flops / t.median("forward") / result.rate
        row["of matmul rate"] = "" if share is None else f"{share:.0f} %"
        row["kept for backward (MB)"] = _megabytes(t.kept)
        if not layer:
            row["weights, gradients, optimiser (MB)"] = _megabytes(t.held)
        if on_gpu:
            row["peak memory (MB)"] = _megabytes(t.peak)
        rows.append(row)
    head = f"**{result.name}**: {result.sizes}"
    return "\n".join([head, "", markdown(rows), *_leanest(result.timings), *_left_out(result.skipped)])


def sweep_table(swept: str, results: Iterable[Result]) -> str:
    """Time over the floor, forward and training, one line per shape and one column per contender."""
    results = list(results)
    names = dict.fromkeys(t.contender for result in results for t in result.timings if t.work is not None)
    rows = []
    for result in results:
        row = {"layer": f"{result.name}: {result.sizes}", **dict.fromkeys(names, "")}
        for t in result.timings:
            if t.contender in names:
                row[t.contender] = " / ".join(_number(result.over_floor(t, kind)) for kind in ("forward", "training"))
        rows.append(row)
    head = f"**sweep of {swept}**: time over the floor, forward / forward + backward"
    skipped = {name: why for result in results for name, why in result.skipped.items()}
    return "\n".join([head, "", markdown(rows), *_left_out(skipped)])


def _leanest(timings: list[Timing]) -> list[str]:
    """What is kept for the backward pass, beside the top-2 mixture that keeps least."""
    ours = next((t for t in timings if t.contender == "UniF-MoE"), None)
    mixtures = [t for t in timings if t.contender.endswith("top-2")]
    if not ours or not mixtures:
        return []
    least = min(mixtures, key=lambda t: t.kept)
    return [
        "",
        f"UniF-MoE keeps {_megabytes(ours.kept)} MB for the backward pass, the leanest top-2 mixture, "
        f"{least.contender}, {_megabytes(least.kept)} MB: {ours.kept / least.kept:.2f} times.",
    ]


def _left_out(skipped: dict[str, str]) -> list[str]:
    names: dict[str, list[str]] = {}
    for name, why in skipped.items():
        names.setdefault(why, []).append(name)
    lines = [f"- {', '.join(those)}: {why}" for why, those in names.items()]
    return ["", "Left out:", "", *lines] if lines else []


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.1f}"
