#!/usr/bin/env python
"""Rehearse a job on two hosts that are made of namespaces here.

python launch/rehearse.py [cut] [kill] [slow]            what a cluster does to a job; judged by the losses
python launch/rehearse.py slow-link [--megabits 100]     flat and two_level over a slow link, side by side
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.rehearsal.scenarios import SCENARIOS, rehearse
from unifmoe_dist.train.cli import run_main
from unifmoe_dist.train.options import OptionParser

SLOW_LINK = "slow-link"


def main(arguments: Sequence[str]) -> None:
    parser = OptionParser(
        "rehearse.py",
        description="Train over two hosts made of Linux namespaces, and pull a cable, kill a host or slow the "
        "network; or, slow-link, compare the flat exchange with the one that knows nodes. Needs Linux, util-linux and "
        "iproute2; root, or unprivileged user namespaces.",
    )
    parser.add_argument(
        "scenarios", nargs="*", metavar="SCENARIO", help=f"{', '.join(SCENARIOS)} (default: these) or {SLOW_LINK}"
    )
    parser.add_argument("--output", type=Path, help="new folder for runs and logs (default: a temporary one)")
    parser.add_argument("--megabits", type=int, help=f"rate of the link of {SLOW_LINK}, 10 to 1000 Mbit/s (100)")
    ranks = "ranks on each host of the other scenarios; two use the exchange between nodes (1)"
    parser.add_argument("--ranks-per-host", type=int, choices=(1, 2), default=1, help=ranks)
    options = parser.parse_args(arguments)
    for name in options.scenarios:
        if name not in (*SCENARIOS, SLOW_LINK):
            raise UserError(f"there is no scenario {name!r}; choose among {', '.join([*SCENARIOS, SLOW_LINK])}.")
    if options.megabits is not None and SLOW_LINK not in options.scenarios:
        raise UserError(f"--megabits belongs to {SLOW_LINK}; add it to the scenarios, or leave --megabits out.")
    if not 10 <= (megabits := options.megabits or 100) <= 1000:
        raise UserError(f"--megabits must be from 10 to 1000, not {megabits}.")
    if os.geteuid() != 0 and shutil.which("unshare"):  # become root of a user namespace, which nobody else sees
        words = ["unshare", "--map-root-user", "--net", "--mount"]
        tried = subprocess.run([*words, "true"], capture_output=True, text=True)
        if tried.returncode:
            raise UserError(
                f"this user may not make namespaces ({tried.stderr.strip()}); run as root, or where unprivileged user "
                "namespaces are allowed."
            )
        os.execvp(words[0], [*words, sys.executable, *sys.argv])  # noqa: S606
    folder = options.output or Path(tempfile.mkdtemp(prefix="unifmoe-rehearsal-"))
    if disturbed := [name for name in options.scenarios or SCENARIOS if name != SLOW_LINK]:
        rehearse(disturbed, folder.resolve(), options.ranks_per_host)
    if SLOW_LINK in options.scenarios:
        from unifmoe_dist.studies.rehearsal import slow_link_report

        slow_link_report.rehearse(folder.resolve() / SLOW_LINK, megabits)
    print(f"runs and logs: {folder}")


if __name__ == "__main__":
    run_main(main)
