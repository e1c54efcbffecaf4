#!/usr/bin/env python
"""The paper's tables and plots from a sweep's runs: `python launch/report.py FOLDER`.

Writes FOLDER/report/: report.md with every table, plot and missing run, and for each table NAME.md, .tex, .csv, .png.
"""

from collections.abc import Sequence
from pathlib import Path

from unifmoe_dist.train.cli import run_main
from unifmoe_dist.train.options import OptionParser


def main(arguments: Sequence[str]) -> None:
    parser = OptionParser("report.py", description=__doc__)
    parser.add_argument("folder", type=Path, help="--output of launch/sweep.py")
    parser.add_argument("--output", type=Path, help="folder of the report (FOLDER/report)")
    options = parser.parse_args(arguments)

    from unifmoe_dist.studies.report.sweep_report import write_report

    print(write_report(options.folder, options.output or options.folder / "report"))


if __name__ == "__main__":
    run_main(main)
