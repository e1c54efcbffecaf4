"""Where the time of a training step goes, part by part, forward and backward, from a torch.profiler recording."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from unifmoe_dist.phases import PREFIX, phase

PARTS = ("route", "dispatch", "shared_experts", "residual_experts", "combine", "all_reduce", "optimizer", "other")
"""`all_reduce` is every collective of the engine: gradient reduction and, with ZeRO, gathering parameters. `other` is
the dense rest of the model, forward and backward, and the step's fixed work."""

_BACKWARD = "autograd::engine::evaluate_function: "
_COLLECTIVES = (
    "all_reduce", "reduce", "reduce_scatter", "reduce_scatter_fn", "reduce_scatter_tensor", "all_gather",
    "all_gather_into_tensor", "allgather_fn", "all_gather_coalesced", "all_reduce_coalesced", "broadcast",
)  # fmt: skip


@contextmanager
def named_collectives() -> Iterator[None]:
    """Give DeepSpeed's collectives the range "unifmoe::all_reduce" in profiles."""
    from deepspeed import comm

    originals = {name: getattr(comm, name) for name in _COLLECTIVES if hasattr(comm, name)}

    def ranged(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with phase("all_reduce"):
                return function(*args, **kwargs)

        return call

    for name, function in originals.items():
        setattr(comm, name, ranged(function))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(comm, name, function)


def split_step(step: Callable[[], Any], repeats: int, device: torch.device) -> tuple[dict[str, float], float]:
    """Profile `repeats` calls of a training step.

    Returns:
        Mean seconds per call by part, and of the whole call as profiled. On the CPU these are wall time of this
        process, waits for other ranks included, and the parts add up to the whole. On a GPU they are kernel time;
        `other` then takes what no kernel of another part covers, idle time included.
    """
    cuda = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with named_collectives(), torch.profiler.profile(activities=activities) as recording:
        for _ in range(repeats):
            with phase("step"):
                step()
                if cuda:
                    torch.cuda.synchronize(device)
    events = recording.events() or []
    whole = sum(e.time_range.elapsed_us() for e in events if _is_cpu(e) and e.name == PREFIX + "step")
    parts = exclusive_microseconds(events, (lambda e: e.device_time_total) if cuda else _wall)
    parts["other"] = max(0.0, whole - sum(parts.values()))
    return {name: 1e-6 * parts[name] / repeats for name in PARTS}, 1e-6 * whole / repeats


def exclusive_microseconds(
    events: Iterable[FunctionEvent], cost: Callable[[FunctionEvent], float]
) -> dict[str, float]:
    """Cost of every named part, without the parts nested in it; "other" stays 0.

    A backward event counts for the part whose forward operation has its sequence number.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    cpu = [e for e in events if _is_cpu(e)]
    part_of_sequence: dict[int, str | None] = {}
    for event, stack in _nested(cpu):
        if event.sequence_nr >= 0 and not event.name.startswith(_BACKWARD) and not event.fwd_thread:
            # Operations that record no node carry the next node's number, so the last to start with it made it.
            part_of_sequence[event.sequence_nr] = _innermost(stack, _range_of)

    def part_of(event: FunctionEvent) -> str | None:
        backward = event.name.startswith(_BACKWARD)
        return part_of_sequence.get(event.sequence_nr) if backward else _range_of(event)

    for event, stack in _nested([e for e in cpu if e.name.startswith((_BACKWARD, PREFIX))]):
        part = part_of(event)
        if part is not None:
            parts[part] += cost(event)
            outer = _innermost(stack, part_of)
            if outer is not None:
                parts[outer] -= cost(event)
    return parts


def _nested(events: list[FunctionEvent]) -> Iterator[tuple[FunctionEvent, list[FunctionEvent]]]:
    """Every event with the events around it on its thread, outermost first, in the order of start."""
    stacks: dict[int, list[FunctionEvent]] = {}
    for event in sorted(events, key=lambda e: (e.time_range.start, -e.time_range.end)):
        stack = stacks.setdefault(event.thread, [])
        while stack and stack[-1].time_range.end <= event.time_range.start:
            stack.pop()
        yield event, stack
        stack.append(event)


def _range_of(event: FunctionEvent) -> str | None:
    name = event.name.removeprefix(PREFIX)
    return name if name != event.name and name in PARTS else None


def _innermost(stack: list[FunctionEvent], part_of: Callable[[FunctionEvent], str | None]) -> str | None:
    return next((part for part in map(part_of, reversed(stack)) if part), None)


def _is_cpu(event: FunctionEvent) -> bool:
    return event.device_type == DeviceType.CPU and not event.is_async


def _wall(event: FunctionEvent) -> float:
    return event.time_range.elapsed_us()
