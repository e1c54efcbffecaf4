"""The one clock of all studies."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def wait(device: torch.device) -> None:
    """Let the device finish what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds that a call takes, work on the device included.

    torch.utils.benchmark compiles a loop for every statement and times it on one thread; here steps are interleaved.
    """
    wait(device)
    started = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - started
