"""What runs read, looked at once before any of them starts: data, tokenizers and weights.

Otherwise every run of a sweep would start, find the same thing missing and fail alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from unifmoe_dist.data.registry import find_task
from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.sweep.plan import Run


def check_inputs(runs: Sequence[Run]) -> None:
    """Read the data of each data set and build each backbone once, as the first run would.

    What comes from a hub is in its cache afterwards, so that runs side by side do not all fetch it.

    Args:
        runs: Runs that are to be started; one of each data set, source and backbone is looked at.

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
