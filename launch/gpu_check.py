#!/usr/bin/env python
"""Check on a device that everything runs, is right and how fast: `make gpu`, or `python launch/gpu_check.py`.

Needs no installation, no network and no library but torch, Triton and pydantic; docs/gpu.md says what it does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if (ROOT / "unifmoe_dist").is_dir():  # a checkout, installed or not
    sys.path.insert(0, str(ROOT))

from unifmoe_dist.errors import UserError  # noqa: E402
from unifmoe_dist.studies.gpu_check.parts import PARTS  # noqa: E402
from unifmoe_dist.train.options import OptionParser  # noqa: E402


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of the command.

    Raises:
        UserError: a number that must be above 0 is not.
    """
    parser = OptionParser("gpu_check.py", description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="time for all of it (8)")
    parser.add_argument("--output", type=Path, help="folder of results (runs/gpu-check-CARD-TIME)")
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=f"of {', '.join(names)}")
    parser.add_argument("--jobs", type=int, help="parts beside one another, of those that measure no times (up to 5)")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="only write the page of a check made elsewhere")
    options = parser.parse_args(arguments)
    for name in ("minutes", "jobs"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name} must be above 0 and finite, not {value}.")
    return options


def main(arguments: Sequence[str]) -> int:
    """Run it; 1 if a part failed."""
    options = parse(arguments)
    from unifmoe_dist.studies.gpu_check import writing

    if options.report is not None:
        try:
            results = writing.read_results(options.report)
        except (OSError, ValueError) as error:
            raise UserError(f"--report {options.report} holds no results.json that can be read ({error}).") from error
        return 0 if writing.write_page(options.report, results) else 1
    from unifmoe_dist.studies.gpu_check.whole import check

    parts = [part for part in PARTS if options.only is None or part.name in options.only]
    results = check(parts, options.output, options.minutes, options.jobs)
    print("\n" + writing.summary(Path(results["folder"]), results), flush=True)
    return 1 if writing.failed_parts(results) else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as mistake:
        print(f"error: {mistake}", file=sys.stderr)
        sys.exit(2)
