"""Rotated handwritten digits: a real domain-generalisation task that needs no download.

The 1,797 scans of scikit-learn's ``load_digits`` are dealt into six disjoint environments, which are rotated
by 0, 15, ..., 75 degrees, as DomainBed does for RotatedMNIST. One environment is held out. Each is cut 80/20
into an in-split and an out-split: training uses the in-splits of the other five, model selection their
out-splits, and the test is the held-out in-split.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.task import Task, TaskData, collate_images, find_environment, split_seed

ANGLES = (0, 15, 30, 45, 60, 75)
"""Rotation of each environment, in degrees, counter-clockwise."""

ENVIRONMENTS = tuple(f"rot{angle}" for angle in ANGLES)

DEFAULT_HELD_OUT = "rot75"
"""A hard choice on purpose: it lies outside the range of the training angles, so a model must extrapolate (as
for "rot0", which is harder still). A linear classifier reaches about 60 % there. Inner angles are easier."""

IMAGE_SIZE = 16
NUM_CLASSES = 10
DEAL_SEED = 0
"""Fixes which image belongs to which environment, for every ``split_seed``."""

MEAN, STD = 0.3, 0.35
"""Pixel statistics (of values in 0..1), rounded: constants, so no environment leaks into another's scale."""

BACKGROUND = -MEAN / STD
"""The value of empty paper after normalisation."""


class Digits(Task):
    """Rotated digits in the registry of tasks."""

    title = "Digits"
    num_classes = NUM_CLASSES
    environments: tuple[str, ...] = ENVIRONMENTS
    ignored: tuple[str, ...] = (
        "data.root",
        "model.backbone",
        "model.pretrained",
        "model.dropout",
        "model.drop_path",
        "data.image_size",
    )
    mean, std = (MEAN,), (STD,)
    stroke_above = MEAN
    backbone_sizes = 0.31e6, 64, 256
    step_seconds: tuple[float, float] | None = (0.045, 0.095)
    base_config = "digits-comparison.yaml"
    # EMoE's 24 experts do not divide an FFN 256 wide: 3 of 16, nearly the same share of it.
    method_options = dict.fromkeys(("emoe", "emoe-learn"), {"model.num_experts": 16, "model.top_k": 3})

    def read(self, config: TrainConfig) -> TaskData:
        return digits_task(config.data.held_out, split_seed(config))

    def untrained(self, config: TrainConfig) -> nn.Module:
        return build_digits_vit()

    def input_size(self, config: TrainConfig) -> tuple[int, ...]:
        return 1, IMAGE_SIZE, IMAGE_SIZE


def digits_task(held_out: str | int = DEFAULT_HELD_OUT, split_seed: int = 0) -> TaskData:
    """The task with one environment held out.

    Args:
        held_out: an environment's name ("rot0" ... "rot75") or its index (0 ... 5).
        split_seed: decides the 80/20 cut within each environment.

    Returns:
        Items are ``(image (1, 16, 16) float32, label int)``; the model is called as ``model(x=images)``.

    Raises:
        UserError: ``held_out`` is no environment.
    """
    held_index = find_environment(held_out, Digits.title, ENVIRONMENTS)
    return leave_one_out("digits", dict(zip(ENVIRONMENTS, _environments(), strict=True)), held_index, split_seed)


def leave_one_out(
    name: str, environments: Mapping[str, DigitsDataset], held_index: int, split_seed: int = 0
) -> TaskData:
    """A task of digits by environment with one of them held out; arguments as of `digits_task`."""
    names = tuple(environments)
    splits = [_split(env, split_seed * len(names) + index) for index, env in enumerate(environments.values())]
    kept = [index for index in range(len(splits)) if index != held_index]
    return TaskData(
        name=name,
        num_classes=NUM_CLASSES,
        train=[splits[index][0] for index in kept],
        validation=[splits[index][1] for index in kept],
        test=[splits[held_index][0]],
        environments=tuple(names[index] for index in kept),
        collate=collate_images,
        build_model=build_digits_vit,
        augment=shift_image,
        linear_baseline=linear_baseline,
    )


class DigitsDataset(Dataset):
    """Images ``(N, 1, 16, 16) float32`` with labels ``(N,) int64``, and where each image came from.

    ``source`` holds the images' positions in ``load_digits``, so that disjointness can be checked.
    """

    def __init__(self, images: Tensor, labels: Tensor, source: Tensor) -> None:
        self.images, self.labels, self.source = images, labels, source

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])

    def subset(self, rows: Tensor) -> DigitsDataset:
        """The given rows, copied."""
        return DigitsDataset(self.images[rows], self.labels[rows], self.source[rows])


