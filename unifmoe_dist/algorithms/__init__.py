"""Training algorithms: what is minimised, and which modules exist for training alone. One file and one line each.

`ALGORITHMS[name](model, ...)` owns the model that is deployed; its `forward` gives the loss. See `algorithm.Algorithm`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unifmoe_dist.lazy import names_of

if TYPE_CHECKING:
    from unifmoe_dist.algorithms.algorithm import Algorithm
    from unifmoe_dist.algorithms.classes import ALGORITHMS

__all__ = ["ALGORITHMS", "Algorithm"]
__getattr__ = names_of(__name__, {"ALGORITHMS": "classes", "Algorithm": "algorithm"})
