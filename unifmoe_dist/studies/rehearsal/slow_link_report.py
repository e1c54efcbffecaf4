"""The rehearsal of a slow link: runs it, and shows what was found in one table and one plot."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime.local_ranks import run_local_ranks
from unifmoe_dist.studies.figures.style import label, panels, save
from unifmoe_dist.studies.records import markdown
from unifmoe_dist.studies.rehearsal import slow_link
from unifmoe_dist.studies.rehearsal.hosts import Network
from unifmoe_dist.studies.rehearsal.scenarios import say
from unifmoe_dist.studies.rehearsal.slow_link import EXPERTS, RANKS, RANKS_PER_HOST, Sizes, Timing, Trained

TARGET, ONE_HOST_TARGET = 0.6, 1.05
PLACES = {2: "two hosts", 1: "one host"}
_COLOURS = {"flat": "#d55e00", "two_level": "#0072b2", "auto": "#999999"}

Timings = Mapping[str, Mapping[str, Timing]]
"""By what is timed and by contender."""


def rehearse(folder: Path, megabits: int, sizes: Sizes | None = None) -> None:
    """Run the rehearsal, and write slow-link.md and slow-link.png into the folder.

    Raises:
        UserError: the two runs' losses differ; hosts cannot be made, or the link not limited.
    """
    # A flat exchange should take about a second, not minutes.
    tokens = max(64, min(512, 5 * megabits))
    sizes = sizes or Sizes(tokens=tokens, batch=tokens // 2)
    say(f"slow-link: two hosts, {RANKS_PER_HOST} ranks each, K = {EXPERTS}, {megabits} Mbit/s from each to the other")
    with Network() as network:
        network.limit(megabits)
        first_processes = [host.pid for host in network.hosts]
        run = partial(run_local_ranks, RANKS)
        timings = {hosts: run(slow_link.time_exchanges, first_processes, hosts, sizes)[0] for hosts in PLACES}
        names = {"flat": "alltoall", "two_level": "two_level"}
        trained = {name: run(slow_link.train, first_processes, names[name], sizes)[0] for name in names}
    folder.mkdir(parents=True, exist_ok=True)
    table = format_table(trained, timings)
    (folder / "slow-link.md").write_text(table + "\n")
    say(f"\n{table}\n")
    pairs = zip(trained["flat"].losses, trained["two_level"].losses, strict=True)
    worst = max(abs(a - b) for a, b in pairs)
    say(f"  all {sizes.steps} losses of two_level within {worst:.1e} of the flat run's")
    for line in verdicts(timings):
        say(f"  {line}")
    say(f"  plot: {plot(trained, timings, megabits, folder / 'slow-link.png')}")
    if worst > 1e-4:
        raise UserError(f"slow-link: the losses of the two runs differ by {worst:.1e}.")


def format_table(trained: Mapping[str, Trained], timings: Mapping[int, Timings]) -> str:
    """Markdown: medians of the slowest rank with quartiles, and what both hosts sent over the link."""
    flat = trained["flat"]
    rows = [_row("two hosts", "training step", name, run.step, flat.step.median) for name, run in trained.items()]
    for name, run in trained.items():
        shares: dict[str, Any] = {"quartiles (ms)": "", "over flat": f"{run.exchange / flat.exchange:.2f}"}
        own = {"median (ms)": f"{1e3 * run.exchange:.0f}", **shares, "over the link (MB)": ""}
        rows.append({"on": "two hosts", "what": "of it the exchange, by a profile", "contender": name, **own})
    for hosts, of_hosts in timings.items():
        for what, calls in of_hosts.items():
            base = next(iter(calls.values())).median
            rows += [_row(PLACES[hosts], what, name, timing, base) for name, timing in calls.items()]
    return markdown(rows, left=("on", "what", "contender"))


def _row(place: str, what: str, name: str, timing: Timing, base: float) -> dict[str, Any]:
    low, high = timing.quartiles
    return {
        "on": place,
        "what": what,
        "contender": name,
        "median (ms)": f"{1e3 * timing.median:.0f}",
        "quartiles (ms)": f"{1e3 * low:.0f} to {1e3 * high:.0f}",
        "over flat": f"{timing.median / base:.2f}",
        "over the link (MB)": f"{timing.link_bytes / 1e6:.2f}",
    }


def verdicts(timings: Mapping[int, Timings]) -> list[str]:
    """Where the exchange reaches its targets: 0.6 of flat's time between hosts, 1.05 of it on one."""
    lines = []
    for what, calls in timings[2].items():
        if what.startswith("exchange"):
            lines.append(_verdict(f"two hosts, {what}: two_level", calls["two_level"], calls["flat"], TARGET))
    for what, calls in timings[1].items():
        for name in ("auto", "two_level"):
            if name in calls:
                lines.append(_verdict(f"one host, {what}: {name}", calls[name], calls["flat"], ONE_HOST_TARGET))
    return lines


