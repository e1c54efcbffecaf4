#!/usr/bin/env python
"""Many runs with one command: the runs of a table of the paper, or any grid of data sets, methods and seeds.

    python launch/sweep.py --table domainbed --dry-run                   the runs, GPU hours and disk that it needs
    python launch/sweep.py --table domainbed --gpus 0 1 2 3              one run at a time on each GPU
    python launch/sweep.py --table digits --jobs 2                       on CPU cores
    python launch/sweep.py --table glue --tasks cola rte --seeds 0       a part of a table
    python launch/sweep.py --config configs/digits.yaml --methods dense unif --held-out rot0 rot75 --set steps=200
    python launch/report.py runs/sweeps                                  the tables, from whatever has finished

Data, tokenizers and weights are looked at once before any run starts. The same command again skips what has finished,
resumes what is half done and retries what failed. Two sweeps on one folder share the work.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unifmoe_dist import resources
from unifmoe_dist.data.registry import TASKS, find_task
from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.sweep.plan import Run, Selection, expand
from unifmoe_dist.studies.tables import SEEDS, TABLES
from unifmoe_dist.train.cli import parse_train_config, run_main
from unifmoe_dist.train.options import OptionParser

if TYPE_CHECKING:
    from unifmoe_dist.studies.sweep.run_folder import State


def parser() -> OptionParser:
    result = OptionParser("sweep.py", description=__doc__)
    what = result.add_argument_group("what to run: a table, a part of one, or a grid of its own")
    what.add_argument("--table", choices=TABLES, help="the runs of a table or figure of the paper")
    what.add_argument("--config", type=_configuration, help="base configuration, in place of the data sets' own")
    what.add_argument(
        "--tasks",
        nargs="+",
        choices=TASKS,
        metavar="TASK",
        default=[],
        help=f"data sets: {', '.join(TASKS)} (the table's, or that of --config)",
    )
    what.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        default=[],
        help="dense, top1 ... top8, gmoe, ..., unif-lambda-0.1 (the table's)",
    )
    what.add_argument("--held-out", nargs="+", metavar="ENVIRONMENT", default=[], help="environments (all, in turn)")
    what.add_argument("--seeds", type=int, nargs="+", metavar="N", default=list(SEEDS), help="seeds (0 1 2)")
    what.add_argument(
        "--lr",
        type=float,
        nargs="+",
        metavar="RATE",
        default=[],
        help="learning rates, chosen by validation (GLUE: 2e-5 3e-5 5e-5; else config)",
    )
    what.add_argument("--set", nargs="+", metavar="KEY=VALUE", default=[], help="options of every run")
    how = result.add_argument_group("how to run it")
    how.add_argument("--output", type=Path, default=Path("runs/sweeps"), help="folder of all runs (runs/sweeps)")
    how.add_argument("--gpus", nargs="+", metavar="GPU", help="GPUs, by index, one run each (all there are)")
    how.add_argument("--jobs", type=int, metavar="N", help="runs at a time on the CPU (one per core)")
    how.add_argument("--discard-checkpoints", action="store_true", help="delete the checkpoints of finished runs")
    how.add_argument("--dry-run", action="store_true", help="print the runs and what they need, and stop")
    return result


def _configuration(path: str) -> Path:
    return Path(resources.config(path))


def main(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    runs = expand(selection(options), options.output, resources.folder("configs"))
    from unifmoe_dist.studies.sweep.run_folder import State, state_of

    if options.dry_run:
        print(describe(runs, [state_of(run) for run in runs], options.discard_checkpoints))
        return
    from unifmoe_dist.studies.sweep.inputs import check_inputs
    from unifmoe_dist.studies.sweep.pool import run_all

    chosen = places(options)
    check_inputs([run for run in runs if state_of(run) is not State.FINISHED])
    outcome = run_all(runs, chosen, discard_checkpoints=options.discard_checkpoints)
    print(
        f"{len(outcome.skipped) + len(outcome.finished)} of {len(runs)} runs are finished, {len(outcome.finished)} of "
        f"them now; {len(outcome.failures)} failed, {len(outcome.elsewhere)} are another sweep's, {len(outcome.left)} "
        f"are left.\nreport: python launch/report.py {options.output}"
    )
    if outcome.failures:
        print("\nfailed, and tried again by the same command:")
        for failure in outcome.failures:
            print(f"  {failure.run.name}\n    {failure.reason}\n    {failure.log}")
    if outcome.alike:
        print(f"\nNo more runs were started: the first {len(outcome.failures)} all failed alike: {outcome.alike}")
    if outcome.stopped:
        sys.exit(130)
    if outcome.failures:
        sys.exit(1)


def selection(options: argparse.Namespace) -> Selection:
    """What the options choose.

    Raises:
        UserError: they choose nothing, or not enough.
    """
    table = TABLES.get(options.table)
    if table is None and not options.methods:
        raise UserError("name what to run: --table NAME, or --methods with --config or --tasks.")
    tasks = options.tasks or (list(table.tasks) if table else [])
    if not tasks and options.config is not None:
        tasks = [parse_train_config(["--config", str(options.config)], prog="sweep.py").data.task]
    if not tasks:
        raise UserError("name the data sets with --tasks, or give a --config.")
    return Selection(
        tasks,
        options.methods or (table.methods if table else ()),
        options.held_out,
        options.seeds,
        options.lr,
        options.set,
        options.config,
    )


def places(options: argparse.Namespace) -> list[dict[str, str]]:
    """Environment variables of each place for a run.

    Raises:
        UserError: a GPU does not exist, or GPUs were asked for where there is none.
    """
    import torch

    count = torch.cuda.device_count()
    if options.gpus is None and (count == 0 or options.jobs is not None):
        if options.jobs is not None and options.jobs < 1:
            raise UserError(f"--jobs must be at least 1, not {options.jobs}.")
        # One thread each, or runs side by side would slow one another down.
        place = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        return [place] * (options.jobs or os.cpu_count() or 1)
    if options.jobs is not None:
        raise UserError("--gpus and --jobs exclude each other: a GPU takes one run at a time.")
    gpus = options.gpus or [str(index) for index in range(count)]
    for gpu in gpus:
        if not (gpu.isdecimal() and int(gpu) < count):
            raise UserError(f"--gpus {gpu} does not exist; this machine has {count} GPUs, numbered from 0.")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    named = visible if len(visible) == count else [str(index) for index in range(count)]
    return [{"CUDA_VISIBLE_DEVICES": named[int(gpu)]} for gpu in gpus]


def describe(runs: Sequence[Run], states: Sequence[State], discard_checkpoints: bool) -> str:
    """The run list, and the hours and disk it needs."""
    from unifmoe_dist.studies.sweep.estimate import estimate
    from unifmoe_dist.studies.sweep.run_folder import State

    lines = [f"{state.value:10s} {run.name}  ->  {run.folder}" for run, state in zip(runs, states, strict=True)]
    counts = Counter(states)
    lines.append(f"\n{len(runs)} runs: " + ", ".join(f"{counts[state]} {state.value}" for state in State))
    needs = estimate(runs, states)
    for task, hours in needs.hours.items():
        number = sum(run.task == task and state is not State.FINISHED for run, state in zip(runs, states, strict=True))
        lines.append(f"  {find_task(task).title}: {number} runs, {hours:,.1f} h")
    unit = "GPU hours (RTX 3090)" if any(find_task(task).family for task in needs.hours) else "CPU-core hours"
    lines.append(f"time: {sum(needs.hours.values()):,.1f} {unit}")
    if needs.unknown:
        lines.append(f"      and {needs.unknown} runs for which there is no basis yet")
    kept = 0.0 if discard_checkpoints else needs.checkpoint_gb
    lines.append(f"disk: {needs.data_gb:,.1f} GB of data sets, {kept:,.1f} GB of checkpoints")
    if kept > 100:
        lines[-1] += f" ({len(runs)} runs; --discard-checkpoints keeps none)"
    lines.append("assumptions:")
    lines += [f"  - {sentence}" for sentence in needs.assumptions]
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)
