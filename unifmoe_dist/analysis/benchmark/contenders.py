"""What is timed at one shape: the dense FFN, this layer on every path, and the peers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.analysis.benchmark.grouped_mm import GroupedMM
from unifmoe_dist.analysis.benchmark.peers import PEERS
from unifmoe_dist.analysis.benchmark.shapes import Shape, at_operating_point
from unifmoe_dist.kernels import use_kernels


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


class InBf16(nn.Module):
    """A copy of a layer with bf16 weights; tokens are cast on their way in and out."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
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
    elif dtype == torch.float32 and has_fast_bf16():
        yield Contender("dense FFN in bf16", lambda: InBf16(dense), None)
        yield Contender("UniF-MoE in bf16", lambda: InBf16(layer), None)
    yield Contender("UniF-MoE, torch grouped_mm", lambda: GroupedMM(layer), ffns, peer=True)
    if reference:
        yield Contender("UniF-MoE, masked reference", lambda: layer, ffns, lambda: use_kernels("reference"))
    for top_k in top_ks:
        for name, build in PEERS.items():
            yield Contender(f"{name} top-{top_k}", partial(build, shape, top_k, device, dtype), float(top_k), peer=True)
