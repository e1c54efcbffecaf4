"""All that the check asks of CUDA itself, in small functions with an answer for the CPU beside each."""

from __future__ import annotations

import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from unifmoe_dist.kernels import use_kernels
from unifmoe_dist.studies.gpu_check.record import LeftOut
from unifmoe_dist.studies.meters import seconds

_LEAST_SECONDS = 2e-3  # of one measurement on a card, where an event's clock counts half microseconds
_NO_LAUNCHES = ("unifmoe::", "Activity Buffer", "ProfilerStep")  # what a profile holds beside kernels and copies


def here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def kernels(**options: Any) -> Any:
    """A context in which layers take Triton's kernels: on a card or, without one, in Triton's interpreter."""
    return use_kernels("triton", **options)


def name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no card"


def driver(fields: str) -> dict[str, str]:
    """What nvidia-smi says of the first card, by field; nothing where there is no such program."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    words = [program, f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    said = subprocess.run(words, capture_output=True, text=True, timeout=20)
    if said.returncode or not said.stdout.strip():
        return {}
    values = [value.strip() for value in said.stdout.splitlines()[0].split(",")]
    return dict(zip(fields.split(","), values, strict=False))


def clock(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call: on a card the mean over as many as take some milliseconds, by events of the device.

    Calls follow one another without waiting, so what the host needs for a launch shows where it is more than what the
    device needs for the kernels, as in training.
    """
    once = seconds(call, device)
    if device.type != "cuda":
        return once
    count = max(1, min(100, round(_LEAST_SECONDS / once)))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def need_card(device: torch.device) -> None:
    """Raises LeftOut without a card."""
    if device.type != "cuda":
        raise LeftOut("CUDA graphs need a card")


def captured(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """`call`, recorded in a CUDA graph: what replays it. Raises LeftOut without a card."""
    need_card(device)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def launched(call: Callable[[], object], device: torch.device) -> list[str]:
    """What a call has a device do, in order, by name: kernels and copies as torch's profiler sees them on a card.

    Without one, the kernels that Triton's interpreter runs, and those operations of torch that would compute.
    """
    if device.type == "cuda":
        seconds(call, device)  # compiles
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            seconds(call, device)
        found = [e.name for e in profile.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
        return [name for name in found if not name.startswith(_NO_LAUNCHES)]
    names: list[str] = []
    with _interpreted(names), _Operations(names):
        call()
    return names


@contextmanager
def _interpreted(names: list[str]) -> Iterator[None]:
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(self.__name__)
        before = len(names)
        result = run(self, *args, **kwargs)
        del names[before:]  # what the interpreter itself has torch do
        return result

    with patch.object(InterpretedFunction, "run", noting):
        yield


class _Operations(TorchDispatchMode):
    """Notes the operations of torch that a device would compute: neither views nor allocations."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__
        if not function.is_view and not name.startswith(("empty", "new_empty", "_unsafe_view", "detach")):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def host_waits(call: Callable[[], object], device: torch.device) -> list[str]:
    """Places where a call had the host wait for the device, as torch tells them; none without a card."""
    if device.type != "cuda":
        call()
        return []
    seconds(call, device)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return [f"{w.filename}:{w.lineno}" for w in said if "synchroniz" in str(w.message)]


def quiet_tiles() -> Any:
    """A context without trials of tiles: beside other processes their times would mean nothing, and they are kept."""
    if not torch.cuda.is_available():
        return nullcontext()
    from unifmoe_dist.kernels.triton.tuning import first_tiles

    return first_tiles()
