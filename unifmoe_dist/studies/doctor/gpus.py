"""Driver, CUDA, the GPUs, and the kernels for them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator

from unifmoe_dist.studies.doctor.findings import Finding, expect, note, numbers, ok, problem, version_of

PYTORCH = "https://pytorch.org/get-started/locally"


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


def _output(program: str | None, *words: str) -> str | None:
    """What a program prints, or None where there is none or it fails."""
    place = program and shutil.which(program)
    if not place:
        return None
    try:
        done = subprocess.run([place, *words], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


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

    program = CUDA_HOME and os.path.join(CUDA_HOME, "bin", "nvcc")
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
