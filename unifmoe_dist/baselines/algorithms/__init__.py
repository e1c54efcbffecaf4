"""Training algorithms: what is minimised, and which modules exist for training alone. One file each.

`ALGORITHMS[name](model, ...)` owns the model that is deployed; its `forward` gives the loss. See `base.Algorithm`.
"""

from unifmoe_dist.baselines.algorithms.base import Algorithm
from unifmoe_dist.baselines.algorithms.dmda import DMDA
from unifmoe_dist.baselines.algorithms.erm import ERM
from unifmoe_dist.baselines.algorithms.lfme import LFME
from unifmoe_dist.baselines.algorithms.pcmoe import PCMoE

ALGORITHMS: dict[str, type[Algorithm]] = {"erm": ERM, "lfme": LFME, "dmda": DMDA, "pcmoe": PCMoE}

__all__ = ["ALGORITHMS", "DMDA", "ERM", "LFME", "Algorithm", "PCMoE"]
