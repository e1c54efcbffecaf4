"""Whether a data set is what it should be: counts, every image decoded, and the manifest that was made with it.

The manifest says what a prepared data set was made from and what it holds, so that it can be checked later.
"""

import hashlib
import json
import multiprocessing
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from unifmoe_dist.data.benchmarks import Benchmark
from unifmoe_dist.data.image_folders import ImageFolder, find_dataset, list_images, read_duplicates
from unifmoe_dist.data.images import NotAnImage, decode
from unifmoe_dist.files import sha256, write_text

MANIFEST = "manifest.json"
_CHUNK = 64  # images per message to a worker


def write_manifest(dataset: Path, name: str, archives: list[dict[str, Any]], folders: list[ImageFolder]) -> None:
    """Write into a data set's folder what it was made of, with bytes and sha256, and the folders that came out."""
    environments = {
        folder.environment.folder: {"images": len(folder), "sha256": _digest(folder), "classes": _count_classes(folder)}
        for folder in folders
    }
    content = {"dataset": name, "archives": archives, "environments": environments}
    write_text(dataset / MANIFEST, json.dumps(content, indent=1))


def _recorded(dataset: Path, folder: ImageFolder) -> str | None:
    """An environment's checksum in the manifest; None where there is none or it cannot be read."""
    try:
        return json.loads((dataset / MANIFEST).read_text())["environments"][folder.environment.folder]["sha256"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _digest(folder: ImageFolder) -> str:
    """sha256 over the paths and the contents of an environment's images, in the order of their paths."""
    whole = hashlib.sha256()
    for name in sorted(os.fsdecode(file) for file in folder.files):
        whole.update(f"{name}\0{sha256(folder.path / name)}\n".encode())
    return whole.hexdigest()


def _count_classes(folder: ImageFolder) -> dict[str, int]:
    """Images per class."""
    return {name: int((folder.labels == label).sum()) for label, name in enumerate(folder.classes)}


@dataclass(frozen=True)
class EnvironmentReport:
    """What was found in one environment, duplicates left out: images, and by class; DomainBed has so many `published`.

    `changed` says whether paths or contents differ from the manifest; None without one.
    """

    name: str
    folder: str
    images: int
    published: int
    classes: dict[str, int]
    changed: bool | None


@dataclass(frozen=True)
class Report:
    """What was found in a data set.

    Args:
        published: Totals that are known to be in circulation, DomainBed's first.
        corrupt: Images that cannot be decoded, with the reason.
        truncated: Images of which only a part can be decoded; DomainBed uses them, and so does training.
        duplicates: Images left out as listed duplicates, or None where the data set has such a list but not here.
    """

    dataset: Path
    environments: list[EnvironmentReport]
    published: tuple[int, ...]
    corrupt: list[tuple[str, str]]
    truncated: list[str]
    duplicates: int | None

    @property
    def images(self) -> int:
        return sum(environment.images for environment in self.environments)

    @property
    def good(self) -> bool:
        """Complete, readable and unchanged."""
        changed = any(environment.changed for environment in self.environments)
        return self.images in self.published and not self.corrupt and not changed

    def lines(self) -> Iterator[str]:
        """The report for people."""
        yield f"{self.dataset}: {self.images:,} images ({' or '.join(f'{n:,}' for n in self.published)} published)"
        for env in self.environments:
            smallest = min(env.classes, key=lambda name: env.classes[name])
            state = {None: "no manifest", True: "DIFFERS from the manifest", False: "as in the manifest"}[env.changed]
            yield (
                f"  {env.name} ({env.folder}): {env.images:,} images ({env.published:,} published), "
                f"{len(env.classes)} classes, fewest {smallest} ({env.classes[smallest]}); {state}"
            )
        for path, reason in self.corrupt:
            yield f"  CORRUPT {path}: {reason}"
        for path in self.truncated:
            yield f"  truncated, used as far as it goes: {path}"
        if self.duplicates is None:
            yield "  no list of duplicates: put domain_net_duplicates.txt there to leave them out, as DomainBed does"
        elif self.duplicates:
            yield f"  {self.duplicates:,} listed duplicates left out"
        yield "good" if self.good else "NOT as published"


def verify(benchmark: Benchmark, root: Path | None, workers: int = 0, progress: bool = True) -> Report:
    """Check a data set; reads every file.

    `root` is its folder or the one above; None looks where training does. Images are decoded in as many processes as
    there are workers, here for 0.

    Raises:
        UserError: it is not in DomainBed's layout.
    """
    dataset = find_dataset(benchmark, root)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about counts, which are reported here
        folders = list_images(benchmark, dataset)
    environments = [
        EnvironmentReport(
            folder.environment.name,
            folder.path.name,
            len(folder),
            folder.environment.images,
            _count_classes(folder),
            None if (recorded := _recorded(dataset, folder)) is None else recorded != _digest(folder),
        )
        for folder in folders
    ]
    listed = read_duplicates(benchmark, dataset)
    return Report(
        dataset,
        environments,
        (benchmark.images, *benchmark.other_totals),
        *_decode_all(folders, workers, progress),
        None if benchmark.duplicates and not listed else sum((dataset / name).is_file() for name in listed),
    )


def _decode_all(folders: list[ImageFolder], workers: int, progress: bool) -> tuple[list[tuple[str, str]], list[str]]:
    """Corrupt files with the reason, and truncated ones."""
    files = [str(folder.file(index)) for folder in folders for index in range(len(folder))]
    corrupt: list[tuple[str, str]] = []
    truncated: list[str] = []
    with ProcessPoolExecutor(max(1, workers), multiprocessing.get_context("forkserver")) as pool:  # starts when used
        found = pool.map(_examine, files, chunksize=_CHUNK) if workers else map(_examine, files)
        shown = tqdm(found, "decoding", len(files), unit=" images", disable=not progress)
        for file, (fault, whole) in zip(files, shown, strict=True):
            if fault is not None:
                corrupt.append((file, fault))
            elif not whole:
                truncated.append(file)
    return corrupt, truncated


def _examine(file: str) -> tuple[str | None, bool]:
    """Why an image cannot be decoded, None if at least a part of it can; and whether the file is whole."""
    try:
        return None, decode(Path(file))[1]
    except NotAnImage as error:
        return str(error), False
