"""What the tokens of R ranks ask of each other, counted from recorded routing, and the bytes of both exchanges.

Matrices are (R, R): row h counts what tokens at home on rank h ask of the experts on rank r, column r. Nodes are P
neighbouring ranks each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from unifmoe_dist.kernels.exchange import COUNTS, Run
from unifmoe_dist.studies.scaling.recorded_routing import RecordedLayer


@dataclass(frozen=True)
class Crossings:
    """One layer's forward pass."""

    rows: np.ndarray  # (R, R) tokens with an active expert there
    gates: np.ndarray  # (R, R) their active experts there
    blocks: np.ndarray  # (R, R) blocks that these compute
    node_rows: np.ndarray  # (R, R / P) tokens with an active expert on that node
    shared: np.ndarray  # (R,) blocks of the shared expert, which are computed at home
    experts: int  # residual experts on a rank
    num_blocks: int

    @staticmethod
    def of(layer: RecordedLayer, ranks: int, ranks_per_node: int, each: int = 0) -> Crossings:
        """Tokens are dealt to the ranks in spans of `each`, by default of what there is, and experts in equal spans."""
        each, local = each or len(layer) // ranks, layer.num_experts // ranks
        rows, gates, blocks, node_rows, shared = [], [], [], [], []
        for tokens in layer.dealt(ranks, each):
            active = layer.active[tokens].reshape(each, ranks, local).sum(2)
            goes, own = active > 0, layer.shared[tokens].sum(1)
            rows.append(goes.sum(0))
            gates.append(active.sum(0))
            blocks.append((layer.num_blocks - own) @ active)
            node_rows.append(goes.reshape(each, -1, ranks_per_node).any(2).sum(0))
            shared.append(own.sum())
        rows_RR, gates_RR, blocks_RR, node_rows_RN, shared_R = map(np.array, (rows, gates, blocks, node_rows, shared))
        return Crossings(rows_RR, gates_RR, blocks_RR, node_rows_RN, shared_R, local, layer.num_blocks)


@dataclass(frozen=True)
class Leg:
    """Bytes that ranks hand to one collective, [sender, receiver]; nothing to itself."""

    name: str  # "counts", "there" or "home"
    level: str  # "flat", "far" (between nodes), "near" (a node's own tokens) or "onward" (others', inside it)
    backward: bool
    bytes: np.ndarray  # (R, R)


def flat_legs(crossings: Crossings, row_bytes: int) -> list[Leg]:
    """Those of `alltoall`: a token crosses once to each rank that holds one of its experts."""
    mask = crossings.num_blocks + crossings.experts
    return _journey("flat", crossings.rows, crossings.gates, np.ones_like(crossings.rows, dtype=bool), row_bytes, mask)


def two_level_legs(crossings: Crossings, row_bytes: int, ranks_per_node: int) -> list[Leg]:
    """Those of `two_level`: once per node, to the rank with its own place there, then on to the ranks inside.

    Inside a node its own tokens ("near") travel apart from those of other nodes ("onward").
    """
    ranks, p = len(crossings.rows), ranks_per_node
    nodes = ranks // p
    place, node = np.arange(ranks) % p, np.arange(ranks) // p
    rail, inside = place[:, None] == place, node[:, None] == node
    mask = crossings.num_blocks + crossings.experts
    far_mask = crossings.num_blocks + crossings.experts * p
    node_gates = crossings.gates.reshape(ranks, nodes, p).sum(2)
    far_rows, far_gates = (x[:, node] for x in (crossings.node_rows, node_gates))
    in_rows, in_gates = (_from_elsewhere(x, nodes, p) for x in (crossings.rows, crossings.gates))
    far = _journey("far", far_rows, far_gates, rail & ~inside, row_bytes, far_mask, COUNTS + 2 * p)
    near = _journey("near", crossings.rows, crossings.gates, inside, row_bytes, mask, COUNTS + 2)
    return far + near + _journey("onward", in_rows, in_gates, inside, row_bytes, mask, 0)  # near's counts say it too


def _from_elsewhere(x: np.ndarray, nodes: int, p: int) -> np.ndarray:
    """(R, R) of homes -> (R, R) of the ranks through which tokens of other nodes come into a node."""
    by_node = x.reshape(nodes, p, nodes, p).copy()
    by_node[np.arange(nodes), :, np.arange(nodes)] = 0
    result = np.zeros((nodes, p, nodes, p), dtype=x.dtype)
    result[np.arange(nodes), :, np.arange(nodes)] = by_node.sum(0).transpose(1, 0, 2)
    return result.reshape(nodes * p, nodes * p)


def _journey(
    level: str, rows: Any, gates: Any, linked: np.ndarray, row_bytes: int, mask_bits: int, counts: int = COUNTS
) -> list[Leg]:
    """Counts, tokens and rows, and the gradients of both, as `kernels.exchange` lays them, where ranks are linked."""
    others = (linked & ~np.eye(len(rows), dtype=bool)).astype(np.int64)
    rows, gates = rows * others, gates * others
    run = Run(rows, gates)

    def sections(mask_bytes: int) -> Any:
        return sum(run.sections(row_bytes, mask_bytes))

    return [
        Leg("counts", level, False, 4 * counts * others),
        Leg("there", level, False, sections((mask_bits + 7) // 8)),
        Leg("home", level, False, rows.T * row_bytes),
        Leg("home", level, True, rows * row_bytes),
        Leg("there", level, True, sections(0).T),
    ]
