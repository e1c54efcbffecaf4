"""Cards and shapes that predictions are made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Load:
    """A layer's shape and what its router decides.

    Args:
        tokens: N.
        dim: D.
        hidden: H.
        experts: K.
        blocks: B.
        per_token: C_B, selected blocks of all experts, mean over tokens.
        gated: Whether experts have a second bank of keys.
        dense: Microseconds of a dense FFN of this shape, forward, on an H200, where measured.
    """

    tokens: int
    dim: int
    hidden: int
    experts: int
    blocks: int
    per_token: float
    gated: bool = False
    dense: float | None = None

    def rows(self, parts: int) -> float:
        """Rows of all groups, where a block is cut in `parts`."""
        return self.tokens * self.per_token * parts

    def tile_rows(self, given: dict[str, Any], multiple: int) -> float:
        """Rows of all groups, each rounded up to a multiple: half of one for each group that is in use."""
        return self.rows(given["PARTS"]) + given["E"] * given["B"] * multiple / 2


@dataclass(frozen=True)
class Card:
    """A card's data sheet.

    Args:
        name: Its name.
        architecture: Ten times its compute capability.
        processors: Streaming multiprocessors.
        peak: Half-precision products with float32 sums, operations per second, dense.
        memory: Bytes per second from memory.
        cache_rate: Bytes per second across the L2 cache; no data sheet has it, microbenchmarks do.
        cache: Bytes of the L2 cache.
        shared_memory: Bytes that a program may have.
        per_processor: Bytes of shared memory of a multiprocessor.
        threads: Threads of a multiprocessor.
    """

    name: str
    architecture: int
    processors: int
    peak: float
    memory: float
    cache_rate: float
    cache: float
    shared_memory: int
    per_processor: int
    threads: int


CARDS = {
    "h200": Card("H200", 90, 132, 989e12, 4.8e12, 5.5e12, 50e6, 227 * 1024, 228 * 1024, 2048),
    "h100": Card("H100 SXM", 90, 132, 989e12, 3.35e12, 5.5e12, 50e6, 227 * 1024, 228 * 1024, 2048),
    "rtx3090": Card("RTX 3090", 86, 82, 71e12, 0.936e12, 2.5e12, 6e6, 99 * 1024, 100 * 1024, 1536),
}
LOADS = {
    "vision": Load(12608, 384, 1536, 6, 8, 9.15, dense=83.0),
    "language": Load(4096, 1024, 4096, 16, 16, 21.9, dense=124.0),
    "language-16k": Load(16384, 1024, 4096, 16, 16, 21.9, dense=495.0),
    "gated": Load(4096, 1024, 2816, 16, 16, 21.9, gated=True),
}
"""C_B of the first three is that of DESIGN.md, section 5; the gated layer is taken to route alike."""
