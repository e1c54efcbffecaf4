#!/usr/bin/env python
"""Rehearse a job on two hosts that are made of namespaces here: `python launch/rehearse.py [cut] [kill] [slow]`."""

from __future__ import annotations

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


def main(arguments: Sequence[str]) -> None:
    parser = OptionParser(
        "rehearse.py",
        description="Train over two hosts made of Linux namespaces, and pull a cable, kill a host or slow the network. "
        "Needs Linux, util-linux and iproute2; root, or unprivileged user namespaces.",
    )
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"{', '.join(SCENARIOS)} (default: all)")
    parser.add_argument("--output", type=Path, help="new folder for runs and logs (default: a temporary one)")
    options = parser.parse_args(arguments)
    for name in options.scenarios:
        if name not in SCENARIOS:
            raise UserError(f"there is no scenario {name!r}; choose among {', '.join(SCENARIOS)}.")
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
    rehearse(options.scenarios or SCENARIOS, folder.resolve())
    print(f"runs and logs: {folder}")


if __name__ == "__main__":
    run_main(main)
