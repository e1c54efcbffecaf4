"""Exchanges between ranks that are all in this process: what one packs, the others are handed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unifmoe_dist.kernels.exchange import Packed, Packing


@dataclass(frozen=True)
class Rank:
    """What one rank gives to an exchange, of R ranks with E experts each.

    Args:
        x: (N, D) tokens.
        gates: (N, R * E) float32.
        blocks: (N, B) bool.
        grad: (N, D), the gradient of its tokens' sums.
    """

    x: Tensor
    gates: Tensor
    blocks: Tensor
    grad: Tensor


def journey(kinds: list[type[Packing]], ranks: list[Rank]) -> list[list[Tensor]]:
    """One exchange, forward and backward, in which rows come back times the sum of their gates.

    Args:
        kinds: What packs on every rank.
        ranks: What it packs.

    Returns:
        By rank: the rows, gates and blocks that arrive, the sums at home, and the gradients of tokens and gates.
    """
    made, dtype = _agreed(kinds, ranks), ranks[0].x.dtype
    there = [m.pack(r.x, r.gates, r.blocks) for m, r in zip(made, ranks, strict=True)]
    arrived = [m.unpack(b, dtype) for m, b in zip(made, _carried(there), strict=True)]
    weights = [gates.nan_to_num(2.0).sum(1, keepdim=True).to(dtype) for _, gates, _ in arrived]
    home = [m.return_rows(a[0] * w) for m, a, w in zip(made, arrived, weights, strict=True)]
    totals = [m.combine(b, dtype)[0] for m, b in zip(made, _carried(home), strict=True)]
    spread = [m.spread(r.grad) for m, r in zip(made, ranks, strict=True)]
    of_rows = [m.returned_gradients(b, dtype)[0] for m, b in zip(made, _carried(spread), strict=True)]
    grads = []
    for m, rows, (x, gates, _), w in zip(made, of_rows, arrived, weights, strict=True):
        of_gates = (rows.float() * x.float()).sum(1, keepdim=True).expand_as(gates)
        grads.append(m.pack_gradients(rows * w, of_gates))
    back = [m.unpack_gradients(b, dtype) for m, b in zip(made, _carried(grads), strict=True)]
    return [[*a, total, *g] for a, total, g in zip(arrived, totals, back, strict=True)]


def _agreed(kinds: list[type[Packing]], ranks: list[Rank]) -> list[Packing]:
    """Packings that know what every rank announces."""
    size = len(ranks)
    made = [kind(r.gates, r.blocks, size, [1, 1]) for kind, r in zip(kinds, ranks, strict=True)]
    for to, packing in enumerate(made):
        packing.table[1] = torch.stack([other.table[0, to] for other in made])
    for packing in made:
        packing.agree(packing.table.tolist())
    return made


def _carried(packed: list[Packed]) -> list[Tensor]:
    """What every rank receives, by the sizes that it expects."""
    runs = [p.buffer.split(p.input_splits) for p in packed]
    for to, p in enumerate(packed):
        if [len(run[to]) for run in runs] != p.output_splits:
            raise ArithmeticError("ranks disagree on the bytes between them")
    return [torch.cat([run[to] for run in runs]) for to in range(len(packed))]
