"""DomainBed's five image benchmarks as data: environments, classes, published counts and where archives come from.

Facts follow Gulrajani and Lopez-Paz, "In Search of Lost Domain Generalization" (ICLR 2021), and its code
(github.com/facebookresearch/DomainBed, `datasets.py`, `scripts/download.py`). Environments are in DomainBed's order,
that of their sorted folder names, because the split of an environment depends on its index.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def _environments(names: str, *images: int, folders: str | None = None) -> tuple[Environment, ...]:
    """Environments by name, of so many images each, whose folders have the same names unless others are given."""
    listed = names.split(", ")
    return tuple(map(Environment, listed, folders.split(", ") if folders else listed, images))


def _drive(file: str, key: str) -> tuple[Archive, ...]:
    return (Archive(file, f"https://drive.google.com/uc?id={key}", by_hand=True),)


_LILA = "https://storage.googleapis.com/public-datasets-lila/caltechcameratraps"
_VISDA = "http://csr.bu.edu/ftp/visda/2019/multi-source"
_VISDA_FOLDERS = {
    "clipart": "groundtruth/",
    "infograph": "",
    "painting": "groundtruth/",
    "quickdraw": "",
    "real": "",
    "sketch": "",
}

TERRA_IMAGES = "eccv_18_all_images_sm"
TERRA_ANNOTATIONS = "eccv_18_annotation_files"

BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            "pacs",
            "PACS",
            "PACS",
            _environments(
                "Art, Cartoon, Photo, Sketch", 2048, 2344, 1670, 3929, folders="art_painting, cartoon, photo, sketch"
            ),
            7,
            _drive("PACS.zip", "1JFr8f805nMUelQWWmfnJR3y4_SYoN5Pd"),
            classes=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
            disk_gb=0.4,
        ),
        Benchmark(
            "vlcs",
            "VLCS",
            "VLCS",
            _environments("Caltech101, LabelMe, SUN09, VOC2007", 1415, 2656, 3282, 3376),
            5,
            _drive("VLCS.tar.gz", "1skwblH1_okBwxWxmRsp9_qi15hyPpxg8"),
            classes=("bird", "car", "chair", "dog", "person"),
            disk_gb=7.0,
        ),
        Benchmark(
            "officehome",
            "OfficeHome",
            "office_home",
            _environments("Art, Clipart, Product, Real World", 2427, 4365, 4439, 4357),
            65,
            _drive("office_home.zip", "1uY0pj7oFsjMxRwaD3Sxy0jgel0fsYXLC"),
            disk_gb=2.2,
        ),
        # Counts: github.com/khanrc/miro/issues/9, which also reports that today's archives give 24,330 images.
        Benchmark(
            "terraincognita",
            "TerraIncognita",
            "terra_incognita",
            _environments(
                "L100, L38, L43, L46",
                *(4879, 9767, 4020, 6122),
                folders="location_100, location_38, location_43, location_46",
            ),
            10,
            (
                Archive(f"{TERRA_IMAGES}.tar.gz", f"{_LILA}/{TERRA_IMAGES}.tar.gz"),
                Archive("eccv_18_annotations.tar.gz", f"{_LILA}/eccv_18_annotations.tar.gz"),
            ),
            classes=("bird", "bobcat", "cat", "coyote", "dog", "empty", "opossum", "rabbit", "raccoon", "squirrel"),
            other_totals=(24330,),
            short_title="TerraInc.",
            disk_gb=13.0,
            annotations=TERRA_ANNOTATIONS,
        ),
        Benchmark(
            "domainnet",
            "DomainNet",
            "domain_net",
            _environments(
                "Clipart, Infograph, Painting, Quickdraw, Real, Sketch",
                *(48129, 51605, 72266, 172500, 172947, 69128),
                folders=", ".join(_VISDA_FOLDERS),
            ),
            345,
            tuple(Archive(f"{name}.zip", f"{_VISDA}/{at}{name}.zip") for name, at in _VISDA_FOLDERS.items()),
            # 9,431 paths; the checksum is that of the file at DomainBed's commit b93c22a.
            duplicates=Archive(
                "domain_net_duplicates.txt",
                "https://raw.githubusercontent.com/facebookresearch/DomainBed/main/domainbed/misc/"
                "domain_net_duplicates.txt",
                sha256="a52b4ab70203f4f3df381077694dba3e33ff44c26407e1c5faca76919c702770",
            ),
            disk_gb=37.0,
        ),
    )
}
"""By the value of `data.task`."""
