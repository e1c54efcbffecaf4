"""Data sets in a folder: whether each has the layout that training expects. Names are read, images are not opened."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path

from unifmoe_dist.data.benchmarks import BENCHMARKS, Benchmark
from unifmoe_dist.data.glue_files import FORMATS, check_layout
from unifmoe_dist.data.image_folders import list_images
from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.doctor.findings import Finding, expect, note, ok, problem


def layouts(root: Path) -> Iterator[Finding]:
    """Every data set of DomainBed and GLUE that the folder holds."""
    found = [
        _check(benchmark, root / name)
        for benchmark in BENCHMARKS.values()
        for name in (benchmark.name, benchmark.folder)
        if (root / name).is_dir()
    ]
    folders = [path for place in (root, root / "glue") if place.is_dir() for path in sorted(place.iterdir())]
    found += [_glue(path) for path in folders if path.is_dir() and path.name.lower() in FORMATS]
    if not found:
        advice = "digits and acceptability need none, GLUE comes from the hub; DomainBed: `unifmoe data --help`"
        yield note("data", f"no data sets in {root}", advice)
    yield from found


def _check(benchmark: Benchmark, folder: Path) -> Finding:
    place = shlex.quote(str(folder))
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            images = sum(len(environment) for environment in list_images(benchmark, folder))
    except UserError as error:
        archives = "" if not benchmark.archives[0].by_hand else f" --archive {benchmark.archives[0].file}"
        parent = shlex.quote(str(folder.parent)) if folder.name == benchmark.folder else place
        advice = f"move it away, then `unifmoe data prepare {benchmark.name}{archives} --root {parent}`"
        return problem(benchmark.title, str(error), advice)
    text = f"{folder}: {len(benchmark.environments)} environments, {benchmark.num_classes} classes, {images:,} images"
    text += f", {benchmark.images:,} published" if warned else ""
    advice = f"results do not compare with others: `unifmoe data verify {benchmark.name} --root {place}`"
    return expect(not warned, benchmark.title, text, advice)


def _glue(folder: Path) -> Finding:
    task = folder.name.lower()
    try:
        return ok(FORMATS[task].folder, f"{folder}: {check_layout(task, folder)}")
    except UserError as error:
        advice = "fetch it again, or leave data.root out: then it comes from the hub"
        return problem(FORMATS[task].folder, str(error), advice)
