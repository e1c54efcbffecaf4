"""Image folders in DomainBed's layout: found, checked and listed, without opening an image.

DATASET/ENVIRONMENT/CLASS/.../IMAGE
"""

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from unifmoe_dist.data.benchmarks import Benchmark, Environment
from unifmoe_dist.data.task import plain
from unifmoe_dist.errors import UserError

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""What torchvision's ImageFolder, and with it DomainBed, takes for an image."""

_LEFT_BEHIND = ("thumbs.db", "desktop.ini")  # by file managers; hidden files are ignored too


@dataclass(frozen=True)
class ImageFolder:
    """The images of one environment, in DomainBed's order: by class, then by path.

    Args:
        environment: Which environment.
        path: Its folder.
        classes: Class folders, sorted; a label is an index into them.
        files: (N,) paths relative to `path`, encoded: a flat array, so that half a million are cheap to send on.
        labels: (N,) int64.
    """

    environment: Environment
    path: Path
    classes: tuple[str, ...]
    files: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def file(self, index: int) -> Path:
        return self.path / os.fsdecode(self.files[index])


DATA = Path("data")
"""Where data sets are looked for when no folder is named."""


def find_dataset(benchmark: Benchmark, root: str | Path | None) -> Path:
    """The data set's folder: `root` itself, or the one inside it that DomainBed names.

    Without a root it is data/NAME or the folder that DomainBed names in there or in data/: the places that
    `launch/data.py prepare` writes to.

    Raises:
        UserError: none of them holds any environment.
    """
    above = DATA / benchmark.name if root is None else Path(root)
    places = [above, above / benchmark.folder, *([DATA / benchmark.folder] if root is None else [])]
    expected = {plain(environment.folder) for environment in benchmark.environments}
    for folder in places:
        if folder.is_dir() and expected & {plain(name) for name in os.listdir(folder)}:
            return folder
    folders = ", ".join(environment.folder for environment in benchmark.environments)
    if root is None:
        *first, last = map(str, places)
        what = f"{benchmark.title} was not found: none of {', '.join(first)} and {last} holds"
        advice = "name its folder with --data.root"
    else:
        what = f"data.root {str(root)!r} is not {benchmark.title}'s folder: neither it nor {places[1]} holds"
        advice = "give the right folder"
    raise UserError(
        f"{what} any of the folders {folders}; {advice}, or make it with `python launch/data.py prepare "
        f"{benchmark.name} --archive FILE --root {DATA if root is None else root}`."
    )


def list_images(benchmark: Benchmark, root: str | Path | None) -> list[ImageFolder]:
    """Every environment's images, checked against the benchmark's layout and against one another.

    Images in the benchmark's list of duplicates are left out. Counts other than the published ones give a warning.

    Raises:
        UserError: an environment or class is missing, unexpected, empty or cannot be read; a file is not an image.
    """
    dataset = find_dataset(benchmark, root)
    duplicates = read_duplicates(benchmark, dataset)
    found: list[ImageFolder] = []
    for environment in benchmark.environments:
        folder = _environment_folder(benchmark, dataset, environment)
        try:
            classes = tuple(sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and _shown(entry.name)))
            _check_classes(benchmark, folder, classes, found[0] if found else None)
            found.append(_list_environment(environment, folder, classes, duplicates))
        except OSError as error:
            where = error.filename or folder
            raise UserError(f"{where} cannot be read ({error.strerror}); check its rights.") from error
    _check_counts(benchmark, dataset, found, bool(duplicates))
    return found


def read_duplicates(benchmark: Benchmark, dataset: Path) -> frozenset[str]:
    """Paths (ENVIRONMENT/CLASS/IMAGE) to leave out, from the list in the data set's folder or the one above."""
    if benchmark.duplicates is None:
        return frozenset()
    for folder in (dataset, dataset.parent):
        path = folder / benchmark.duplicates.file
        if path.is_file():
            return frozenset(line.strip() for line in path.read_text().splitlines() if line.strip())
    return frozenset()


def _environment_folder(benchmark: Benchmark, dataset: Path, environment: Environment) -> Path:
    for name in sorted(os.listdir(dataset)):
        if plain(name) == plain(environment.folder) and (dataset / name).is_dir():
            return dataset / name
    raise UserError(
        f"{dataset} has no folder {environment.folder}, the environment {environment.name} of {benchmark.title}; "
        f"DomainBed's layout is {benchmark.folder}/{environment.folder}/CLASS/IMAGE."
    )


def _check_classes(benchmark: Benchmark, folder: Path, classes: tuple[str, ...], first: ImageFolder | None) -> None:
    expected, source = benchmark.classes, benchmark.title
    if expected is None:
        if first is None:
            if len(classes) != benchmark.num_classes:
                raise UserError(
                    f"{folder} has {len(classes)} class folders, but {benchmark.title} has {benchmark.num_classes} "
                    "classes; unpack its archive again."
                )
            return
        expected, source = first.classes, str(first.path)
    missing, extra = sorted(set(expected) - set(classes)), sorted(set(classes) - set(expected))
    if missing or extra:
        what = [f"lacks {_few(missing)}"] * bool(missing) + [f"has {_few(extra)} besides"] * bool(extra)
        raise UserError(
            f"{folder} does not hold the classes of {source}: it {' and '.join(what)}; labels would not agree between "
            "environments, so unpack the archive again or remove what does not belong."
        )


def _list_environment(
    environment: Environment, folder: Path, classes: tuple[str, ...], duplicates: frozenset[str]
) -> ImageFolder:
    files: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        own = [
            file
            for file in _walk(folder / name, folder)
            if not duplicates or f"{environment.folder}/{file}" not in duplicates
        ]
        if not own:
            raise UserError(f"{folder / name} holds no images; unpack the archive again.")
        files += own
        labels += [label] * len(own)
    encoded = np.array([os.fsencode(file) for file in files])
    return ImageFolder(environment, folder, classes, encoded, np.array(labels, dtype=np.int64))


def _walk(folder: Path, base: Path) -> Iterator[str]:
    """Images below `folder` as paths relative to `base`, in the order of torchvision's ImageFolder."""

    def refuse(error: OSError) -> None:
        raise error

    for place, _, names in sorted(os.walk(folder, onerror=refuse, followlinks=True)):
        for name in sorted(filter(_shown, names)):
            if not name.lower().endswith(IMAGE_EXTENSIONS):
                raise UserError(
                    f"{os.path.join(place, name)} is not an image; remove it, since only "
                    f"{' '.join(IMAGE_EXTENSIONS)} belong into class folders."
                )
            yield os.path.relpath(os.path.join(place, name), base)


def _shown(name: str) -> bool:
    return not name.startswith(".") and name.lower() not in _LEFT_BEHIND


def _check_counts(benchmark: Benchmark, dataset: Path, found: list[ImageFolder], has_list: bool) -> None:
    total = sum(len(folder) for folder in found)
    if total in (benchmark.images, *benchmark.other_totals):
        return
    advice = f"`python launch/data.py verify {benchmark.name} --root {dataset}` shows where"
    if benchmark.duplicates is not None and not has_list:
        advice += (
            f"; without {benchmark.duplicates.file} in that folder duplicates stay in, and the file is at "
            f"{benchmark.duplicates.url}"
        )
    warnings.warn(
        f"{dataset} holds {total:,} images, not {benchmark.title}'s {benchmark.images:,}, so results cannot be "
        f"compared with published ones: {advice}.",
        stacklevel=3,
    )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
