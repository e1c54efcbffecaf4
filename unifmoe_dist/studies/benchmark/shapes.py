"""Layers to time: the paper's two at their operating points and as they start, and sweeps of one size at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unifmoe_dist import UniFMoELayer


@dataclass(frozen=True)
class Shape:
    """One layer to time."""

    name: str
    tokens: int  # N
    dim: int  # model width d
    hidden: int  # FFN width H
    experts: int  # residual experts K
    blocks: int  # B
    block_compute: float | None = None  # mean C_B to bring the router to; None leaves it as it starts, nearly uniform


# The paper's layers at the operating points of its cost table.
VISION = Shape("vision", 12608, 384, 1536, 6, 8, 11.41)
LANGUAGE = Shape("language", 16384, 1024, 4096, 16, 16, 47.61)
PAPER = {
    shape.name: shape
    for shape in (
        VISION,
        LANGUAGE,
        *(replace(s, name=f"{s.name}-uniform", block_compute=None) for s in (VISION, LANGUAGE)),
    )
}
CPU_TOKENS = {"vision": 1576, "language": 256, "vision-uniform": 1576, "language-uniform": 256}


def sweeps(on_gpu: bool) -> dict[str, list[Shape]]:
    """Shapes that differ in one size, by the letter of that size; routers as they start.

    On a GPU N goes from 1k to 64k at both of the paper's layers, d to 4096 and K to 64; on the CPU all are small.
    """
    if on_gpu:
        bases = [replace(VISION, block_compute=None), replace(LANGUAGE, block_compute=None)]
        wide = replace(LANGUAGE, name="wide", tokens=8192, block_compute=None)
        counts, widths = [1024, 4096, 16384, 65536], [512, 1024, 2048, 4096]
    else:
        bases = [Shape("small", 1024, 128, 512, 6, 8)]
        wide = replace(bases[0], name="wide")
        counts, widths = [256, 1024, 4096], [64, 128, 256]
    return {
        "N": [replace(base, tokens=n) for base in bases for n in counts],
        "d": [replace(wide, dim=d, hidden=4 * d) for d in widths],
        "K": [replace(wide, name="experts", experts=k) for k in (4, 16, 64)],
    }


@torch.no_grad()
def at_operating_point(layer: UniFMoELayer, x: Tensor, block_compute: float) -> float:
    """Scale the residual columns of the router until the mean C_B on x is `block_compute`; returns what was reached.

    Sharper affinities need fewer experts, so the mean falls with the scale; tokens decide one by one, so it is met
    within a fraction of a percent where they differ.
    """
    start = layer.router.weight[1:].clone()
    low, high, reached = 0.0, 64.0, 0.0
    for _ in range(30):
        scale = (low + high) / 2
        layer.router.weight[1:] = start * scale
        reached = layer.route(x).block_compute.float().mean().item()
        low, high = (scale, high) if reached > block_compute else (low, scale)
    return reached
