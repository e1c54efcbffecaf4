#!/usr/bin/env python
"""Predict the time of every GPU kernel of a layer from what it is compiled to; no GPU is needed.

python launch/kernel_estimates.py --cards rtx3090 --shapes vision      one card and shape, a page in Markdown
python launch/kernel_estimates.py --output docs/kernel_estimates.md    all of them, in minutes
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from unifmoe_dist.files import write_text
from unifmoe_dist.studies.kernel_estimates.cases import CARDS, LOADS
from unifmoe_dist.train.cli import run_main
from unifmoe_dist.train.options import OptionParser


def main(arguments: Sequence[str]) -> None:
    parser = OptionParser("kernel_estimates.py", description=__doc__)
    parser.add_argument("--cards", nargs="+", choices=sorted(CARDS), default=list(CARDS), help="cards to predict for")
    parser.add_argument("--shapes", nargs="+", choices=sorted(LOADS), default=list(LOADS), help="shapes of the layer")
    parser.add_argument("--output", type=Path, help="file for the page; without it, it is printed")
    options = parser.parse_args(arguments)
    from unifmoe_dist.studies.kernel_estimates.estimate import lines
    from unifmoe_dist.studies.kernel_estimates.page import HEAD, section

    parts = [HEAD]
    for card in options.cards:
        for shape in options.shapes:
            print(f"{CARDS[card].name}, {shape}:", end="", flush=True, file=sys.stderr)
            say = lambda name: print(f" {name}", end="", flush=True, file=sys.stderr)  # noqa: E731
            parts.append(section(shape, LOADS[shape], CARDS[card], list(lines(LOADS[shape], CARDS[card], say))))
            print(file=sys.stderr)
    page = "\n".join(parts)
    if options.output is None:
        print(page)
    else:
        write_text(options.output, page)
        print(f"wrote {options.output}")


if __name__ == "__main__":
    run_main(main)
