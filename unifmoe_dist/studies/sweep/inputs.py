"""What runs need, looked at once before any of them starts: data, tokenizers and weights, and a place for each.

Otherwise every run of a sweep would start, find the same thing missing and fail alike.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

from unifmoe_dist.data.registry import find_task
from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.sweep.planned_runs import Run


def check_inputs(runs: Sequence[Run]) -> None:
    """Read the data of each data set, source and backbone of the runs once, and build it, as the first run would.

    What comes from a hub is in its cache afterwards, so that runs side by side do not all fetch it.

    Raises:
        UserError: something is missing or unreadable; the sentence names every data set that it concerns.
    """
    from unifmoe_dist.train import build

    faults: dict[str, str] = {}
    looked_at: set[Any] = set()
    for run in runs:
        data, model = run.config.data, run.config.model
        key = (run.task, data.root, data.image_size, model.backbone, model.pretrained)
        if key in looked_at:
            continue
        looked_at.add(key)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # each run says it in its log
                build.build_task(run.config).build_model()
        except UserError as error:
            faults.setdefault(run.task, str(error))
    if not faults:
        return
    if len(faults) == 1:
        raise UserError(f"no run was started: {next(iter(faults.values()))}")
    lines = "".join(f"\n  {find_task(task).title}: {fault}" for task, fault in faults.items())
    raise UserError(f"no run was started, for {len(faults)} data sets cannot be used:{lines}")


def places(gpus: Sequence[str] | None, jobs: int | None) -> list[dict[str, str]]:
    """Environment variables of each place for a run.

    Args:
        gpus: GPUs by index, one run each; None takes all there are, unless `jobs` are asked for.
        jobs: Runs at a time on the CPU; None takes one per core where there is no GPU.

    Raises:
        UserError: a GPU does not exist, or GPUs were asked for where there is none.
    """
    import torch

    count = torch.cuda.device_count()
    if gpus is None and (count == 0 or jobs is not None):
        if jobs is not None and jobs < 1:
            raise UserError(f"--jobs must be at least 1, not {jobs}.")
        # One thread each, or runs side by side would slow one another down.
        place = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        return [place] * (jobs or os.cpu_count() or 1)
    if jobs is not None:
        raise UserError("--gpus and --jobs exclude each other: a GPU takes one run at a time.")
    gpus = gpus or [str(index) for index in range(count)]
    there = f"{count} GPUs, numbered from 0" if count else "no GPU; leave --gpus out to run on CPU cores"
    for gpu in gpus:
        if not (gpu.isdecimal() and int(gpu) < count):
            raise UserError(f"--gpus {gpu} does not exist; this machine has {there}.")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    named = visible if len(visible) == count else [str(index) for index in range(count)]
    return [{"CUDA_VISIBLE_DEVICES": named[int(gpu)]} for gpu in gpus]
