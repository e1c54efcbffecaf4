"""The paper's other MoE layers, behind the interface of UniF-MoE's: `upcycle_baseline` puts them into a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unifmoe_dist.lazy import names_of

if TYPE_CHECKING:
    from unifmoe_dist.methods.construction import MOE_LAYERS, LayerOptions, upcycle_baseline

__all__ = ["MOE_LAYERS", "LayerOptions", "upcycle_baseline"]
__getattr__ = names_of(__name__, dict.fromkeys(__all__, "construction"))
