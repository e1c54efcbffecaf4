"""DomainBed's protocol on an image benchmark: one environment held out, 80/20 splits by seed.

Training uses the in-splits of the other environments, model selection their out-splits ("training-domain validation
set"), and the test is the held-out environment's in-split (Gulrajani and Lopez-Paz, ICLR 2021).
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.benchmarks import BENCHMARKS, MEAN, STD
from unifmoe_dist.data.task import Task, TaskData, collate_images, split_seed
from unifmoe_dist.errors import UserError

if TYPE_CHECKING:
    from torch import nn

OUT_SHARE = 0.2

# From six experts to eight, as in the scripts of both: the cost table's 36.45 is DeiT-S's 20.66 and seven more copies
# of two FFNs of 1.125.
_SLOTS = {"model.num_experts": 6, "model.max_experts": 8}


class DomainBed(Task):
    """The five data sets in the registry of tasks; `BENCHMARKS` has the facts."""

    family = "domainbed"
    mean, std = MEAN, STD
    backbone_sizes = 20.66 * 2**20, 384, 1536
    method_options = {"dynmoe": _SLOTS, "mass": _SLOTS}

    def __init__(self, name: str) -> None:
        super().__init__(name)
        benchmark = BENCHMARKS[name]
        self.title = benchmark.short_title or benchmark.title
        self.num_classes, self.class_names = benchmark.num_classes, benchmark.classes
        self.environments = tuple(environment.name for environment in benchmark.environments)
        self.base_config = f"domainbed/{name}.yaml"
        self.disk_gb = benchmark.disk_gb

    def read(self, config: TrainConfig) -> TaskData:
        """The task with one environment held out.

        Items of `train` are `(PIL image, label)`, which `augment` turns into `(tensor, label)`; items of the others are
        `((3, image_size, image_size) float32, label)`. The model is called as `model(x=images)`.
        """
        from unifmoe_dist.data.image_folders import list_images
        from unifmoe_dist.data.images import EvaluationTransform, ImageDataset, TrainingTransform

        benchmark, data = BENCHMARKS[self.name], config.data
        held = benchmark.environment_index(data.held_out)
        folders = list_images(benchmark, data.root)
        for folder in folders:
            if int(OUT_SHARE * len(folder)) < 1:
                raise UserError(
                    f"{folder.path} holds {len(folder)} images, too few for an out-split of 20 %; it needs at least 5."
                )
        splits = [split(len(folder), split_seed(config), index) for index, folder in enumerate(folders)]
        kept = [index for index in range(len(folders)) if index != held]
        plain = EvaluationTransform(data.image_size)
        return TaskData(
            name=self.name,
            num_classes=self.num_classes,
            train=[ImageDataset(folders[index], splits[index][0], None) for index in kept],
            validation=[ImageDataset(folders[index], splits[index][1], plain) for index in kept],
            test=[ImageDataset(folders[held], splits[held][0], plain)],
            environments=tuple(self.environments[index] for index in kept),
            collate=collate_images,
            build_model=partial(self._backbone, config, config.model.pretrained),
            augment=TrainingTransform(data.image_size),
        )

    def untrained(self, config: TrainConfig) -> nn.Module:
        return self._backbone(config, "none")

    def _backbone(self, config: TrainConfig, pretrained: str | None) -> nn.Module:
        from unifmoe_dist.data.vision_backbone import DEFAULT_BACKBONE, build_backbone

        model = config.model
        return build_backbone(
            model.backbone or DEFAULT_BACKBONE,
            self.num_classes,
            config.data.image_size,
            pretrained,
            dropout=model.dropout,
            drop_path=model.drop_path,
        )

    def input_size(self, config: TrainConfig) -> tuple[int, ...]:
        return 3, config.data.image_size, config.data.image_size

    def held_out(self, config: TrainConfig) -> str | None:
        return self.environments[BENCHMARKS[self.name].environment_index(config.data.held_out)]

    def offline(self, config: TrainConfig, backbone: Path | None) -> TrainConfig:
        return replace(config, model=replace(config.model, pretrained="none"))

    def prepare(self, archives: Sequence[Path], root: Path | None, progress: bool) -> str:
        """Unpack the official archives, which are downloaded where that is possible without a browser."""
        from unifmoe_dist.data.image_folders import DATA
        from unifmoe_dist.data.prepare import fetch_archives, fetch_duplicates, prepare

        benchmark, root = BENCHMARKS[self.name], root or DATA / self.name
        if not archives:
            archives = fetch_archives(benchmark, root / "archives", progress)
            if benchmark.duplicates is not None:
                fetch_duplicates(benchmark.duplicates, root / "archives", progress)
        folder = prepare(benchmark, archives, root, progress)
        found = DATA.resolve() in (root.resolve(), root.resolve().parent)  # then no root need be named
        words = ["--config", f"configs/{self.base_config}", *([] if found else ["--data.root", str(root)])]
        return (
            f"{folder} is ready; train with: deepspeed launch/train.py {shlex.join(words)} "
            f"--data.held_out {shlex.quote(self.environments[-1])}"
        )

    def timm_arguments(self, config: TrainConfig) -> dict[str, Any]:
        """The size, and dropout: timm makes it a layer, which counts in the names of weights after it."""
        return {"img_size": config.data.image_size, "proj_drop_rate": config.model.dropout}


def split(count: int, split_seed: int, environment: int) -> tuple[np.ndarray, np.ndarray]:
    """In-split and out-split of an environment: the very images that DomainBed takes for this `trial_seed`.

    Args:
        count: Images in the environment.
        split_seed: DomainBed's trial seed.
        environment: Index of the environment, in DomainBed's order.

    Returns:
        (in, out): int64 rows. The out-split is the first `int(0.2 * count)` of a permutation by NumPy's legacy
        generator, whose seed is a hash of the other two arguments; the in-split is the rest.
    """
    digest = hashlib.md5(str((split_seed, environment)).encode(), usedforsecurity=False).hexdigest()
    rows = np.arange(count)
    np.random.RandomState(int(digest, 16) % 2**31).shuffle(rows)
    cut = int(count * OUT_SHARE)
    return rows[cut:], rows[:cut]
