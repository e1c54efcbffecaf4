"""How evenly experts load the ranks that hold them, as they lie and as they could lie best, from recorded routing.

A placement is chosen on one half of the tokens and judged on the other. As they lie, rank r holds the contiguous span
r of K / R experts. Best: whole experts, as many on each rank, packed greedily by the blocks that they compute (the
heaviest first, to the least loaded rank with room), then bettered by exchanging two experts for as long as that takes
something off the heaviest ranks, in blocks and in tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

import numpy as np

from unifmoe_dist.studies.records import markdown
from unifmoe_dist.studies.scaling.crossings import Crossings, flat_legs
from unifmoe_dist.studies.scaling.recorded_routing import RecordedLayer, half, read_routing

_SHARPNESS = 16
"""Power in which loads are summed up: the heaviest ranks decide, yet the others count where these are equal."""
_MOST_EXCHANGES = 300
_MOST_TOKENS = 8192  # that the search looks at


def best_order(layer: RecordedLayer, ranks: int) -> np.ndarray:
    """(K,) experts in an order whose contiguous spans are the ranks."""
    layer = layer.taken(slice(_MOST_TOKENS))
    active, local = layer.active.astype(np.int16), layer.num_experts // ranks
    weight = (layer.num_blocks - layer.shared.sum(1)) @ active
    starts = [np.arange(layer.num_experts) // local, _packed(weight, ranks, local)]
    found = [_bettered(start, active, weight, ranks) for start in starts]
    return np.argsort(min(found, key=lambda x: x[0])[1], kind="stable")


def _packed(weight: np.ndarray, ranks: int, local: int) -> np.ndarray:
    """(K,) the rank of every expert: the heaviest expert first, to the least loaded rank with room."""
    rank_of, load, room = np.zeros(len(weight), dtype=int), np.zeros(ranks), np.full(ranks, local)
    for expert in np.argsort(-weight, kind="stable"):
        rank = int(np.argmin(np.where(room > 0, load, np.inf)))
        rank_of[expert], load[rank], room[rank] = rank, load[rank] + weight[expert], room[rank] - 1
    return rank_of


def _bettered(rank_of: np.ndarray, active: np.ndarray, weight: np.ndarray, ranks: int) -> tuple[float, np.ndarray]:
    """The placement and its cost after the exchanges of two experts that take the most off, one after the other."""
    rank_of = rank_of.copy()
    load = np.bincount(rank_of, weight, ranks)
    count = active @ np.eye(ranks, dtype=np.int16)[rank_of]  # (T, R) active experts of a token on a rank
    tokens = (count > 0).sum(0)
    scale = [max(1.0, x.mean()) for x in (load, (active.reshape(len(active), ranks, -1).any(2)).sum(0))]

    def cost(load: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return ((load / scale[0]) ** _SHARPNESS).sum(0) + ((tokens / scale[1]) ** _SHARPNESS).sum(0)

    best = float(cost(load, tokens))
    for _ in range(_MOST_EXCHANGES):
        heavy = {int(np.argmax(load)), int(np.argmax(tokens))}
        better = None
        for expert in np.flatnonzero(np.isin(rank_of, list(heavy))):
            others = np.flatnonzero(rank_of != rank_of[expert])
            if not len(others):
                break
            here, there, j = rank_of[expert], rank_of[others], np.arange(len(others))
            gain = weight[others] - weight[expert]
            loads, seen = (np.repeat(x[:, None].astype(float), len(others), 1) for x in (load, tokens))
            loads[here] += gain
            loads[there, j] -= gain
            moved = active[:, others] - active[:, [expert]]
            seen[here] = (count[:, [here]] + moved > 0).sum(0)
            seen[there, j] = (count[:, there] - moved > 0).sum(0)
            costs = cost(loads, seen)
            i = int(np.argmin(costs))
            if costs[i] < best * (1 - 1e-9):
                best, better = float(costs[i]), (expert, others[i])
        if better is None:
            break
        a, b = better
        rank_of[[a, b]] = rank_of[[b, a]]
        load = np.bincount(rank_of, weight, ranks)
        count = active @ np.eye(ranks, dtype=np.int16)[rank_of]
        tokens = (count > 0).sum(0)
    return best, rank_of


def rank_loads(layer: RecordedLayer, ranks: int) -> np.ndarray:
    """(4, R) tokens that use a rank's experts, blocks of these experts, all blocks computed there, bytes it sends.

    A token counts once on a rank; blocks of the shared expert are computed at home; bytes are those of `alltoall` in
    float32, forward and backward.
    """
    x = Crossings.of(layer, ranks, 1)
    sent = sum(leg.bytes.sum(1) for leg in flat_legs(x, 4 * layer.model_dim))
    return np.array([x.rows.sum(0), x.blocks.sum(0), x.blocks.sum(0) + x.shared, sent])


def busiest(layers: Iterable[RecordedLayer], ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """(4,) each of the busiest rank and of the mean one, summed over layers: ranks wait for each other in each."""
    loads = [rank_loads(layer, ranks) for layer in layers]
    return sum(x.max(1) for x in loads), sum(x.mean(1) for x in loads)


def placement_rows(name: str, layers: Sequence[RecordedLayer], ranks: int) -> dict[str, object]:
    """One row of the table: maximum over mean as experts lie and as they lie best, and how the maximum changes."""
    seen, unseen = half(layers, False), half(layers, True)
    best = [y.ordered(best_order(x, ranks)) for x, y in zip(seen, unseen, strict=True)]
    (most, mean), (least, of) = busiest(unseen, ranks), busiest(best, ranks)
    cells = [
        f"{before:.2f} → {after:.2f} ({-off:+.0f} %)"
        for before, after, off in zip(most / mean, least / of, 100 * (1 - least / most), strict=True)
    ]
    head = {"routing of": name, "K": layers[0].num_experts, "ranks": ranks}
    return head | dict(zip(("tokens", "residual blocks", "all blocks", "bytes"), cells, strict=True))


def placement_table(places: Sequence[Path], ranks: Sequence[int] = (4, 8, 16)) -> str:
    """Markdown table of maximum over mean per rank, today and at best, for every recorded run and rank count."""
    rows = []
    for place, size in product(places, ranks):
        task, layers = read_routing(place)
        if layers[0].num_experts % size == 0:
            rows.append(placement_rows(task, layers, size))
    return markdown(rows, left=("routing of",))
