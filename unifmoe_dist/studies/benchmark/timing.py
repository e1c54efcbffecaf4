"""Times of several contenders in one process, interleaved, so that every ratio comes from one run.

The floor of a contender is its arithmetic at the dense rate: for a UniF-MoE layer C_B / B times the dense FFN.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from unifmoe_dist.studies.benchmark.peers import reason
from unifmoe_dist.studies.benchmark.shapes import Shape


@dataclass
class Contender:
    """Something to time.

    Args:
        name: Its name in tables.
        build: Makes the module, from (N, d) tokens to (N, d); may raise if it is a peer.
        work: Its arithmetic, the dense contender's being 1; None if it runs in another dtype, at other rates.
        context: Made around every forward pass.
        peer: Somebody else's: where it fails, it is left out with the reason, and the others go on.
    """

    name: str
    build: Callable[[], nn.Module]
    work: float | None
    context: Callable[[], AbstractContextManager] = nullcontext
    peer: bool = False


@dataclass
class Timing:
    """What was measured of one contender.

    Args:
        contender: Its name.
        work: Its arithmetic, the dense contender's being 1; None if it runs in another dtype, at other rates.
        forward: Seconds, one entry per round, without gradients.
        training: Seconds, one entry per round, forward and backward, and the update where there is an optimiser.
        kept: Bytes that a forward pass keeps for its backward pass, parameters left out.
        peak: Largest memory of a training pass in bytes, for a layer beyond what was held before; None on the CPU.
        held: Bytes of parameters, gradients and optimiser states; None for a layer.
    """

    contender: str
    work: float | None
    forward: list[float] = field(default_factory=list)
    training: list[float] = field(default_factory=list)
    kept: int = 0
    peak: int | None = None
    held: int | None = None

    def median(self, kind: str) -> float:
        return statistics.median(getattr(self, kind))

    def spread(self, kind: str) -> float:
        """Half the distance between the quartiles."""
        low, _, high = statistics.quantiles(getattr(self, kind), n=4)
        return (high - low) / 2


@dataclass
class Result:
    """Everything measured side by side in one run.

    Args:
        name: Of the layer or model.
        sizes: What it is made of, for people.
        flops: Of the dense contender's forward pass.
        rate: FLOP per second of a large matrix product, from the same run.
        timings: The dense contender first.
        skipped: Why each contender that could not run was left out.
        shape: The layer; None for a whole model.
    """

    name: str
    sizes: str
    flops: float
    rate: float
    timings: list[Timing]
    skipped: dict[str, str]
    shape: Shape | None = None

    def ratio(self, timing: Timing, kind: str) -> float:
        """Median time over the dense contender's."""
        return timing.median(kind) / self.timings[0].median(kind)

    def over_floor(self, timing: Timing, kind: str) -> float | None:
        """`ratio` over the contender's arithmetic."""
        return None if timing.work is None else self.ratio(timing, kind) / timing.work


@dataclass
class Subject:
    """A contender made ready to run.

    Args:
        timing: Where its figures go.
        infer: One forward pass without gradients.
        train: One training pass.
        peer: Somebody else's: where it fails, it is left out.
    """

    timing: Timing
    infer: Callable[[], object]
    train: Callable[[], object]
    peer: bool = False


def prepare(
    candidates: Iterable[Contender], make: Callable[[Contender], Subject]
) -> tuple[list[Subject], dict[str, str]]:
    """Subjects that run, and why the peers that do not run were left out."""
    subjects: list[Subject] = []
    skipped: dict[str, str] = {}
    for candidate in candidates:
        try:
            subjects.append(make(candidate))
        except Exception as error:  # whatever a foreign library raises
            if not candidate.peer:
                raise
            skipped[candidate.name] = reason(error)
    return subjects, skipped


def measure(
    subjects: list[Subject], device: torch.device, seconds: float, on_round: Callable[[], object]
) -> dict[str, str]:
    """Time all subjects one after the other in every round; those that fail leave the list.

    Returns:
        Why they failed.
    """
    failed: dict[str, str] = {}
    started, rounds = time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - started < seconds:
        for subject in list(subjects):
            try:
                subject.timing.forward.append(timed(subject.infer, device))
                subject.timing.training.append(timed(subject.train, device))
            except Exception as error:
                if not subject.peer:
                    raise
                subjects.remove(subject)
                failed[subject.timing.contender] = reason(error)
        rounds += 1
        on_round()
    return failed


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP per second of a large matrix product here."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n).to(device, dtype) for _ in range(2))
    times = [timed(lambda: a @ b, device) for _ in range(8)]
    return 2 * n**3 / min(times)


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds that a call takes, work on the device included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started
