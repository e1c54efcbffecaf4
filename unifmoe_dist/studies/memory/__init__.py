"""How much memory a training run takes on every rank, before it starts.

    result = estimate(config, ranks=4)       # seconds; no data, weights, network, GPU or process group
    print(describe(result, Budget(24 * GIB, gpu=True, ranks_per_node=4)))

`fake_step.py` runs the step on fake tensors; `measured_peak.py` holds it against real steps.
"""

from unifmoe_dist.studies.memory.budget import GIB, Budget, assumptions, describe, table
from unifmoe_dist.studies.memory.fake_step import KINDS, MemoryEstimate, estimate, variants

__all__ = ["GIB", "KINDS", "Budget", "MemoryEstimate", "assumptions", "describe", "estimate", "table", "variants"]
