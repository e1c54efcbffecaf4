"""The training algorithms' classes by `algorithm.name`."""

from unifmoe_dist.algorithms.algorithm import Algorithm
from unifmoe_dist.algorithms.registry import REGISTRY
from unifmoe_dist.lazy import load

ALGORITHMS: dict[str, type[Algorithm]] = {name: load(f"unifmoe_dist.{entry.place}") for name, entry in REGISTRY.items()}
