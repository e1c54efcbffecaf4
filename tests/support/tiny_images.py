"""Tiny data sets in DomainBed's layouts, drawn at test time: a class is a colour, an environment a brightness."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from unifmoe_dist.data.benchmarks import BENCHMARKS, Benchmark


def class_names(benchmark: Benchmark) -> tuple[str, ...]:
    """The benchmark's classes, or as many made-up ones."""
    return benchmark.classes or tuple(f"class_{number:03d}" for number in range(benchmark.num_classes))


def write_image(path: Path, label: int, environment: int, seed: int, size: int = 12) -> None:
    """A noisy image whose hue follows the label; .png or .jpg, by name."""
    random = np.random.default_rng((label, environment, seed))
    hue = np.array([np.cos(2.1 * label), np.cos(2.1 * label + 2), np.sin(1.7 * label)])
    pixels = 128 + 80 * hue + 12 * environment + random.normal(0, 10, (size, size, 3))
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)


def make_benchmark(root: Path, name: str, per_class: int = 2, size: int = 12) -> Path:
    """Write the data set below `root` and return its folder; every second image is a PNG."""
    benchmark = BENCHMARKS[name]
    folder = root / benchmark.folder
    for number, environment in enumerate(benchmark.environments):
        for label, name_of_class in enumerate(class_names(benchmark)):
            for index in range(per_class):
                file = f"{index:03d}.{'png' if index % 2 else 'jpg'}"
                write_image(folder / environment.folder / name_of_class / file, label, number, index, size)
    return folder


# -- the backbone -------------------------------------------------------------------------------------------------

TINY = "vit_tiny_patch16_224"
