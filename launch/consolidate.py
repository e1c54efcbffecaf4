#!/usr/bin/env python
"""One file from a run of any number of ranks: `python launch/consolidate.py RUN --output model.safetensors`."""

from collections.abc import Sequence
from pathlib import Path

from unifmoe_dist.train.cli import run_main
from unifmoe_dist.train.options import OptionParser


def main(arguments: Sequence[str]) -> None:
    parser = OptionParser("consolidate.py", description="Write a run's checkpoint as one plain safetensors file.")
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parser.add_argument("--checkpoint", default="best", help="best, latest or step-N (default: best)")
    options = parser.parse_args(arguments)
    from unifmoe_dist.train.export import consolidate

    written = consolidate(options.run, options.output, options.checkpoint)
    print(f"{written}: load it with unifmoe_dist.train.export.load_consolidated")


if __name__ == "__main__":
    run_main(main)