@lru_cache(maxsize=1)
def _environments() -> tuple[DigitsDataset, ...]:
    from sklearn.datasets import load_digits  # slow to import, needed by this task alone

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.int64)
    images = F.interpolate(images, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", align_corners=False)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(DEAL_SEED))
    environments = []
    for index, angle in enumerate(ANGLES):
        source = order[index :: len(ANGLES)]
        rotated = (rotate_images(images[source], angle) - MEAN) / STD
        environments.append(DigitsDataset(rotated, labels[source], source))
    return tuple(environments)


def _split(environment: DigitsDataset, seed: int) -> tuple[DigitsDataset, DigitsDataset]:
    """The 80 % in-split and the 20 % out-split."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(environment), generator=generator)
    cut = int(0.8 * len(environment))
    return environment.subset(order[:cut]), environment.subset(order[cut:])


def rotate_images(images: Tensor, degrees: float) -> Tensor:
    """Rotate ``(N, C, H, W)`` counter-clockwise about the centre, bilinear, zeros outside."""
    radians = math.radians(degrees)
    cos, sin = math.cos(radians), math.sin(radians)
    # grid_sample asks where each output pixel comes from (x right, y down): the inverse of the turn we see.
    inverse = torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0]], dtype=images.dtype)
    grid = F.affine_grid(inverse.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def shift_image(item: tuple[Tensor, int], generator: torch.Generator) -> tuple[Tensor, int]:
    """Move the image of a training item by -1, 0 or 1 pixel along each axis.

    Args:
        item: `(image (1, H, W), label)`, normalised.
        generator: CPU generator, advanced by two draws.
    """
    image, label = item
    height, width = image.shape[1:]
    row, column = torch.randint(0, 3, (2,), generator=generator).tolist()
    padded = F.pad(image, (1, 1, 1, 1), value=BACKGROUND)
    return padded[:, row : row + height, column : column + width], label


class ConvStem(nn.Sequential):
    """``(N, channels, S, S) -> (N, width, S/4, S/4)``: two strided convolutions below the patch embedding.

    On a thousand images this is what lets a transformer learn quickly. GroupNorm, not BatchNorm: the result
    for one image must not depend on the batch, or on how a batch is spread over ranks.
    """

    def __init__(self, width: int = 32, channels: int = 1) -> None:
        super().__init__(
            nn.Conv2d(channels, width // 2, 3, stride=2, padding=1),
            nn.GroupNorm(4, width // 2),
            nn.GELU(),
            nn.Conv2d(width // 2, width, 3, stride=2, padding=1),
            nn.GroupNorm(4, width),
            nn.GELU(),
        )


def build_digits_vit(
    embed_dim: int = 64,
    depth: int = 6,
    num_heads: int = 4,
    dropout: float = 0.0,
    *,
    channels: int = 1,
    image_size: int = IMAGE_SIZE,
    num_classes: int = NUM_CLASSES,
) -> nn.Module:
    """A small timm ``VisionTransformer`` for ``(N, 1, 16, 16)`` images: 4 patches and a class token.

    Other images are ``(N, channels, image_size, image_size)``, a patch for every 8 x 8 pixels. The FFN is
    ``4 * embed_dim`` wide; parameters come from torch's global generator; logits are ``(N, num_classes)``.
    """
    from timm.layers.hybrid_embed import HybridEmbed
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=image_size,
        patch_size=2,  # counted on the stem's map, 4x4 for digits, so 4 patches
        in_chans=channels,
        num_classes=num_classes,
        global_pool="avg",
        fc_norm=False,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=num_heads,
        mlp_ratio=4.0,
        proj_drop_rate=dropout,
        embed_layer=partial(HybridEmbed, backbone=ConvStem(channels=channels)),
    )


def linear_baseline(task: TaskData) -> float:
    """Test accuracy (0..1) of logistic regression on raw pixels, fitted to all training in-splits."""
    from sklearn.linear_model import LogisticRegression

    train_x, train_y = _pixels(task.train)
    test_x, test_y = _pixels(task.test)
    model = LogisticRegression(max_iter=2000).fit(train_x.numpy(), train_y.numpy())
    return float(model.score(test_x.numpy(), test_y.numpy()))


def _pixels(datasets: list[Dataset]) -> tuple[Tensor, Tensor]:
    """All images, flattened to ``(N, C*H*W)``, and labels ``(N,)``."""
    items = [collate_images([data[i] for i in range(len(data))]) for data in datasets]  # type: ignore[arg-type]
    return torch.cat([x["x"].flatten(1) for x, _ in items]), torch.cat([y for _, y in items])
