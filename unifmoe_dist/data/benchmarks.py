"""DomainBed's five image benchmarks: environments, classes, published counts and where archives come from.

The facts, in benchmarks.yaml, follow Gulrajani and Lopez-Paz, "In Search of Lost Domain Generalization" (ICLR 2021),
and its code (github.com/facebookresearch/DomainBed, `datasets.py`, `scripts/download.py`). Environments are in
DomainBed's order, that of their sorted folder names, because the split of an environment depends on its index.
"""

from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import TypeAdapter

from unifmoe_dist.data.task import find_environment

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's channel statistics, of values in 0..1, by which DomainBed normalises images."""


@dataclass(frozen=True)
class Environment:
    """One domain: the paper's name, DomainBed's folder and the published number of images."""

    name: str
    folder: str
    images: int


@dataclass(frozen=True)
class Archive:
    """One official file, and the name to keep it under; `by_hand` where the host wants a browser to confirm.

    No publisher of these archives states a checksum.
    """

    file: str
    url: str
    by_hand: bool = False
    sha256: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """One data set.

    Args:
        folder: DomainBed's folder, which holds one folder per environment, and these one per class.
        classes: Class folders, where the list is short; otherwise environments are checked against one another.
        duplicates: File in the data set's folder that lists images to leave out, one path a line.
        other_totals: Totals of other versions that are in circulation.
        short_title: Name in tables, where the title is too long for them.
        disk_gb: Size of archives and unpacked files together, about.
        annotations: Folder of annotations in the archives, by which images are to be sorted into environments.
    """

    name: str
    title: str
    folder: str
    environments: tuple[Environment, ...]
    num_classes: int
    archives: tuple[Archive, ...]
    classes: tuple[str, ...] | None = None
    duplicates: Archive | None = None
    other_totals: tuple[int, ...] = ()
    short_title: str | None = None
    disk_gb: float = 0.0
    annotations: str | None = None

    @property
    def images(self) -> int:
        """Published number of images."""
        return sum(environment.images for environment in self.environments)

    def environment_index(self, held_out: str | int) -> int:
        """Index of an environment given by the paper's name, by folder or by index; case and punctuation do not matter.

        Raises:
            UserError: there is no such environment.
        """
        names, folders = zip(*((e.name, e.folder) for e in self.environments), strict=True)
        return find_environment(held_out, self.title, names, folders)


def _read() -> dict[str, Benchmark]:
    content = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {name: TypeAdapter(Benchmark).validate_python({"name": name, **facts}) for name, facts in content.items()}


TERRA_IMAGES = "eccv_18_all_images_sm"
"""Folder of images in TerraIncognita's archive."""

BENCHMARKS = _read()
"""By the value of `data.task`."""
