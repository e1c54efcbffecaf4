"""Time of one layer beside its peers, in one process, interleaved, so that every ratio comes from one run.

The floor of a UniF-MoE layer is C_B / B times the dense FFN: what its selected blocks would cost at the dense rate.
Its router is sharpened until the mean C_B is the one that the paper measured for trained models.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn

from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.kernels import use_kernels


@dataclass(frozen=True)
class Shape:
    """One layer to time.

    Args:
        name: What it is called in tables.
        tokens: Number N of tokens.
        dim: Model width d.
        hidden: FFN width H.
        experts: Residual experts K.
        blocks: Blocks B.
        block_compute: Mean C_B to bring the router to; None leaves it as it starts.
    """

    name: str
    tokens: int
    dim: int
    hidden: int
    experts: int
    blocks: int
    block_compute: float | None = None


# The paper's layers at the operating points of its cost table; on the CPU with fewer tokens.
VISION = Shape("vision", 12608, 384, 1536, 6, 8, 11.41)
LANGUAGE = Shape("language", 16384, 1024, 4096, 16, 16, 47.61)
CPU_TOKENS = {"vision": 1576, "language": 256}


@dataclass
class Contender:
    """A layer under test.

    Args:
        name: Its name in tables.
        layer: From (N, d) tokens to (N, d).
        blocks: Dense-FFN equivalents of its arithmetic per token, or None where that says nothing.
        context: Made around every call.
    """

    name: str
    layer: Callable[[Tensor], Tensor]
    blocks: float | None
    context: Callable[[], AbstractContextManager] = nullcontext


@dataclass
class Timing:
    """Times of one contender at one shape, in seconds.

    Args:
        forward: One entry per round, without gradients.
        training: One entry per round, forward and backward.
        memory: Largest memory of a training pass beyond what was held before, in bytes; None on the CPU.
    """

    shape: str
    contender: str
    ffns: float | None
    forward: list[float] = field(default_factory=list)
    training: list[float] = field(default_factory=list)
    memory: int | None = None

    def median(self, kind: str) -> float:
        return statistics.median(getattr(self, kind))

    def spread(self, kind: str) -> float:
        """Half the distance between the quartiles."""
        low, _, high = statistics.quantiles(getattr(self, kind), n=4)
        return (high - low) / 2


def dense_ffn(dim: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))


@torch.no_grad()
def at_operating_point(layer: UniFMoELayer, x: Tensor, block_compute: float) -> float:
    """Scale the residual columns of the router until the mean C_B on x is `block_compute`; returns what was reached.

    Sharper affinities need fewer experts, so the mean falls with the scale; tokens decide one by one, so it is met
    within a fraction of a percent.
    """
    start = layer.router.weight[1:].clone()
    low, high = 0.0, 64.0
    reached = 0.0
    for _ in range(30):
        scale = (low + high) / 2
        layer.router.weight[1:] = start * scale
        reached = layer.route(x).block_compute.float().mean().item()
        low, high = (scale, high) if reached > block_compute else (low, scale)
    return reached


def contenders(shape: Shape, x: Tensor) -> Iterator[Contender]:
    """The dense FFN, this layer on every path that runs here, and the peers that can be imported."""
    device, dtype = x.device, x.dtype
    yield Contender("dense FFN", dense_ffn(shape.dim, shape.hidden).to(device, dtype), 1.0)
    config = UniFMoEConfig(shape.dim, shape.hidden, shape.experts, shape.blocks)
    layer = UniFMoELayer(config).to(device, dtype)
    if shape.block_compute is not None:
        at_operating_point(layer, x, shape.block_compute)
    ffns = layer.route(x).block_compute.float().mean().item() / shape.blocks
    yield Contender("UniF-MoE", layer, ffns)
    if x.is_cuda:
        yield Contender("UniF-MoE, plain torch", layer, ffns, lambda: use_kernels("grouped"))
    yield Contender("UniF-MoE, masked reference", layer, ffns, lambda: use_kernels("reference"))
    for top_k in (1, 2):
        yield from _tutel(shape, x, top_k)
        yield _mixtral(shape, x, top_k)


def _tutel(shape: Shape, x: Tensor, top_k: int) -> Iterator[Contender]:
    try:
        from tutel import moe
    except ImportError:
        return
    experts = {
        "type": "ffn", "num_experts_per_device": shape.experts, "hidden_size_per_expert": shape.hidden,
        "activation_fn": torch.nn.functional.gelu,
    }  # fmt: skip
    gate = {"type": "top", "k": top_k, "capacity_factor": 0.0}  # 0: as much room as the busiest expert needs
    layer = moe.moe_layer(gate_type=gate, model_dim=shape.dim, experts=experts).to(x.device, x.dtype)
    yield Contender(f"Tutel top-{top_k}", layer, float(top_k))


def _mixtral(shape: Shape, x: Tensor, top_k: int) -> Contender:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    # Its experts have three matrices: at two thirds of the width they cost as much as the dense FFN.
    config = MixtralConfig(hidden_size=shape.dim, intermediate_size=2 * shape.hidden // 3, hidden_act="silu",
                           num_local_experts=shape.experts, num_experts_per_tok=top_k)  # fmt: skip
    config._experts_implementation = "grouped_mm" if x.is_cuda else "eager"
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    block.to(x.device, x.dtype)

    def layer(tokens: Tensor) -> Tensor:
        return block(tokens[None])[0]

    return Contender(f"Transformers Mixtral top-{top_k}", layer, float(top_k))


def run(
    shape: Shape, device: torch.device, dtype: torch.dtype, seconds: float, on_round: Callable[[], object]
) -> list[Timing]:
    """Time every contender at one shape, one after the other in every round.

    Args:
        shape: The layer.
        device: Where.
        dtype: Of weights and tokens.
        seconds: Rounds go on for about this long; there are at least three.
        on_round: Called after every round.
    """
    torch.manual_seed(0)
    x = torch.randn(shape.tokens, shape.dim).to(device, dtype)
    entries = [(c, Timing(shape.name, c.name, c.blocks)) for c in contenders(shape, x)]
    for contender, timing in entries:  # warm-up: compilers, allocators
        _forward(contender, x)
        timing.memory = _peak_memory(contender, x)
    started = time.perf_counter()
    while time.perf_counter() - started < seconds or len(entries[0][1].forward) < 3:
        for contender, timing in entries:
            timing.forward.append(_timed(lambda c=contender: _forward(c, x), device))  # type: ignore[misc]
            timing.training.append(_timed(lambda c=contender: _train(c, x), device))  # type: ignore[misc]
        on_round()
    return [timing for _, timing in entries]


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP per second of a large matrix product here."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n).to(device, dtype) for _ in range(2))
    times = [_timed(lambda: a @ b, device) for _ in range(8)]
    return 2 * n**3 / min(times)


def _forward(contender: Contender, x: Tensor) -> None:
    with torch.no_grad(), contender.context():
        contender.layer(x)


def _train(contender: Contender, x: Tensor) -> None:
    leaf = x.detach().requires_grad_()
    with contender.context():
        y = contender.layer(leaf)
    y.backward(torch.ones_like(y))
    if isinstance(contender.layer, nn.Module):
        contender.layer.zero_grad(set_to_none=True)


def _peak_memory(contender: Contender, x: Tensor) -> int | None:
    if not x.is_cuda:
        _train(contender, x)
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _train(contender, x)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _timed(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


# -- results --------------------------------------------------------------------------------------------------------


def table(shape: Shape, timings: list[Timing], rate: float) -> str:
    """Markdown: times, ratios to the dense FFN and to the floor, and the share of a large matrix product's rate."""
    dense = timings[0]
    lines = [
        f"**{shape.name}**: N={shape.tokens}, d={shape.dim}, H={shape.hidden}, K={shape.experts}, B={shape.blocks}",
        "",
        "| layer | FFNs per token | forward (ms) | / dense | / floor | forward + backward (ms) | / dense | / floor "
        "| of matmul rate | memory (MB) |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    flops = 4 * shape.tokens * shape.dim * shape.hidden
    for t in timings:
        cells = [t.contender, "" if t.ffns is None else f"{t.ffns:.2f}"]
        for kind in ("forward", "training"):
            ratio = t.median(kind) / dense.median(kind)
            cells.append(f"{1e3 * t.median(kind):.2f} ± {1e3 * t.spread(kind):.2f}")
            cells += [f"{ratio:.2f}", "" if t.ffns is None else f"{ratio / t.ffns:.2f}"]
        share = "" if t.ffns is None else f"{100 * t.ffns * flops / t.median('forward') / rate:.0f} %"
        cells += [share, "" if t.memory is None else f"{t.memory / 2**20:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def as_record(shape: Shape, timings: list[Timing], rate: float) -> dict:
    """Everything measured at one shape, for JSON."""
    return {"shape": asdict(shape), "matmul_flop_per_s": rate, "timings": [asdict(t) for t in timings]}
