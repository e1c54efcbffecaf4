"""k-means with clusters of equal size, as EMoE splits an FFN (its code uses the package k-means-constrained)."""

import numpy as np
from sklearn.cluster import kmeans_plusplus


def balanced_kmeans(points: np.ndarray, clusters: int, iterations: int = 100, seed: int = 0) -> np.ndarray:
    """Cluster (N, D) points into `clusters` groups of N / clusters each; deterministic for a seed.

    Returns:
        (clusters, N / clusters) indices of the points, ascending in every group.
    """
    points = np.asarray(points, dtype=np.float64)
    centres, _ = kmeans_plusplus(points, clusters, random_state=seed)
    labels = np.full(len(points), -1)
    for _ in range(iterations):
        cost = -2 * points @ centres.T + (centres**2).sum(1)  # squared distances, up to a constant of the point
        before, labels = labels, balanced_assignment(cost)
        if np.array_equal(before, labels):
            break
        centres = np.stack([points[labels == c].mean(0) for c in range(clusters)])
    return np.argsort(labels, kind="stable").reshape(clusters, -1)


def balanced_assignment(cost: np.ndarray) -> np.ndarray:
    """The cheapest assignment of N points to K clusters of N / K each, for costs (N, K).

    Minimum-cost flow by successive shortest paths: every point starts in its cheapest cluster, then overfull clusters
    pass points on to underfull ones along the cheapest chain of moves. On K clusters a chain is cheap to find, where a
    general solver works on N points.

    Returns:
        (N,) cluster of every point.
    """
    points, clusters = cost.shape
    size = points // clusters
    labels = cost.argmin(1)
    surplus = np.bincount(labels, minlength=clusters) - size
    step = np.full((clusters, clusters), np.inf)  # cheapest move of one point from a cluster to another
    mover = np.zeros((clusters, clusters), dtype=int)
    stale = list(range(clusters))
    while (surplus > 0).any():
        for a in stale:
            inside = np.flatnonzero(labels == a)
            step[a] = np.inf
            if len(inside):
                change = cost[inside] - cost[inside, a, None]
                mover[a] = inside[change.argmin(0)]
                step[a] = change.min(0)
            step[a, a] = np.inf
        path = _cheapest_path(step, surplus)
        for a, b in zip(path[:-1], path[1:], strict=True):
            labels[mover[a, b]] = b
        surplus[path[0]] -= 1
        surplus[path[-1]] += 1
        stale = path
    return labels


def _cheapest_path(step: np.ndarray, surplus: np.ndarray) -> list[int]:
    """Bellman-Ford from all overfull clusters at once to the nearest underfull one."""
    distance = np.where(surplus > 0, 0.0, np.inf)
    parent = np.full(len(surplus), -1)
    for _ in range(len(surplus)):
        through = distance[:, None] + step
        best = through.argmin(0)
        reached = through[best, np.arange(len(surplus))]
        better = reached < distance - 1e-12  # rounding must not make a circle look cheap
        if not better.any():
            break
        distance, parent = np.where(better, reached, distance), np.where(better, best, parent)
    path = [int(np.where(surplus < 0, distance, np.inf).argmin())]
    while surplus[path[0]] <= 0 or parent[path[0]] >= 0:
        path.insert(0, int(parent[path[0]]))
    return path