def _verdict(what: str, timing: Timing, flat: Timing, target: float) -> str:
    ratio = timing.median / flat.median
    return f"{what} takes {ratio:.2f} of flat's time, {'within' if ratio <= target else 'above'} {target}"


def plot(trained: Mapping[str, Trained], timings: Mapping[int, Timings], megabits: int, path: Path) -> Path:
    """Step and exchange of the two runs, the exchange alone over flat, and a layer in chunks."""
    figure, axes = panels(1, 3, 13, 3.9, width_ratios=(1, 1.6, 1.4))
    _plot_steps(axes[0, 0], trained, megabits)
    _plot_ratios(axes[0, 1], timings)
    _plot_chunks(axes[0, 2], timings)
    return save(figure, path)


def _plot_steps(axis: Axes, trained: Mapping[str, Trained], megabits: int) -> None:
    for place, (name, run) in enumerate(trained.items()):
        exchange, step = 1e3 * run.exchange, 1e3 * run.step.median
        axis.bar(place, exchange, color=_COLOURS[name], width=0.6)
        axis.bar(place, step - exchange, bottom=exchange, color="#dddddd", width=0.6)
        axis.text(place, step, f"{run.step.link_bytes / 1e6:.1f} MB", ha="center", va="bottom", fontsize=9)
    axis.set_xticks(range(len(trained)), list(trained))
    axis.margins(y=0.12)
    label(axis, "grey: all but the exchange", "ms per step", f"Training at {megabits} Mbit/s, bytes on the link")


def _plot_ratios(axis: Axes, timings: Mapping[int, Timings]) -> None:
    names = [what for what in timings[2] if what.startswith("exchange")]
    bars: Sequence[tuple[int, str, str]] = ((2, "two_level", ""), (1, "two_level", "//"), (1, "auto", "//"))
    for number, (hosts, name, hatch) in enumerate(bars):
        pairs = [(timings[hosts][what][name], timings[hosts][what]["flat"].median) for what in names]
        places = [place + 0.26 * (number - 1) for place in range(len(names))]
        heights = [timing.median / flat for timing, flat in pairs]
        ends = _ends([timing for timing, _ in pairs], [1 / flat for _, flat in pairs])
        style: dict[str, Any] = dict(color=_COLOURS[name], hatch=hatch, edgecolor="white")
        axis.bar(places, heights, 0.24, yerr=ends, label=f"{name}, {PLACES[hosts]}", **style)
    axis.axhline(1, color="black", lw=1)
    axis.axhline(TARGET, color="black", lw=1, ls=":")
    axis.set_xticks(range(len(names)), [what.removeprefix("exchange, ") for what in names])
    axis.margins(y=0.3)
    axis.legend(fontsize=8, ncols=3, loc="upper center", frameon=False, columnspacing=1)
    label(axis, "experts per token", "time / flat's", f"The exchange alone; dotted: {TARGET}")


def _plot_chunks(axis: Axes, timings: Mapping[int, Timings]) -> None:
    for hosts, style in ((2, "-"), (1, "--")):
        points: dict[str, list[tuple[int, Timing]]] = {}
        for name, timing in timings[hosts]["layer"].items():
            contender, chunks = name.split(", ")
            points.setdefault(contender, []).append((int(chunks), timing))
        for contender, line in points.items():
            middle = [1e3 * timing.median for _, timing in line]
            ends = _ends([timing for _, timing in line], [1e3] * len(line))
            shown = f"{contender}, {PLACES[hosts]}"
            axis.errorbar(
                [c for c, _ in line], middle, ends, ls=style, marker="o", color=_COLOURS[contender], label=shown
            )
    axis.set_xticks(sorted({int(name.split(", ")[1]) for name in timings[2]["layer"]}))
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8, frameon=False, handlelength=3.5)
    label(axis, "dispatch_chunks", "ms", "A layer with narrow experts, forward and backward")


def _ends(timings: Sequence[Timing], scales: Sequence[float]) -> list[list[float]]:
    """Lengths of error bars, down to and up to the quartiles."""
    pairs = list(zip(timings, scales, strict=True))
    return [[scale * abs(t.quartiles[i] - t.median) for t, scale in pairs] for i in (0, 1)]
