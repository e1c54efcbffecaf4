"""One layer: the dense FFN, this layer on every path, and the peers, at one shape."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.kernels import use_kernels
from unifmoe_dist.studies.benchmark.contenders import Contender, Result, measure, prepare, ready
from unifmoe_dist.studies.benchmark.grouped_mm import GroupedMM
from unifmoe_dist.studies.benchmark.peers import PEERS, Unavailable
from unifmoe_dist.studies.benchmark.shapes import Shape, at_operating_point


class InBf16(nn.Module):
    """A copy of a layer with bf16 weights; tokens are cast on their way in and out.

    Raises:
        Unavailable: the CPU would emulate bf16, so that the table says why it lacks this line.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        if not has_fast_bf16():
            raise Unavailable("this CPU has no bf16 instructions (avx512_bf16 or amx_bf16)")
        self.layer = copy.deepcopy(layer).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.bfloat16()).to(x.dtype)


def dense_ffn(dim: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))


def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 by instructions of its own (AVX-512 or AMX)."""
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def contenders(shape: Shape, x: Tensor, top_ks: Sequence[int] = (1, 2), reference: bool = True) -> Iterator[Contender]:
    """Everything to time at a shape, the dense FFN first.

    Args:
        shape: The layer.
        x: (N, d) tokens, whose device and dtype all use.
        top_ks: Experts per token of the peers.
        reference: Whether to time the masked reference, which computes every expert in full.
    """
    device, dtype = x.device, x.dtype
    dense = dense_ffn(shape.dim, shape.hidden).to(device, dtype)
    layer = UniFMoELayer(UniFMoEConfig(shape.dim, shape.hidden, shape.experts, shape.blocks)).to(device, dtype)
    if shape.block_compute is not None:
        at_operating_point(layer, x, shape.block_compute)
    ffns = layer.route(x).block_compute.float().mean().item() / shape.blocks
    yield Contender("dense FFN", lambda: dense, 1.0)
    yield Contender("UniF-MoE", lambda: layer, ffns)
    if x.is_cuda:
        yield Contender("UniF-MoE, plain torch", lambda: layer, ffns, lambda: use_kernels("grouped"))
    elif dtype == torch.float32:
        yield Contender("dense FFN in bf16", lambda: InBf16(dense), None, peer=True)
        yield Contender("UniF-MoE in bf16", lambda: InBf16(layer), None, peer=True)
    yield Contender("UniF-MoE, torch grouped_mm", lambda: GroupedMM(layer), ffns, peer=True)
    if reference:
        yield Contender("UniF-MoE, masked reference", lambda: layer, ffns, lambda: use_kernels("reference"))
    for top_k in top_ks:
        for name, build in PEERS.items():
            yield Contender(f"{name} top-{top_k}", partial(build, shape, top_k, device, dtype), float(top_k), peer=True)


def run_layer(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    seconds: float,
    on_round: Callable[[], object],
    rate: float,
    brief: bool = False,
) -> Result:
    """Time every contender at one shape.

    Args:
        shape: The layer.
        device: Where.
        dtype: Of weights and tokens.
        seconds: Rounds go on for about this long; there are at least three.
        on_round: Called after every round.
        rate: See `matmul_rate`.
        brief: Leaves out the masked reference and the top-1 peers.
    """
    torch.manual_seed(0)
    x = torch.randn(shape.tokens, shape.dim).to(device, dtype)
    candidates = contenders(shape, x, top_ks=(2,) if brief else (1, 2), reference=not brief)
    subjects, skipped = prepare(candidates, lambda contender: ready(contender, lambda: (x.detach().requires_grad_(),)))
    skipped |= measure(subjects, device, seconds, on_round)
    sizes = f"N={shape.tokens}, d={shape.dim}, H={shape.hidden}, K={shape.experts}, B={shape.blocks}"
    if shape.block_compute is None:
        sizes += ", router as it starts"
    flops = 4.0 * shape.tokens * shape.dim * shape.hidden
    return Result(shape.name, sizes, flops, rate, [s.timing for s in subjects], skipped, shape)
