"""Which experts lie on which rank, so that ranks have equally much to compute.

Whole experts, as many on each rank, packed greedily by their loads (the heaviest first, to the least loaded rank with
room), then bettered by exchanging two experts for as long as that takes something off the heaviest ranks.
"""

from collections.abc import Sequence

import numpy as np

_SHARPNESS = 16
"""Power in which loads are summed up: the heaviest ranks decide, yet the others count where these are equal."""
_MOST_EXCHANGES = 300


def best_order(load: np.ndarray, ranks: int, active: np.ndarray | None = None) -> np.ndarray:
    """(K,) experts in an order whose contiguous spans are the ranks.

    Args:
        load: (K,) what every expert computes, in blocks.
        ranks: Their number, which divides K.
        active: (T, K) bool, experts of some tokens, where ranks are to have equally many tokens too: one counts once on
            a rank, however many of its experts are there.
    """
    active = np.zeros((0, len(load)), dtype=np.int16) if active is None else active.astype(np.int16)
    local = len(load) // ranks
    starts = [np.arange(len(load)) // local, _packed(load, ranks, local)]
    found = [_bettered(start, active, load, ranks) for start in starts]
    return np.argsort(min(found, key=lambda x: x[0])[1], kind="stable")


def imbalance(load: np.ndarray, order: Sequence[int] | np.ndarray, ranks: int) -> float:
    """The busiest rank's load over the mean rank's, with experts in that order; 1 where there is none."""
    of_ranks = load[np.asarray(order)].reshape(ranks, -1).sum(1)
    return float(of_ranks.max() / of_ranks.mean()) if of_ranks.any() else 1.0


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
    as_numbered = active.reshape(len(active), ranks, len(weight) // ranks).any(2).sum(0)
    scale = [max(1.0, x.mean()) for x in (load, as_numbered)]

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
