"""Typed configuration of one UniF-MoE layer and of a training run, in one place.

Every field is checked when the object is made, so a bad value is refused before any process group exists.
"""

from unifmoe_dist.config.algorithms import AlgorithmConfig, AlgorithmName, DMDAConfig, LFMEConfig, PCMoEConfig
from unifmoe_dist.config.checked import checked
from unifmoe_dist.config.layers import ACTIVATIONS, ExpertLayerConfig, UniFMoEConfig
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
