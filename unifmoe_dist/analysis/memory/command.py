"""`launch/train.py --estimate`: the words that belong to it, and what it prints."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Sequence

import torch

from unifmoe_dist.analysis import memory
from unifmoe_dist.config import TrainConfig
from unifmoe_dist.engine.ranks import world_size_from_environment
from unifmoe_dist.errors import UserError


def plan_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """--estimate and what belongs to it, and the words that are left.

    Raises:
        UserError: a value is out of range, or belongs to --estimate, which is not given.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--estimate", action="store_true")
    parser.add_argument("--num-gpus-per-node", "--num_gpus_per_node", type=int)
    parser.add_argument("--num-nodes", "--num_nodes", type=int)
    parser.add_argument("--gpu-memory-gb", "--gpu_memory_gb", type=float)
    parser.add_argument("--estimate-device", "--estimate_device", choices=("gpu", "cpu"))
    try:
        options, words = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}; see --help.") from error
    for name, value in vars(options).items():
        if name == "estimate" or value is None:
            continue
        flag = "--" + name.replace("_", "-")
        if not options.estimate:
            raise UserError(f"{flag} belongs to --estimate, which trains nothing; add --estimate or leave it out.")
        if not isinstance(value, str) and not value > 0:
            raise UserError(f"{flag} must be above 0, not {value:g}.")
    return options, words


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
