"""Whether the MoE layers fit the backbone, found out before a large data set is read: on a model without storage."""

from __future__ import annotations

from contextlib import suppress
from typing import get_args

import torch

from unifmoe_dist.config import GlueName, TrainConfig
from unifmoe_dist.data.benchmarks import BENCHMARKS
from unifmoe_dist.errors import UserError
from unifmoe_dist.train import build


def check_layers(config: TrainConfig) -> None:
    """Refuse layers, blocks and experts that the backbone of a DomainBed or GLUE run cannot have.

    The other tasks are read in a moment, so their models speak for themselves.

    Raises:
        UserError: as building the model would.
    """
    if config.model.moe == "none" or config.data.task not in (*BENCHMARKS, *get_args(GlueName)):
        return
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        backbone = None
        with suppress(UserError):  # a backbone that cannot be had is refused when its weights are read
            backbone = build.untrained_backbone(config)
        if backbone is not None:
            build.install_layers(config, backbone)
