"""Tasks of data that tests wrote, with the options that these need."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace as Options
from typing import Any

from unifmoe_dist.data.encoders import GLUE_BACKBONE, Encoder
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.data.task import TaskData


def domainbed_task(
    name: str, held_out: str | int, root: str | Path | None = None, split_seed: int = 0, image_size: int = 224
) -> TaskData:
    data = Options(held_out=held_out, root=root, split_seed=split_seed, image_size=image_size)
    model = Options(backbone=None, pretrained=None, dropout=0.0, drop_path=0.0)
    config: Any = Options(data=data, model=model)
    return find_task(name).read(config)


def glue_task(
    name: str, root: str | Path | None = None, encoder: Encoder | None = None, dropout: float = 0.1
) -> TaskData:
    encoder = encoder or Encoder(GLUE_BACKBONE)
    model = Options(backbone=encoder.backbone, pretrained=encoder.pretrained, dropout=dropout)
    config: Any = Options(data=Options(root=root), model=model)
    return find_task(name).read(config)
