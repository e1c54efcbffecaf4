#!/usr/bin/env python
"""Hold memory estimates against measured peaks, on this machine's CPU or GPUs.

    python launch/memory.py                                           settings that a CPU can run, a table in Markdown
    python launch/memory.py --ranks 2 --config FILE [--option value]  one configuration, options as of launch/train.py

Trains three steps of each on made-up items, in new processes. `launch/train.py --estimate` shows an estimate alone.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from unifmoe_dist.errors import UserError
from unifmoe_dist.train.cli import parse_train_config, run_main
from unifmoe_dist.train.options import OptionParser


def main(arguments: Sequence[str]) -> None:
    parser = OptionParser("memory.py", description=__doc__)
    parser.add_argument("--ranks", type=int, help="world size, of a configuration that is given (1)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each rank (1)")
    options, words = parser.parse_known_args(arguments)
    for name in ("ranks", "threads"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise UserError(f"--{name} must be at least 1, not {value}.")
    if options.ranks is not None and not words:
        raise UserError("--ranks is for a configuration that is given; the settings without one have their own.")
    given = [("as given", parse_train_config(words), options.ranks or 1)] if words else []
    from unifmoe_dist.studies.memory.measured_peak import check, settings

    print("| setting | ranks | estimated (MiB) | measured (MiB) | ratio |")
    print("| --- | ---: | ---: | ---: | ---: |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, config, ranks in given or settings(Path(folder)):
            config.validate(ranks)
            found = check(config, ranks, options.threads)
            sizes = f"{found.estimated / 2**20:.1f} | {found.measured / 2**20:.1f} | {found.ratio:.3f}"
            print(f"| {name} | {ranks} | {sizes} |", flush=True)


if __name__ == "__main__":
    run_main(main)
