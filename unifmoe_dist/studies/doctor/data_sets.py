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
from unifmoe_dist.studies.doctor.findings import Finding, note, ok, problem


def layouts(root: Path) -> Iterator[Finding]:
    """Every data set of DomainBed and GLUE that the folder holds."""
    found = [*_domainbed(root), *_glue(root)] if root.is_dir() else []
    if not found:
        advice = "digits and acceptability need none, GLUE comes from the hub; DomainBed: `unifmoe data --help`"
        yield note("data", f"no data sets in {root}", advice)
    yield from found


def _domainbed(root: Path) -> Iterator[Finding]:
    for benchmark in BENCHMARKS.values():
        for folder in (root / benchmark.name, root / benchmark.folder):
            if folder.is_dir():
                yield _check(benchmark, folder)


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
    if warned:
        advice = f"results do not compare with others: `unifmoe data verify {benchmark.name} --root {place}`"
        return note(benchmark.title, f"{text}, {benchmark.images:,} published", advice)
    return ok(benchmark.title, text)


def _glue(root: Path) -> Iterator[Finding]:
    for place in (root, root / "glue"):
        for folder in sorted(path for path in place.iterdir() if path.is_dir()) if place.is_dir() else ():
            task = folder.name.lower()
            if task not in FORMATS:
                continue
            try:
                yield ok(FORMATS[task].folder, f"{folder}: {check_layout(task, folder)}")
            except UserError as error:
                advice = "fetch it again, or leave data.root out: then it comes from the hub"
                yield problem(FORMATS[task].folder, str(error), advice)
