"""Whether the MoE layers fit the backbone, found out before a large data set is read: on a model without storage."""

from __future__ import annotations

from contextlib import suppress
from typing import get_args

import torch
from torch import nn

from unifmoe_dist.config import GlueName, TrainConfig
from unifmoe_dist.data.benchmarks import BENCHMARKS
from unifmoe_dist.engine import build
from unifmoe_dist.errors import UserError


def check_layers(config: TrainConfig) -> None:
    """Refuse layers, blocks and experts that the backbone of a DomainBed or GLUE run cannot have.

    The other tasks are read in a moment, so their models speak for themselves.

    Raises:
        UserError: as building the model would.
    """
    if config.model.moe == "none":
        return
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        backbone = None
        with suppress(UserError):  # a backbone that cannot be had is refused when its weights are read
            backbone = _skeleton(config)
        if backbone is not None:
            build.install_layers(config, backbone)


def _skeleton(config: TrainConfig) -> nn.Module | None:
    if config.data.task in BENCHMARKS:
        from unifmoe_dist.data.vision_backbone import DEFAULT_BACKBONE, build_backbone

        classes = BENCHMARKS[config.data.task].num_classes
        return build_backbone(config.model.backbone or DEFAULT_BACKBONE, classes, config.data.image_size, "none")
    if config.data.task in get_args(GlueName):
        from unifmoe_dist.data.encoders import Encoder

        return Encoder(build.glue_encoder(config).source, "none").classifier(2, 0.0)
    return None
