"""What an adapter is, and how a peer that cannot run is explained."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from unifmoe_dist.studies.benchmark.shapes import Shape


class Unavailable(Exception):
    """The library is there, but cannot run this; the message says why in a few words."""


class BuildPeer(Protocol):
    def __call__(self, shape: Shape, top_k: int, device: torch.device, dtype: torch.dtype) -> nn.Module: ...


def need_gpu(device: torch.device, capability: tuple[int, int] = (8, 0)) -> None:
    """Raises Unavailable unless the device is a GPU of at least this compute capability."""
    least = f"needs a GPU of compute capability {capability[0]}.{capability[1]} or more"
    if device.type != "cuda":
        raise Unavailable(least)
    found = torch.cuda.get_device_capability(device)
    if found < capability:
        raise Unavailable(f"{least}; this one has {found[0]}.{found[1]}")


def reason(error: Exception) -> str:
    """One line that says why a peer does not run."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    if isinstance(error, Unavailable):
        return str(error)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {first[:160]}"
