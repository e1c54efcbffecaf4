"""Whether a data set is what it should be: counts, every image decoded, and its manifest."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from unifmoe_dist.data.benchmarks import Benchmark
from unifmoe_dist.data.image_folders import ImageFolder, find_dataset, list_images, read_duplicates
from unifmoe_dist.data.images import NotAnImage, decode
from unifmoe_dist.data.manifest import count_classes, digest, read_manifest

_CHUNK = 64  # images per message to a worker


@dataclass(frozen=True)
class EnvironmentReport:
    """What was found in one environment.

    Args:
        name: The paper's name.
        folder: Its folder.
        images: Images found, duplicates left out.
        published: Images that DomainBed has.
        classes: Images per class.
        changed: Whether paths or contents differ from the manifest; None without one.
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
        dataset: Its folder.
        environments: Each environment.
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

    Args:
        benchmark: What it should be.
        root: Its folder or the one above; None looks where training does.
        workers: Processes to decode in; 0 decodes here.
        progress: Show a bar.

    Raises:
        UserError: it is not in DomainBed's layout.
    """
    dataset = find_dataset(benchmark, root)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about counts, which are reported here
        folders = list_images(benchmark, dataset)
    manifest = read_manifest(dataset)
    environments = []
    for folder in folders:
        recorded = (manifest or {"environments": {}})["environments"].get(folder.environment.folder, {}).get("sha256")
        environments.append(
            EnvironmentReport(
                folder.environment.name,
                folder.path.name,
                len(folder),
                folder.environment.images,
                count_classes(folder),
                None if recorded is None else recorded != digest(folder),
            )
        )
    corrupt, truncated = _decode_all(folders, workers, progress)
    listed = read_duplicates(benchmark, dataset)
    left_out = sum((dataset / name).is_file() for name in listed)
    unknown = benchmark.duplicates is not None and not listed
    return Report(
        dataset,
        environments,
        (benchmark.images, *benchmark.other_totals),
        corrupt,
        truncated,
        None if unknown else left_out,
    )


@dataclass(frozen=True)
class Examination:
    """One file: whether it is whole, and otherwise why it cannot be decoded, or None if a part of it can."""

    file: str
    whole: bool
    fault: str | None = None


def examine(file: str) -> Examination:
    """Decode one image."""
    try:
        return Examination(file, decode(Path(file))[1])
    except NotAnImage as error:
        return Examination(file, False, str(error))


def _decode_all(folders: list[ImageFolder], workers: int, progress: bool) -> tuple[list[tuple[str, str]], list[str]]:
    """Corrupt files with the reason, and truncated ones."""
    files = [str(folder.file(index)) for folder in folders for index in range(len(folder))]
    corrupt: list[tuple[str, str]] = []
    truncated: list[str] = []
    for result in tqdm(_examined(files, workers), "decoding", len(files), unit=" images", disable=not progress):
        if result.fault is not None:
            corrupt.append((result.file, result.fault))
        elif not result.whole:
            truncated.append(result.file)
    return corrupt, truncated


def _examined(files: list[str], workers: int) -> Iterator[Examination]:
    if workers == 0:
        yield from map(examine, files)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("forkserver")) as pool:
        yield from pool.map(examine, files, chunksize=_CHUNK)
