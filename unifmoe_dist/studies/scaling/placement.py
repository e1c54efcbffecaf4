"""How evenly experts load the ranks that hold them, as they lie and as they could lie best, from recorded routing.

A placement is chosen on one half of the tokens and judged on the other. As they lie, rank r holds the contiguous span
r of K / R experts. Best: as `unifmoe_dist.placement` finds it for blocks and tokens.
"""

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

import numpy as np

from unifmoe_dist import placement
from unifmoe_dist.studies.records import markdown
from unifmoe_dist.studies.scaling.crossings import Crossings, flat_legs
from unifmoe_dist.studies.scaling.recorded_routing import RecordedLayer, half, read_routing

_MOST_TOKENS = 8192  # that the search looks at


def best_order(layer: RecordedLayer, ranks: int) -> np.ndarray:
    """(K,) experts in an order whose contiguous spans are the ranks."""
    layer = layer.taken(slice(_MOST_TOKENS))
    weight = (layer.num_blocks - layer.shared.sum(1)) @ layer.active.astype(np.int16)
    return placement.best_order(weight, ranks, layer.active)


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
