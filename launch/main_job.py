#!/usr/bin/env python
"""The main job on whatever is here: train UniF-MoE and its dense twin through the deepspeed launcher, then compare."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from unifmoe_dist.runtime import signals
from unifmoe_dist.studies.report.compare import comparison_table
from unifmoe_dist.train.cli import run_main

CPU_RANKS = 2


def launch(folder: Path, options: Sequence[str]) -> None:
    """Run launch/train.py on all GPUs, or on two CPU ranks without one. Leaves if it fails or was stopped."""
    import torch

    environment = dict(os.environ)
    command = [sys.executable, "-m", "unifmoe_dist.runtime.deepspeed_launcher"]
    if not torch.cuda.is_available():
        environment["DS_ACCELERATOR"] = "cpu"
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // CPU_RANKS)))
        command += ["--num_accelerators", str(CPU_RANKS)]
    command += [str(Path(__file__).with_name("train.py")), *options, "--output", str(folder)]
    status = signals.wait_for(command, environment)
    if status or not (folder / "summary.json").is_file():  # a run that was told to stop has saved and ends with 0
        sys.exit(status)


def free_folder(stem: str) -> Path:
    """runs/<stem>, or the first numbered one that does not exist."""
    number = 1
    while (folder := Path("runs", stem if number == 1 else f"{stem}-{number}")).exists():
        number += 1
    return folder


def main(arguments: Sequence[str]) -> None:
    if {"-h", "--help"} & {*arguments}:
        print(f"{__doc__}\n\nTakes the options of launch/train.py, for both runs; see launch/train.py --help.")
        return
    folder = free_folder("main-job")
    unif, dense = folder / "unif", folder / "dense"
    launch(unif, arguments)
    launch(dense, [*arguments, "--model.moe", "none", "--baseline", "false"])
    from unifmoe_dist.studies.domain_scores import domain_figure, domain_scores, domain_table
    from unifmoe_dist.studies.figures.style import save

    print(f"\n{comparison_table([unif, dense])}")
    if scores := [found for found in map(domain_scores, (unif, dense)) if found]:
        save(domain_figure(scores), folder / "domains.png")
        print(f"\n{domain_table(scores)}")
    print(f"\nruns and plots: {folder}")


if __name__ == "__main__":
    run_main(main)
