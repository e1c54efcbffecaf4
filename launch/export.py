#!/usr/bin/env python
"""A run as a Transformers or timm folder: `python launch/export.py RUN --output FOLDER`."""

from collections.abc import Sequence
from pathlib import Path

from unifmoe_dist.train.cli import run_main
from unifmoe_dist.train.options import OptionParser


def main(arguments: Sequence[str]) -> None:
    parser = OptionParser("export.py", description="Write a run's checkpoint in the layout of the model's own library.")
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--checkpoint", default="best", help="best, latest or step-N (default: best)")
    options = parser.parse_args(arguments)
    from unifmoe_dist.train.export import export

    written = export(options.run, options.output, options.checkpoint)
    print(
        f"{written}: load it with from_pretrained (Transformers, after unifmoe_dist.enable_from_pretrained()), "
        "timm.create_model (dense timm models) or unifmoe_dist.train.export.load_exported"
    )


if __name__ == "__main__":
    run_main(main)
