"""Where the time of a training step goes, part by part, forward and backward, from a torch.profiler recording."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler import record_function

from unifmoe_dist.profiling import PREFIX, profile_range
from unifmoe_dist.studies import meters

PARTS = ("route", "dispatch", "shared_experts", "residual_experts", "combine", "all_reduce", "optimizer", "other")
"""`all_reduce` is every collective of the engine: gradient reduction and, with ZeRO, gathering parameters. `other` is
the dense rest of the model, forward and backward, and the step's fixed work."""

_BACKWARD = "autograd::engine::evaluate_function: "
_COLLECTIVES = (
    "all_reduce reduce reduce_scatter reduce_scatter_fn reduce_scatter_tensor all_gather all_gather_into_tensor "
    "allgather_fn all_gather_coalesced all_reduce_coalesced broadcast"
).split()


def named_collectives() -> AbstractContextManager:
    """Give DeepSpeed's collectives the range "unifmoe::all_reduce" in profiles, inside the context."""
    from deepspeed import comm

    present = {name: getattr(comm, name) for name in _COLLECTIVES if hasattr(comm, name)}
    ranged: dict[str, Any] = {name: record_function(PREFIX + "all_reduce")(call) for name, call in present.items()}
    return patch.multiple(comm, **ranged)


def split_step(step: Callable[[], Any], seconds: float, repeats: int, device: torch.device) -> dict[str, float]:
    """Profile `repeats` calls of a training step that takes `seconds` without a profiler, and split that time.

    Returns:
        Seconds by part; they add up to `seconds`. On the CPU they are shares of the wall time of this process, waits
        for other ranks included, less what recording costs for each event. On a GPU they are kernel time, and `other`
        takes what no kernel of another part covers, idle time included.
    """
    cuda = device.type == "cuda"
    cost = 0.0 if cuda else recording_cost()
    with named_collectives(), _recording(cuda) as recording:
        for _ in range(repeats):
            with profile_range("step"):
                step()
                meters.wait(device)
    if cuda:
        parts = {name: 1e-9 * t.kernels / repeats for name, t in attribute(_events_with_kernels(recording)).items()}
        return {**parts, "other": max(0.0, seconds - sum(v for name, v in parts.items() if name != "other"))}
    walls = {name: max(0.0, t.wall - cost * t.events) for name, t in attribute(_events(recording)).items()}
    return {name: seconds * wall / sum(walls.values()) for name, wall in walls.items()}


def recording_cost(operations: int = 1000, rounds: int = 5) -> float:
    """Nanoseconds by which recording lengthens one small operation, the least of several rounds."""
    x = torch.zeros(1)

    def best() -> float:
        times = (meters.seconds(lambda: [torch.neg(x) for _ in range(operations)], x.device) for _ in range(rounds))
        return 1e9 * min(times) / operations

    plain = best()
    with _recording(cuda=False):
        return max(0.0, best() - plain)


def _recording(cuda: bool) -> torch.profiler.profile:
    kinds = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA] if cuda else [kinds.CPU])


class Event(NamedTuple):
    """A profiled range or operation on a CPU thread: times in nanoseconds; kernels, the GPU time it launched itself."""

    name: str
    thread: int
    start: int
    end: int
    sequence: int
    kernels: float = 0.0


@dataclass
class Totals:
    """Of one part: wall time without the parts nested in it (ns), events recorded, and kernel time (ns)."""

    wall: float = 0.0
    events: int = 0
    kernels: float = 0.0


def attribute(events: Iterable[Event]) -> dict[str, Totals]:
    """Charge what happens inside "unifmoe::step" ranges to the innermost part around it, else to "other".

    A backward event belongs to the part whose forward operation has its sequence number.
    """
    totals = {name: Totals() for name in PARTS}
    part_of_sequence: dict[int, str] = {}
    stacks: dict[int, list[tuple[int, str]]] = {}  # by thread: ends and parts of the open events
    for event in sorted(events, key=lambda e: (e.start, -e.end)):
        stack = stacks.setdefault(event.thread, [])
        while stack and stack[-1][0] <= event.start:
            stack.pop()
        around = stack[-1][1] if stack else None
        part = around or "other"
        if event.name.startswith(_BACKWARD):
            part = part_of_sequence.get(event.sequence, part)
        elif event.name.startswith(PREFIX):
            name = event.name.removeprefix(PREFIX)
            part = name if name in PARTS else "other"
        elif event.sequence >= 0:
            # Operations that record no node carry the next node's number, so the last to start with it made it.
            part_of_sequence[event.sequence] = part
        if around is not None or event.name == PREFIX + "step" or event.name.startswith(_BACKWARD):
            totals[part].events += 1
            totals[part].kernels += event.kernels
            if part != around:
                totals[part].wall += event.end - event.start
                if around is not None:
                    totals[around].wall -= event.end - event.start
        stack.append((event.end, part))
    return totals


def _events(recording: torch.profiler.profile) -> list[Event]:
    # Not recording.events(): that builds an object tree, which takes 20 times as long as the step itself.
    assert recording.profiler is not None and recording.profiler.kineto_results is not None
    return [
        Event(e.name(), e.start_thread_id(), e.start_ns(), e.end_ns(), e.sequence_nr())
        for e in recording.profiler.kineto_results.events()
        if e.device_type() == DeviceType.CPU and not e.is_async()
    ]


def _events_with_kernels(recording: torch.profiler.profile) -> list[Event]:
    found = [e for e in recording.events() or [] if e.device_type == DeviceType.CPU and not e.is_async]
    times = [(round(1e3 * e.time_range.start), round(1e3 * e.time_range.end)) for e in found]
    return [
        Event(e.name, e.thread, *span, e.sequence_nr, 1e3 * e.self_device_time_total)
        for e, span in zip(found, times, strict=True)
    ]
