"""MoE layers by method: UniF-MoE (`unifmoe_dist.layer`) and the paper's others, each in a file here. See `registry`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unifmoe_dist.lazy import names_of

if TYPE_CHECKING:
    from unifmoe_dist.methods.layers import MOE_LAYERS, LayerOptions, upcycle_baseline

__all__ = ["MOE_LAYERS", "LayerOptions", "upcycle_baseline"]
__getattr__ = names_of(__name__, dict.fromkeys(__all__, "layers"))
