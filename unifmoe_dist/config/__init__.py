"""Typed configuration of one UniF-MoE layer and of a training run, in one place.

Every field is checked when the object is made, so a bad value is refused before any process group exists.
"""

from typing import TYPE_CHECKING

from unifmoe_dist.config.checked import checked
from unifmoe_dist.config.layers import ACTIVATIONS, ExpertLayerConfig, UniFMoEConfig
from unifmoe_dist.lazy import names_of

if TYPE_CHECKING:
    from unifmoe_dist.config.algorithms import AlgorithmConfig, AlgorithmName, DMDAConfig, LFMEConfig, PCMoEConfig
    from unifmoe_dist.config.model import ModelConfig, MoEName
    from unifmoe_dist.config.parts import NO_ZERO_3, DataConfig, OptimConfig, ParallelConfig
    from unifmoe_dist.config.training import TrainConfig

__all__ = [
    "ACTIVATIONS",
    "NO_ZERO_3",
    "AlgorithmConfig",
    "AlgorithmName",
    "DMDAConfig",
    "DataConfig",
    "ExpertLayerConfig",
    "LFMEConfig",
    "MoEName",
    "ModelConfig",
    "OptimConfig",
    "PCMoEConfig",
    "ParallelConfig",
    "TrainConfig",
    "UniFMoEConfig",
    "checked",
]

# Options of runs, which a layer does without.
_OF_RUNS = {
    "algorithms": ("AlgorithmConfig", "AlgorithmName", "DMDAConfig", "LFMEConfig", "PCMoEConfig"),
    "model": ("ModelConfig", "MoEName"),
    "parts": ("NO_ZERO_3", "DataConfig", "OptimConfig", "ParallelConfig"),
    "training": ("TrainConfig",),
}
__getattr__ = names_of(__name__, {name: module for module, names in _OF_RUNS.items() for name in names})
