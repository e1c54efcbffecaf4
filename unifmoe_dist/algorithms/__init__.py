"""Training algorithms: what is minimised, and which modules exist for training alone. One file each.

`ALGORITHMS[name](model, ...)` owns the model that is deployed; its `forward` gives the loss. See `base.Algorithm`.
"""

from unifmoe_dist.algorithms.algorithm import Algorithm
from unifmoe_dist.algorithms.dmda import DMDA
from unifmoe_dist.algorithms.erm import ERM
from unifmoe_dist.algorithms.lfme import LFME
from unifmoe_dist.algorithms.pcmoe import PCMoE

ALGORITHMS: dict[str, type[Algorithm]] = {"erm": ERM, "lfme": LFME, "dmda": DMDA, "pcmoe": PCMoE}

__all__ = ["ALGORITHMS", "DMDA", "ERM", "LFME", "Algorithm", "PCMoE"]
