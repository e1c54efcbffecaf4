"""Times of several contenders in one process, interleaved, so that every ratio comes from one run.

The floor of a contender is its arithmetic at the dense rate: for a UniF-MoE layer C_B / B times the dense FFN.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from unifmoe_dist.studies import meters
from unifmoe_dist.studies.benchmark.peers import Shape, reason


@dataclass
class Contender:
    """Something to time."""

    name: str
    build: Callable[[], nn.Module]  # makes the module; may raise if it is a peer
    work: float | None  # arithmetic, the dense contender's being 1; None in another dtype, at other rates
    context: Callable[[], AbstractContextManager] = nullcontext  # made around every forward pass
    peer: bool = False  # somebody else's: where it fails, it is left out with the reason, and the others go on


@dataclass
class Timing:
    """What was measured of one contender: seconds, one entry per round, and bytes."""

    contender: str
    work: float | None
    forward: list[float] = field(default_factory=list)  # without gradients
    training: list[float] = field(default_factory=list)  # forward, backward, and the update if there is an optimiser
    kept: int = 0  # what a forward pass keeps for its backward pass, parameters left out
    peak: int | None = None  # of a training pass; for a layer beyond what was held before; None on the CPU
    held: int | None = None  # parameters, gradients and optimiser states; None for a layer

    def median(self, kind: str) -> float:
        return statistics.median(getattr(self, kind))

    def spread(self, kind: str) -> float:
        """Half the distance between the quartiles."""
        low, _, high = statistics.quantiles(getattr(self, kind), n=4)
        return (high - low) / 2


@dataclass
class Result:
    """Everything measured side by side in one run."""

    name: str
    sizes: str  # what the layer or model is made of, for people
    flops: float  # of the dense contender's forward pass
    rate: float  # FLOP per second of a large matrix product, from the same run
    timings: list[Timing]  # the dense contender first
    skipped: dict[str, str]  # why each contender that could not run was left out
    shape: Shape | None = None  # None for a whole model

    def ratio(self, timing: Timing, kind: str) -> float:
        """Median time over the dense contender's."""
        return timing.median(kind) / self.timings[0].median(kind)

    def over_floor(self, timing: Timing, kind: str) -> float | None:
        """`ratio` over the contender's arithmetic."""
        return None if timing.work is None else self.ratio(timing, kind) / timing.work


@dataclass
class Subject:
    """A contender made ready to run: one forward pass without gradients, one training pass."""

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


def ready(contender: Contender, inputs: Callable[[], tuple[Tensor, ...]], optimised: bool = False) -> Subject:
    """Build and warm up (compilers, allocators) a contender, and measure its memory on the way.

    `inputs` makes the arguments of a training pass; those of inference are the same. `optimised`: training makes
    AdamW's step too, as for a whole model, which inference puts in evaluation.
    """
    module, given = contender.build(), inputs()
    device = given[0].device
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, foreach=device.type == "cuda") if optimised else None

    def forward() -> Tensor:
        with contender.context():
            output = module(*inputs())
        return output if isinstance(output, Tensor) else output.logits

    def infer() -> None:
        if optimised:
            module.eval()
        with torch.no_grad(), contender.context():
            module(*given)

    def train() -> None:
        if optimised:
            module.train()
        y = forward()
        y.backward(torch.ones_like(y))
        if optimizer is not None:
            optimizer.step()
        module.zero_grad(set_to_none=True)

    infer()
    train()
    found = Timing(contender.name, contender.work, kept=meters.kept_for_backward(forward, module.parameters()))
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        found.peak = meters.peak_bytes(train, device) - before
    if optimizer is not None:
        states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        lasting = sum(t.nbytes for t in [*module.parameters(), *module.buffers(), *states])
        found.held = lasting + sum(p.nbytes for p in module.parameters() if p.requires_grad)
        found.peak = None if found.peak is None else lasting + found.peak
    return Subject(found, infer, train, contender.peer)


def measure(
    subjects: list[Subject],
    device: torch.device,
    seconds: float,
    on_round: Callable[[], object],
    clock: Callable[[Callable[[], object], torch.device], float] = meters.seconds,
) -> dict[str, str]:
    """Time all subjects in every round, in a random order; peers that fail leave the list, and why is returned.

    Rounds go on for about `seconds`; there are at least three, and `on_round` is called after each. `clock` says how
    many seconds a call takes on a device.
    """
    failed: dict[str, str] = {}
    started, rounds = time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - started < seconds:
        for subject in random.sample(subjects, len(subjects)):
            try:
                subject.timing.forward.append(clock(subject.infer, device))
                subject.timing.training.append(clock(subject.train, device))
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
    return 2 * n**3 / min(meters.seconds(lambda: a @ b, device) for _ in range(8))
