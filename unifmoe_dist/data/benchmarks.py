"""DomainBed's five image benchmarks as data: environments, classes, published counts and where archives come from.

Facts follow Gulrajani and Lopez-Paz, "In Search of Lost Domain Generalization" (ICLR 2021), and its code
(github.com/facebookresearch/DomainBed, `datasets.py`, `scripts/download.py`). Environments are in DomainBed's order,
that of their sorted folder names, because the split of an environment depends on its index.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from unifmoe_dist.errors import UserError


@dataclass(frozen=True)
class Environment:
    """One domain.

    Args:
        name: The paper's name.
        folder: DomainBed's folder.
        images: Published number of images.
    """

    name: str
    folder: str
    images: int


@dataclass(frozen=True)
class Archive:
    """One official file.

    Args:
        file: Name to keep it under.
        url: Where it is published.
        by_hand: The host wants a browser (it asks for a confirmation), so it is not downloaded automatically.
        sha256: Its checksum, where one is known; no publisher of these archives states one.
    """

    file: str
    url: str
    by_hand: bool = False
    sha256: str | None = None


@dataclass(frozen=True)
class Benchmark:
    """One data set.

    Args:
        name: Value of `data.task`.
        title: Name for people.
        folder: DomainBed's folder, which holds one folder per environment, and these one per class.
        environments: In DomainBed's order.
        num_classes: Number of classes, the same in every environment.
        archives: The official files.
        classes: Class folders, where the list is short; otherwise environments are checked against one another.
        duplicates: File in the data set's folder that lists images to leave out, one path a line.
        other_totals: Totals of other versions that are in circulation.
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

    @property
    def images(self) -> int:
        """Published number of images."""
        return sum(environment.images for environment in self.environments)

    def environment_index(self, held_out: str | int) -> int:
        """Index of an environment given by the paper's name, by folder or by index; case and punctuation do not matter.

        Raises:
            UserError: there is no such environment.
        """
        given = str(held_out)
        wanted = plain(given)
        for index, environment in enumerate(self.environments):
            if wanted in (plain(environment.name), plain(environment.folder)):
                return index
        if not isinstance(held_out, bool) and given.isdecimal() and int(given) < len(self.environments):
            return int(given)
        names = ", ".join(environment.name for environment in self.environments)
        raise UserError(
            f"data.held_out {held_out!r} is no environment of {self.title}; give --data.held_out one of {names}, or an "
            f"index from 0 to {len(self.environments) - 1}."
        )


def plain(name: str) -> str:
    """Lower case, letters and digits only: "Real World", "real_world" and "RealWorld" are one name."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _drive(file: str, key: str) -> Archive:
    return Archive(file, f"https://drive.google.com/uc?id={key}", by_hand=True)


_LILA = "https://storage.googleapis.com/public-datasets-lila/caltechcameratraps"
_VISDA = "http://csr.bu.edu/ftp/visda/2019/multi-source"

TERRA_IMAGES = "eccv_18_all_images_sm"
TERRA_ANNOTATIONS = "eccv_18_annotation_files"

BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            "pacs",
            "PACS",
            "PACS",
            (
                Environment("Art", "art_painting", 2048),
                Environment("Cartoon", "cartoon", 2344),
                Environment("Photo", "photo", 1670),
                Environment("Sketch", "sketch", 3929),
            ),
            7,
            (_drive("PACS.zip", "1JFr8f805nMUelQWWmfnJR3y4_SYoN5Pd"),),
            classes=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
        ),
        Benchmark(
            "vlcs",
            "VLCS",
            "VLCS",
            (
                Environment("Caltech101", "Caltech101", 1415),
                Environment("LabelMe", "LabelMe", 2656),
                Environment("SUN09", "SUN09", 3282),
                Environment("VOC2007", "VOC2007", 3376),
            ),
            5,
            (_drive("VLCS.tar.gz", "1skwblH1_okBwxWxmRsp9_qi15hyPpxg8"),),
            classes=("bird", "car", "chair", "dog", "person"),
        ),
        Benchmark(
            "officehome",
            "OfficeHome",
            "office_home",
            (
                Environment("Art", "Art", 2427),
                Environment("Clipart", "Clipart", 4365),
                Environment("Product", "Product", 4439),
                Environment("Real World", "Real World", 4357),
            ),
            65,
            (_drive("office_home.zip", "1uY0pj7oFsjMxRwaD3Sxy0jgel0fsYXLC"),),
        ),
        # Counts: github.com/khanrc/miro/issues/9, which also reports that today's archives give 24,330 images.
        Benchmark(
            "terraincognita",
            "TerraIncognita",
            "terra_incognita",
            (
                Environment("L100", "location_100", 4879),
                Environment("L38", "location_38", 9767),
                Environment("L43", "location_43", 4020),
                Environment("L46", "location_46", 6122),
            ),
            10,
            (
                Archive(f"{TERRA_IMAGES}.tar.gz", f"{_LILA}/{TERRA_IMAGES}.tar.gz"),
                Archive("eccv_18_annotations.tar.gz", f"{_LILA}/eccv_18_annotations.tar.gz"),
            ),
            classes=("bird", "bobcat", "cat", "coyote", "dog", "empty", "opossum", "rabbit", "raccoon", "squirrel"),
            other_totals=(24330,),
        ),
        Benchmark(
            "domainnet",
            "DomainNet",
            "domain_net",
            (
                Environment("Clipart", "clipart", 48129),
                Environment("Infograph", "infograph", 51605),
                Environment("Painting", "painting", 72266),
                Environment("Quickdraw", "quickdraw", 172500),
                Environment("Real", "real", 172947),
                Environment("Sketch", "sketch", 69128),
            ),
            345,
            (
                Archive("clipart.zip", f"{_VISDA}/groundtruth/clipart.zip"),
                Archive("infograph.zip", f"{_VISDA}/infograph.zip"),
                Archive("painting.zip", f"{_VISDA}/groundtruth/painting.zip"),
                Archive("quickdraw.zip", f"{_VISDA}/quickdraw.zip"),
                Archive("real.zip", f"{_VISDA}/real.zip"),
                Archive("sketch.zip", f"{_VISDA}/sketch.zip"),
            ),
            # 9,431 paths; the checksum is that of the file at DomainBed's commit b93c22a.
            duplicates=Archive(
                "domain_net_duplicates.txt",
                "https://raw.githubusercontent.com/facebookresearch/DomainBed/main/domainbed/misc/"
                "domain_net_duplicates.txt",
                sha256="a52b4ab70203f4f3df381077694dba3e33ff44c26407e1c5faca76919c702770",
            ),
        ),
    )
}
"""By the value of `data.task`."""
