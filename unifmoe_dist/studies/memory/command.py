"""`launch/train.py --estimate`: what it prints. The words that belong to it are in studies/estimate_options.py."""

from __future__ import annotations

import argparse
import os
import warnings

import torch

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.runtime.ranks import world_size_from_environment
from unifmoe_dist.studies import memory
from unifmoe_dist.studies.estimate_options import plan_options

__all__ = ["plan", "plan_options"]


def plan(config: TrainConfig, options: argparse.Namespace) -> None:
    """Print what a run takes, as it is configured and under every ZeRO stage, offloading and gradient checkpointing."""
    ranks = world_size_from_environment()
    if os.environ["RANK"] != "0":
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # notes on the model would stand between the tables
    warnings.simplefilter("ignore", FutureWarning)
    nodes = options.num_nodes or 1
    least = max(ranks, config.expert_parallel_size(ranks))
    per_node = options.num_gpus_per_node or least // nodes or 1
    gpu = options.estimate_device != "cpu"
    budget = memory.Budget(_memory_gb(options) * memory.GIB, gpu, per_node)
    given = memory.estimate(config, per_node * nodes, gpu)
    print(memory.describe(given, budget), flush=True)
    print("\nEvery ZeRO stage, with and without offloading and gradient checkpointing (GiB per rank):", flush=True)
    others = [memory.estimate(variant, per_node * nodes, gpu) for variant in memory.variants(config)]
    print(memory.table(others, budget))
    print(memory.assumptions(config, budget))


def _memory_gb(options: argparse.Namespace) -> float:
    if options.gpu_memory_gb is not None:
        return options.gpu_memory_gb
    if options.estimate_device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / memory.GIB
    return torch.cuda.get_device_properties(0).total_memory / memory.GIB if torch.cuda.is_available() else 24.0
