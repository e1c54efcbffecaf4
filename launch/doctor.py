#!/usr/bin/env python
"""Check this environment and say what to do about each problem: `python launch/doctor.py`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

try:
    from unifmoe_dist.engine.cli import run_main
    from unifmoe_dist.engine.doctor import examine
except ImportError as error:
    sys.exit(f"error: {error}; run `make setup` and `source .venv/bin/activate`.")

SIGNS = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Check this environment; exit status 1 if training cannot work.")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of data sets (default: data)")
    options = parser.parse_args(arguments)
    problems = 0
    for finding in examine(options.data):
        advice = f"\n{'':26}-> {finding.advice}" if finding.advice and finding.status != "ok" else ""
        print(f"{SIGNS[finding.status]} {finding.subject:17} {finding.text}{advice}", flush=True)
        problems += finding.status == "problem"
    print(f"\n{problems} problems" if problems else "\nready to train")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    run_main(main)
