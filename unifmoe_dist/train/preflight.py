"""Whether the MoE layers fit the backbone, found out before a large data set is read: on a model without storage."""

from __future__ import annotations

from contextlib import suppress

import torch

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.registry import method_of
from unifmoe_dist.train import build


def check_layers(config: TrainConfig) -> None:
    """Refuse layers, blocks and experts that the task's backbone cannot have.

    Raises:
        UserError: as building the model would.
    """
    if not method_of(config.model.moe).layer:
        return
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        backbone = None
        with suppress(UserError):  # a backbone that cannot be had is refused when its weights are read
            backbone = find_task(config.data.task).untrained(config)
        if backbone is not None:
            build.install_layers(config, backbone)
