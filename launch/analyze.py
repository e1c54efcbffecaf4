#!/usr/bin/env python
"""What a trained run's layers do: `python launch/analyze.py RUN [--compare OTHER_RUN] [--masks FOLDER] [--cost]`.

Writes RUN/analysis/report.html, one page that needs nothing else, with figures/ (PNG, PDF), tables/ (CSV) and
numbers.json beside it; with --masks, --methods, --cost, --compare or --checkpoint in a folder of their own, such as
RUN/analysis-cost, so that no report takes another's place. UniF-MoE: how blocks and experts are used, and where. A
fixed number of experts per token: the paper's three observations. Any run, dense ones too: learning curves and cost.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from unifmoe_dist.errors import UserError
from unifmoe_dist.train.cli import run_main
from unifmoe_dist.train.options import OptionParser


def main(arguments: Sequence[str]) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    counts = {"--tokens": options.tokens, "--batches": options.batches, "--router-steps": options.router_steps}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, not {value}.")
    if not -1 <= options.delta <= 1:
        raise UserError(f"--delta is a cosine, from -1 to 1, not {options.delta:g}.")
    from unifmoe_dist.studies.run_report import StudyOptions, can_be_diagnosed, load_run, report_runs

    folders: list[Path] = [options.run] if options.compare is None else [options.run, options.compare]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError(f"--compare names {options.run} itself; give another run.")
    for folder in folders:
        if not (folder / "config.yaml").is_file():
            raise UserError(f"{folder} is not a run; give the folder that a training run wrote.")
    labels = [folder.resolve().name for folder in folders]
    if len(set(labels)) < len(labels):
        labels = [str(folder) for folder in folders]
    runs = [
        load_run(folder, options.checkpoint, label, options.data_root)
        for folder, label in zip(folders, labels, strict=True)
    ]
    if not any(can_be_diagnosed(layer) for run in runs for layer in run.layers.values()):
        none = f"{labels[0]} has none" if len(labels) == 1 else f"neither {labels[0]} nor {labels[1]} has any"
        parser.refuse_others(
            arguments,
            vars(options).keys() - {"router_steps", "delta"},
            f"the three observations are of layers with a fixed number of experts per token, and {none}",
        )
    wanted = StudyOptions(
        measure=options.cost,
        methods=options.cost or options.methods,
        router_steps=options.router_steps,
        delta=options.delta,
        masks=options.masks,
        most_items=None if options.batches is None else options.batches * runs[0].config.data.eval_batch_size,
        **({} if options.tokens is None else {"most_tokens": options.tokens}),
    )
    command = shlex.join(["python", "launch/analyze.py", *arguments])
    print(report_runs(runs, options.output or options.run / folder_name(options), wanted, command))


def folder_name(options: argparse.Namespace) -> str:
    """Folder of the report in the run's: another one for every kind of content, so that reports stay side by side."""
    parts = ["analysis"]
    if options.checkpoint != "best":
        parts.append(options.checkpoint)
    if options.masks is not None:
        parts += dict.fromkeys(["masks", options.masks.resolve().name])
    if options.cost or options.methods:
        parts.append("cost" if options.cost else "methods")
    if options.compare is not None:  # by what its path has and the run's has not: all runs of a sweep are called seed0
        own, other = options.run.resolve(), options.compare.resolve()
        parts += ["with", *other.relative_to(os.path.commonpath([own, other.parent])).parts]
    return "-".join(parts)


def _parser() -> OptionParser:
    parser = OptionParser("analyze.py", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--output", type=Path, help="folder of the report (RUN/analysis...)")
    parser.add_argument("--checkpoint", default="best", help="best, latest or step-N (default: best)")
    parser.add_argument("--data-root", type=Path, help="folder of the data set's files (default: that of the run)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--tokens", type=int, help="test tokens to look at, at most (default: 20000)")
    size.add_argument("--batches", type=int, help="batches of data.eval_batch_size items to look at instead")
    parser.add_argument("--compare", type=Path, metavar="OTHER_RUN", help="another run, to show beside it")
    parser.add_argument(
        "--router-steps",
        type=int,
        default=400,
        help="training steps of the residual router and its control (default: 400)",
    )
    parser.add_argument(
        "--delta", type=float, default=0.98, help="least cosine of a channel that two experts share (default: 0.98)"
    )
    parser.add_argument(
        "--masks",
        type=Path,
        metavar="FOLDER",
        help="label images (one PNG per test image, a class number per pixel, named like the image or, "
        "for digits, by its number): usage by semantic element",
    )
    parser.add_argument(
        "--methods", action="store_true", help="count N, N_A and FLOPs of every method of the paper's tables too"
    )
    parser.add_argument("--cost", action="store_true", help="--methods, and measure the seconds and memory of all")
    return parser


if __name__ == "__main__":
    run_main(main)
