"""What works in this environment, what does not, and what to do about it: `examine`.

A check is a function that yields `Finding`s. The folder of data sets is looked at for the layout that training expects:
names are read, images are not opened.
"""

import shlex
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from unifmoe_dist.data.benchmarks import BENCHMARKS, Benchmark
from unifmoe_dist.data.glue_files import FORMATS, check_layout
from unifmoe_dist.data.image_folders import list_images
from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.doctor import connections, installation
from unifmoe_dist.studies.doctor.findings import SETUP, Finding, expect, note, ok, problem

CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    installation.python,
    installation.torch_builds,
    installation.driver,
    installation.devices,
    installation.compiler,
    installation.triton,
    installation.deepspeed,
    installation.tutel,
    installation.mpi,
    installation.models,
    connections.names,
    connections.interfaces,
    connections.port,
    connections.launcher_variables,
    connections.backends,
    installation.capacity,
)


def examine(data: Path = Path("data")) -> Iterator[Finding]:
    """Look at everything; `data` is the folder of data sets. A check that itself fails becomes a problem."""
    for name, check in (*((check.__name__, check) for check in CHECKS), ("data", lambda: layouts(data))):
        try:
            yield from check()
        except Exception as error:
            yield problem(name, f"{type(error).__name__}: {error}", SETUP)


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
