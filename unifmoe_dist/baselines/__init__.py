"""The paper's other MoE layers, behind the interface of UniF-MoE's: `upcycle_baseline` puts them into a model."""

from unifmoe_dist.baselines.construction import MOE_LAYERS, LayerOptions, upcycle_baseline

__all__ = ["MOE_LAYERS", "LayerOptions", "upcycle_baseline"]
