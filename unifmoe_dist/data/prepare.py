"""From official archives to a data set in DomainBed's layout."""

import json
import os
import shutil
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unifmoe_dist.data.archives import unpack
from unifmoe_dist.data.benchmarks import TERRA_IMAGES, Archive, Benchmark
from unifmoe_dist.data.download import download
from unifmoe_dist.data.image_folders import list_images
from unifmoe_dist.data.task import plain
from unifmoe_dist.data.verify import write_manifest
from unifmoe_dist.errors import UserError
from unifmoe_dist.files import sha256

_DEPTH = 4  # of the folder that holds the environments, inside an archive


def fetch_archives(benchmark: Benchmark, folder: Path, progress: bool = True) -> list[Path]:
    """Download a benchmark's official archives into `folder`, those that are there already apart.

    Raises:
        UserError: the archives are where only a browser gets them, or a download failed.
    """
    absent = [archive for archive in benchmark.archives if archive.by_hand and not (folder / archive.file).is_file()]
    if absent:
        raise UserError(
            f"{benchmark.title}'s official archive is on a host that asks for confirmation in a browser: download "
            f"{absent[0].url} as {absent[0].file} and give it with --archive {absent[0].file}."
        )
    for archive in benchmark.archives:
        download(archive.url, folder / archive.file, archive.sha256, progress)
    return [folder / archive.file for archive in benchmark.archives]


def fetch_duplicates(duplicates: Archive, folder: Path, progress: bool = True) -> None:
    """Download a list of duplicates into the data set's folder."""
    download(duplicates.url, folder / duplicates.file, duplicates.sha256, progress)


def prepare(benchmark: Benchmark, archives: Sequence[Path], root: Path, progress: bool = True) -> Path:
    """Unpack archives into `root` in DomainBed's layout, check it, and write a manifest; returns the new folder.

    The folder appears when all of it is right. A list of duplicates beside the archives is put into it.

    Raises:
        UserError: the folder exists; an archive is missing, damaged or has another checksum than the known one; what is
            in them is not this benchmark.
    """
    target = root / benchmark.folder
    if target.exists():
        raise UserError(f"{target} exists already; check it with `verify`, or remove it to prepare it again.")
    known = {archive.file: archive.sha256 for archive in benchmark.archives}
    records = [_record(archive, known.get(archive.name)) for archive in archives]
    work = root / f".preparing-{benchmark.folder}"
    shutil.rmtree(work, ignore_errors=True)  # of an interrupted try
    try:
        for archive in archives:
            unpack(archive, work / "unpacked", progress)
        made = work / benchmark.folder
        made.mkdir()
        if benchmark.annotations and (annotations := _find(work / "unpacked", benchmark.annotations)):
            _arrange_terra(benchmark, work / "unpacked", annotations, made)
        else:
            _arrange(benchmark, work / "unpacked", made)
        if benchmark.duplicates is not None:
            for archive in archives:
                if (beside := archive.with_name(benchmark.duplicates.file)).is_file():
                    shutil.copyfile(beside, made / beside.name)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            write_manifest(made, benchmark.name, records, list_images(benchmark, made))
        os.replace(made, target)
        for warning in warned:
            warnings.warn(str(warning.message).replace(str(made), str(target)), stacklevel=2)
    except OSError as error:
        raise UserError(f"{target} could not be made ({error}); free space or look at rights.") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _record(archive: Path, checksum: str | None) -> dict[str, Any]:
    if not archive.is_file():
        raise UserError(f"--archive {archive} does not exist; give the file that was downloaded.")
    found = sha256(archive)
    if checksum is not None and found != checksum:
        raise UserError(f"{archive} has sha256 {found}, not {checksum}; download it again.")
    return {"file": archive.name, "bytes": archive.stat().st_size, "sha256": found}


def _arrange(benchmark: Benchmark, unpacked: Path, made: Path) -> None:
    """Move the environments, wherever the archive keeps them, under their names in DomainBed."""
    expected = {plain(environment.folder): environment.folder for environment in benchmark.environments}
    best: dict[str, Path] = {}
    for place, folders, _ in os.walk(unpacked):
        depth = len(Path(place).relative_to(unpacked).parts)
        found = {expected[plain(name)]: Path(place, name) for name in folders if plain(name) in expected}
        if len(found) > len(best):
            best = found
        if depth >= _DEPTH or len(found) == len(expected):
            folders.clear()
    if not best:
        raise UserError(
            f"the archives hold none of {benchmark.title}'s folders {', '.join(expected.values())}; are they "
            f"{' and '.join(archive.file for archive in benchmark.archives)}?"
        )
    for name, folder in best.items():
        os.replace(folder, made / name)


def _find(folder: Path, name: str) -> Path | None:
    return next((found for found in sorted(folder.rglob(name)) if found.is_dir()), None)


def _arrange_terra(benchmark: Benchmark, unpacked: Path, annotations: Path, made: Path) -> None:
    """Sort the camera-trap images of four locations and ten classes into location_L/CLASS, as DomainBed does.

    All annotation files count together; an image with several of the classes goes into each of their folders.
    """
    images = _find(unpacked, TERRA_IMAGES)
    if images is None:
        raise UserError(f"the archives hold no folder {TERRA_IMAGES}; give {TERRA_IMAGES}.tar.gz too.")
    records: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for file in sorted(annotations.glob("*.json")):
        try:
            for kind, values in json.loads(file.read_text()).items():
                records[kind] += values
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{file.name} in the annotations cannot be read ({error}); download them again.") from error
    assert benchmark.classes is not None
    locations = {environment.folder for environment in benchmark.environments}
    names = {category["id"]: category["name"] for category in records["categories"]}
    classes: dict[Any, set[str]] = defaultdict(set)
    for annotation in records["annotations"]:
        name = names[annotation["category_id"]]
        if name in benchmark.classes:
            classes[annotation["image_id"]].add(name)
    missing: list[str] = []
    for image in records["images"]:
        location, name = f"location_{image['location']}", Path(image["file_name"]).name
        for kind in sorted(classes[image["id"]]) if location in locations else ():
            if (images / name).is_file():
                _put(images / name, made / location / kind)
            else:
                missing.append(name)
    if missing:
        raise UserError(
            f"{TERRA_IMAGES} lacks {len(missing)} images that the annotations name, such as {missing[0]}; download "
            "the archives again."
        )


def _put(file: Path, folder: Path) -> None:
    """Have a file appear in a folder too, without a copy where the file system has links."""
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / file.name
    if place.exists():
        return
    try:
        os.link(file, place)
    except OSError:
        shutil.copyfile(file, place)
