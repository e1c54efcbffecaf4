"""What works in this environment, what does not, and what to do about it: `examine`.

Each file looks at one side of it; a check is a function that yields `Finding`s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from unifmoe_dist.studies.doctor import connections, data_sets, gpus, software
from unifmoe_dist.studies.doctor.findings import SETUP, Finding, problem

__all__ = ["Finding", "examine"]

CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    software.python,
    software.torch_builds,
    gpus.driver,
    gpus.devices,
    gpus.compiler,
    gpus.triton,
    software.deepspeed,
    software.tutel,
    software.mpi,
    software.models,
    connections.names,
    connections.interfaces,
    connections.port,
    connections.launcher_variables,
    connections.backends,
    software.capacity,
)


def examine(data: Path = Path("data")) -> Iterator[Finding]:
    """Look at everything; `data` is the folder of data sets. A check that itself fails becomes a problem."""
    for check in (*CHECKS, lambda: data_sets.layouts(data)):
        try:
            yield from check()
        except Exception as error:
            name = getattr(check, "__name__", "data").strip("<>").replace("lambda", "data")
            yield problem(name, f"{type(error).__name__}: {error}", SETUP)
