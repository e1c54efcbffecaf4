#!/usr/bin/env python
"""Check this environment and say what to do about each problem: `python launch/doctor.py`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

SETUP = "run `make setup` and `source .venv/bin/activate`, or `pip install 'unifmoe-dist[train]'`."

try:
    from unifmoe_dist.train.cli import run_main
    from unifmoe_dist.train.options import OptionParser
except ImportError as error:
    sys.exit(f"error: {error}; {SETUP}")

SIGNS = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}


def main(arguments: Sequence[str]) -> None:
    parser = OptionParser("doctor.py", description="Check this environment; exit status 1 if training cannot work.")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of data sets (default: data)")
    parser.add_argument("--json", action="store_true", help="print the findings as one JSON list")
    options = parser.parse_args(arguments)
    try:
        from unifmoe_dist.studies.doctor.examination import examine
    except ImportError as error:
        sys.exit(f"error: {error}; {SETUP}")
    findings = []
    for finding in examine(options.data):
        findings.append(finding)
        if not options.json:
            advice = f"\n{'':26}-> {finding.advice}" if finding.advice else ""
            print(f"{SIGNS[finding.status]} {finding.subject:17} {finding.text}{advice}", flush=True)
    problems = sum(finding.status == "problem" for finding in findings)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        print(f"\n{problems} problem{'s' * (problems > 1)}" if problems else "\nready to train")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    run_main(main)
