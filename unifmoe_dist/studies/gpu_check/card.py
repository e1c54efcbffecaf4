"""What card this is, in what state, and what is installed beside it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys

import torch

from unifmoe_dist.studies.gpu_check import device
from unifmoe_dist.studies.gpu_check.record import NOTE, OK, SKIPPED, Record

_DRIVER = (
    "driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,power.limit,temperature.gpu,"
    "compute_mode,mig.mode.current,utilization.gpu,memory.used"
)
COSTS = {
    "pytest": "the GPU tests do not run",
    "deepspeed": "training goes through a plain loop, memory is not held against the estimate, and it is no peer",
    "sklearn": "training takes made-up digits",
    "timm": "no whole model is timed, and memory is not held against the estimate",
    "transformers": "its Mixtral block is no peer",
    "tutel": "it is no peer, and its dispatcher is not run",
    "megablocks": "it is no peer",
    "scattermoe": "it is no peer",
    "sonicmoe": "it is no peer",
    "jinja2": "the page is not written here (make it elsewhere with --report)",
    "matplotlib": "the page is not written here (make it elsewhere with --report)",
}
"""What the check does without a library."""


def check(record: Record) -> None:
    facts = {"card": device.name(), "python": platform.python_version(), "torch": torch.__version__}
    facts |= {"CUDA of torch": str(torch.version.cuda), "system": platform.platform(), "CPU cores": str(_cores())}
    if record.on_card:
        facts |= _of_card(torch.cuda.get_device_properties(0))
        with record.attempt("nvidia-smi"):
            facts |= device.driver(_DRIVER)
        with record.attempt("a product on the card"):
            _try_product()
            record.find("a product on the card", OK, "64 x 64 in float32, is right")
    owners = importlib.metadata.packages_distributions()  # reads the lists of files of all that is installed
    for package in ("triton", "numpy", "pydantic", *COSTS):
        facts[package] = _version(package, owners.get(package, [package])[0])
    for fact, value in facts.items():
        record.row("card", "The card and what is installed", {"what": fact, "here": value})
    record.numbers |= facts
    record.find("installed", OK, f"{sum(value != '–' for value in facts.values())} of {len(facts)} things found")
    record.find("card", NOTE if record.on_card else SKIPPED, _sentence(facts) if record.on_card else NO_CARD)
    for package, cost in COSTS.items():
        if facts[package] == "–":
            record.find(package, SKIPPED, f"not installed: {cost}")


NO_CARD = "there is no card: sizes are tiny, Triton interprets its kernels, and times mean nothing"


def _of_card(found: object) -> dict[str, str]:
    """Of torch's description of a device."""
    major, minor = getattr(found, "major", 0), getattr(found, "minor", 0)
    return {
        "capability": f"{major}.{minor}",
        "multiprocessors": str(getattr(found, "multi_processor_count", "–")),
        "memory (GiB)": f"{getattr(found, 'total_memory', 0) / 2**30:.1f}",
        "L2 (MiB)": f"{getattr(found, 'L2_cache_size', 0) / 2**20:.0f}",
    }


def _try_product() -> None:
    a = torch.full((64, 64), 2.0, device=device.here())
    if not torch.equal((a @ a).cpu(), torch.full((64, 64), 256.0)):
        raise ArithmeticError("a product of two matrices is wrong")


def _sentence(facts: dict[str, str]) -> str:
    named = {name: facts.get(name, "?") for name in _DRIVER.split(",")}
    return (
        f"{facts['card']}, capability {facts['capability']}, {facts['multiprocessors']} multiprocessors, "
        f"{facts['memory (GiB)']} GiB, clocks {named['clocks.sm']} of {named['clocks.max.sm']}, "
        f"power {named['power.draw']} of {named['power.limit']}, driver {named['driver_version']}, "
        f"torch {facts['torch']}, Triton {facts['triton']}"
    )


def _version(package: str, distribution: str) -> str:
    """Of what is imported under that name; – where nothing is."""
    if importlib.util.find_spec(package) is None:
        return "–"
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "there"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
