#!/usr/bin/env python
"""Many runs with one command: the runs of a table of the paper, or any grid of data sets, methods and seeds.

    python launch/sweep.py --table domainbed --dry-run                   the runs, GPU hours and disk that it needs
    python launch/sweep.py --table domainbed --gpus 0 1 2 3              one run at a time on each GPU
    python launch/sweep.py --table digits --jobs 2                       on CPU cores
    python launch/sweep.py --table evidence --jobs 2                     every method on shifts that need no hub
    python launch/sweep.py --table glue --tasks cola rte --seeds 0       a part of a table
    python launch/sweep.py --config configs/digits.yaml --methods dense unif --held-out rot0 rot75 --set steps=200
    python launch/report.py runs/sweeps                                  the tables, from whatever has finished

Data, tokenizers and weights are looked at once before any run starts. The same command again skips what has finished,
resumes what is half done and retries what failed. Two sweeps on one folder share the work.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from unifmoe_dist import resources
from unifmoe_dist.data.registry import TASKS
from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.paper_tables import SEEDS, TABLES
from unifmoe_dist.studies.sweep.planned_runs import Selection, expand
from unifmoe_dist.train.cli import parse_train_config, run_main
from unifmoe_dist.train.options import OptionParser


def parser() -> OptionParser:
    result = OptionParser("sweep.py", description=__doc__)
    what = result.add_argument_group("what to run: a table, a part of one, or a grid of its own")
    several = partial(what.add_argument, nargs="+", action="extend", default=[])  # given twice, both count
    what.add_argument("--table", choices=TABLES, help="the runs of a table or figure of the paper")
    what.add_argument(
        "--config",
        type=lambda path: Path(resources.config(path)),
        help="base configuration, in place of the data sets' own",
    )
    known = ", ".join(TASKS)
    several("--tasks", choices=TASKS, metavar="TASK", help=f"data sets: {known} (the table's, or that of --config)")
    several("--methods", metavar="METHOD", help="dense, top1 ... top8, gmoe, ..., unif-lambda-0.1 (the table's)")
    several("--held-out", metavar="ENVIRONMENT", help="environments (all, in turn)")
    several("--seeds", type=int, metavar="N", help="seeds (0 1 2)")
    rates = "learning rates, chosen by validation (GLUE: 2e-5 3e-5 5e-5; else config)"
    several("--lr", type=float, metavar="RATE", help=rates)
    what.add_argument(
        "--lr-from",
        type=Path,
        metavar="FOLDER",
        help="take each method's best learning rate by validation from a sweep with --lr, of other seeds",
    )
    several("--set", metavar="KEY=VALUE", help="options of every run")
    how = result.add_argument_group("how to run it")
    how.add_argument("--output", type=Path, default=Path("runs/sweeps"), help="folder of all runs (runs/sweeps)")
    how.add_argument(
        "--gpus", nargs="+", action="extend", metavar="GPU", help="GPUs, by index, one run each (all there are)"
    )
    how.add_argument("--jobs", type=int, metavar="N", help="runs at a time on the CPU (one per core)")
    how.add_argument("--discard-checkpoints", action="store_true", help="delete the checkpoints of finished runs")
    how.add_argument("--dry-run", action="store_true", help="print the runs and what they need, and stop")
    return result


def main(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    runs = expand(selection(options), options.output, resources.folder("configs"))
    from unifmoe_dist.studies.sweep.run_folder import State, state_of

    if options.dry_run:
        from unifmoe_dist.studies.sweep.needs import describe

        print(describe(runs, [state_of(run) for run in runs], options.discard_checkpoints))
        return
    from unifmoe_dist.studies.sweep.inputs import check_inputs, places
    from unifmoe_dist.studies.sweep.pool import run_all

    chosen = places(options.gpus, options.jobs)
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
    seeds, rates = options.seeds or SEEDS, {}
    if options.lr_from is not None:
        from unifmoe_dist.studies.report.entries import best_rates, collect

        rates = best_rates(collect(options.lr_from), seeds)
    return Selection(
        tasks,
        options.methods or (table.methods if table else ()),
        options.held_out,
        seeds,
        options.lr,
        options.set,
        options.config,
        rates,
    )


if __name__ == "__main__":
    run_main(main)
