"""How long each kernel of a layer should take on a card, from what it is compiled to and what it has to move.

A kernel takes the time of its slowest part: products at the rate that dense layers reach, bytes across the L2 cache,
bytes from memory where they do not fit that cache; and what a launch takes in a CUDA graph. What a card measures
confirms or refutes each line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.kernels import use_kernels
from unifmoe_dist.studies.kernel_estimates.cases import Card, Load
from unifmoe_dist.studies.kernel_estimates.compiled import Compiled, Launch, compiled, on_device, recorded
from unifmoe_dist.studies.kernel_estimates.work import work_of

LAUNCH = 2.0  # microseconds between two kernels of a CUDA graph
DENSE_RATE = 0.56  # of the peak; a dense FFN of 16,384 tokens on an H200 (DESIGN: 0.495 ms)
TRITON_RATE = 0.8  # of what dense layers reach, by Triton's products
MEMORY_RATE = 0.85


@dataclass(frozen=True)
class Line:
    """One launch: what it is compiled to, how many of its programs a multiprocessor runs at once, and its time."""

    launch: Launch
    backward: bool
    made: Compiled
    programs: int
    operations: float
    bytes: float
    microseconds: float
    bound: str


def launches_of(load: Load, card: Card) -> tuple[list[Launch], list[Launch]]:
    """What a training step of one bfloat16 layer launches on a card, forward and backward."""
    activation = "silu" if load.gated else "gelu"
    config = UniFMoEConfig(load.dim, load.hidden, load.experts, load.blocks, activation, gated=load.gated)
    layer = UniFMoELayer(config).bfloat16()
    x = torch.zeros(load.tokens, load.dim, dtype=torch.bfloat16, requires_grad=True)
    outputs: list[torch.Tensor] = []
    with on_device(card.shared_memory), use_kernels("triton"):
        forward = recorded(lambda: outputs.append(layer(x)))
        backward = recorded(lambda: outputs[0].backward(outputs[0].detach()))
    return forward, backward


def lines(load: Load, card: Card, say: Callable[[str], None] = lambda text: None) -> Iterator[Line]:
    """Every launch of a training step with its prediction, in order."""
    known: dict[str, Compiled] = {}
    for backward, launches in enumerate(launches_of(load, card)):
        for launch in launches:
            key = launch.key()
            if key not in known:
                say(launch.name)
                known[key] = compiled(launch, card.architecture)
            yield _line(launch, bool(backward), known[key], load, card)


def _line(launch: Launch, backward: bool, made: Compiled, load: Load, card: Card) -> Line:
    work, programs = work_of(launch, load), programs_per_processor(launch.warps, made, card)
    if work is None:
        return Line(launch, backward, made, programs, 0.0, 0.0, LAUNCH, "launch")
    spilled = made.spilled[0] + work.turns * made.spilled[1]
    crossing = work.cached + 32 * launch.warps * work.programs * spilled  # as if the first cache held none of the stack
    fits = work.memory <= 0.7 * card.cache  # then what one kernel wrote the next one finds there
    times = {
        "products": work.operations / (card.peak * DENSE_RATE * TRITON_RATE),
        "L2": crossing / card.cache_rate,
        "memory": 0.0 if fits else work.memory / (card.memory * MEMORY_RATE),
    }
    bound = max(times, key=lambda name: times[name])
    return Line(launch, backward, made, programs, work.operations, crossing, LAUNCH + 1e6 * times[bound], bound)


def inference_microseconds(line: Line, load: Load, card: Card) -> float:
    """A forward line where nothing is kept for a backward pass."""
    launch = replace(line.launch, given=line.launch.given | dict(kept_tiles=0))
    return _line(launch, line.backward, line.made, load, card).microseconds


def programs_per_processor(warps: int, made: Compiled, card: Card) -> int:
    """Programs that a multiprocessor holds at once, by registers, shared memory and threads."""
    registers = 8 * -(-made.registers // 8) * 32 * warps
    return min(65536 // registers, card.per_processor // (made.shared_memory + 1024), card.threads // (32 * warps))


def floor_microseconds(load: Load, card: Card) -> float:
    """The selected blocks' forward products at the speed of a dense FFN; a backward pass has twice these."""
    if load.dense is not None and card.name == "H200":
        return load.dense * load.per_token / load.blocks
    per_block = 2 * (2 + load.gated) * load.dim * load.hidden / load.blocks
    return 1e6 * load.tokens * load.per_token * per_block / (card.peak * DENSE_RATE)
