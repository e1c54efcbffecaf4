#!/usr/bin/env python
"""What a trained run's layers do: `python launch/analyze.py RUN [OTHER_RUN ...] [--masks FOLDER] [--cost]`.

Writes RUN/analysis/report.html, one page that needs nothing else, with figures/ (PNG, PDF), tables/ (CSV) and
numbers.json beside it; with several runs, --masks, --methods, --cost, --class or --checkpoint in a folder of their own,
such as RUN/analysis-cost, so that no report takes another's place. UniF-MoE: how blocks and experts are used, and
where. A fixed number of experts per token: the paper's three observations. Several runs: the same for each, and over
all of them. Any run, dense ones too: learning curves and cost.
"""

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.sweep.planned_runs import folder_name as folder_word
from unifmoe_dist.train.cli import run_main
from unifmoe_dist.train.options import OptionParser


def main(arguments: Sequence[str]) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    counts = {"--tokens": options.tokens, "--batches": options.batches, "--router-steps": options.router_steps}
    counts |= {"--images": options.images, "--threshold": options.threshold}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, not {value}.")
    if not -1 <= options.delta <= 1:
        raise UserError(f"--delta is a cosine, from -1 to 1, not {options.delta:g}.")
    from unifmoe_dist.studies.run_report import StudyOptions, can_be_diagnosed, load_run, report_runs, shows_patches

    folders = _folders(options)
    for number, folder in enumerate(folders):
        if folder.resolve() in [other.resolve() for other in folders[:number]]:
            named = f"--compare names {folder} itself" if options.compare else f"{folder} is named twice"
            raise UserError(f"{named}; give another run.")
        if not (folder / "config.yaml").is_file():
            raise UserError(f"{folder} is not a run; give the folder that a training run wrote.")
    labels = run_labels(folders)
    runs = [
        load_run(folder, options.checkpoint, label, options.data_root)
        for folder, label in zip(folders, labels, strict=True)
    ]
    if not any(can_be_diagnosed(layer) for run in runs for layer in run.layers.values()):
        none = f"{labels[0]} has none" if len(labels) == 1 else f"neither {' nor '.join(labels)} has any"
        parser.refuse_others(
            arguments,
            vars(options).keys() - {"router_steps", "delta"},
            f"the three observations are of layers with a fixed number of experts per token, and {none}",
        )
    if not any(shows_patches(run) for run in runs):
        parser.refuse_others(
            arguments,
            vars(options).keys() - {"of_class", "images", "threshold"},
            f"patches are shown of UniF-MoE layers on images, and no layer of {' or '.join(labels)} is one",
        )
    wanted = StudyOptions(
        measure=options.cost,
        methods=options.cost or options.methods,
        router_steps=options.router_steps,
        delta=options.delta,
        masks=options.masks,
        of_class=options.of_class,
        images=options.images,
        threshold=options.threshold,
        most_items=None if options.batches is None else options.batches * runs[0].config.data.eval_batch_size,
        **({} if options.tokens is None else {"most_tokens": options.tokens}),
    )
    command = shlex.join(["python", "launch/analyze.py", *arguments])
    print(report_runs(runs, options.output or folders[0] / folder_name(options), wanted, command))


def _folders(options: argparse.Namespace) -> list[Path]:
    return [*options.run, *([] if options.compare is None else [options.compare])]


def run_labels(folders: Sequence[Path]) -> list[str]:
    """Names of runs: those of their folders, or, where some have the same, as all of a sweep's are called seed0, what
    their paths do not have in common."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) == len(names):
        return names
    parts = [list(folder.resolve().parts) for folder in folders]
    for end in (0, -1):  # what is alike at the start, then at the end
        while min(map(len, parts)) > 1 and len({part[end] for part in parts}) == 1:
            for part in parts:
                del part[end]
    return ["/".join(part) for part in parts]


def folder_name(options: argparse.Namespace) -> str:
    """Folder of the report in the run's: another one for every kind of content, so that reports stay side by side."""
    parts = ["analysis"]
    if options.checkpoint != "best":
        parts.append(options.checkpoint)
    if options.masks is not None:
        parts += dict.fromkeys(["masks", options.masks.resolve().name])
    if options.cost or options.methods:
        parts.append("cost" if options.cost else "methods")
    if options.of_class is not None:
        parts.append(folder_word(options.of_class))
    own, *others = [folder.resolve() for folder in _folders(options)]
    if len(others) == 1:  # by what its path has and the run's has not: all runs of a sweep are called seed0
        parts += ["with", *others[0].relative_to(os.path.commonpath([own, others[0].parent])).parts]
    elif others:
        parts += ["with", str(len(others)), "others"]
    return "-".join(parts)


def _parser() -> OptionParser:
    parser = OptionParser("analyze.py", description=__doc__)
    parser.add_argument("run", type=Path, nargs="+", help="folder of the run, or of several to show together")
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
    maps = parser.add_argument_group("images with the blocks of their patches")
    maps.add_argument("--class", dest="of_class", metavar="NAME", help="test images of this class (default: any)")
    maps.add_argument("--images", type=int, help="how many of each run (default: 8)")
    maps.add_argument("--threshold", type=int, metavar="C_B", help="outline patches from here on (the highest tenth)")
    parser.add_argument(
        "--methods", action="store_true", help="count N, N_A and FLOPs of every method of the paper's tables too"
    )
    parser.add_argument("--cost", action="store_true", help="--methods, and measure the seconds and memory of all")
    return parser


if __name__ == "__main__":
    run_main(main)
