"""Estimates against a budget, as `launch/train.py --estimate` prints them: one in detail, many as a table."""

import argparse
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import psutil
import torch

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.methods.registry import method_of
from unifmoe_dist.runtime.ranks import world_size_from_environment
from unifmoe_dist.studies.memory.fake_step import KINDS, MemoryEstimate, estimate, variants

GIB = 2**30
MARGIN = 0.1
"""Assumed share of the peak that the caching allocator loses to fragments, and cuBLAS, cuDNN and NCCL take."""

CONTEXT = 0.8 * GIB
"""Assumed for the CUDA context with its kernels (0.5 GiB) and what the driver keeps of a card's nominal memory."""


@dataclass(frozen=True)
class Budget:
    """What a rank may take."""

    size: float  # nominal bytes of its device
    gpu: bool  # whether that is a GPU, on which more is needed than tensors
    ranks_per_node: int  # that share a node's CPU memory

    def needed(self, estimate: MemoryEstimate) -> float:
        """Bytes with margin and context."""
        return estimate.peak * (1 + MARGIN) + CONTEXT if self.gpu else float(estimate.peak)

    def fits(self, estimate: MemoryEstimate) -> bool:
        return self.needed(estimate) <= self.size

    def host(self, estimate: MemoryEstimate) -> int:
        """Bytes of a node's CPU memory; 0 without offloading."""
        return estimate.host.total() * self.ranks_per_node


def plan(config: TrainConfig, options: argparse.Namespace) -> None:
    """Print what a run takes, as it is configured and under every ZeRO stage, offloading and gradient checkpointing.

    `options` are those of `plan_options` in launch/train.py.
    """
    ranks = world_size_from_environment()
    if os.environ["RANK"] != "0":
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # notes on the model would stand between the tables
    warnings.simplefilter("ignore", FutureWarning)
    nodes, gpu = options.num_nodes or 1, options.estimate_device != "cpu"
    per_node = options.num_gpus_per_node or max(ranks, config.expert_parallel_size(ranks)) // nodes or 1
    budget = Budget(GIB * options.gpu_memory_gb if options.gpu_memory_gb else _memory_here(gpu), gpu, per_node)
    print(describe(estimate(config, per_node * nodes, gpu), budget), flush=True)
    print("\nEvery ZeRO stage, with and without offloading and gradient checkpointing (GiB per rank):", flush=True)
    print(table([estimate(variant, per_node * nodes, gpu) for variant in variants(config)], budget))
    print(assumptions(config, budget))


def _memory_here(gpu: bool) -> float:
    if not gpu:
        return psutil.virtual_memory().total
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 24 * GIB


def describe(estimate: MemoryEstimate, budget: Budget) -> str:
    """One estimate, kind by kind."""
    config, parallel, ranks = estimate.config, estimate.config.parallel, estimate.ranks
    lines = [
        f"{config.data.task}, {method_of(config.model.moe).word}, {config.algorithm.name}: "
        f"{estimate.parameters / 1e6:.1f} million trained parameters on "
        f"{'the rank' if ranks == 1 else f'each of {ranks} ranks'} "
        f"(expert-parallel size {config.expert_parallel_size(ranks)}), {parallel.precision}, "
        f"{config.optim.name}, {estimate.items} items in a rank's micro-batch",
        f"ZeRO {parallel.zero_stage}, optimiser {'offloaded' if parallel.offload_optimizer else 'on the device'}, "
        f"gradient checkpointing {'on' if parallel.gradient_checkpointing else 'off'}",
        "",
        f"{'GiB per rank':22}{'at the peak':>13}{'at its most':>13}",
        *(_line(kind, estimate.device[kind], estimate.most[kind]) for kind in KINDS),
        _line("peak", estimate.peak),
    ]
    if budget.gpu:
        lines += [_line(f"margin, {MARGIN:.0%}", MARGIN * estimate.peak), _line("CUDA context, driver", CONTEXT)]
    verdict = "fits" if budget.fits(estimate) else "does NOT fit"
    lines += [f"{_line('needed', budget.needed(estimate))}   {verdict} into {budget.size / GIB:.1f}"]
    if estimate.host:
        lines += [_line("CPU memory of a node", budget.host(estimate))]
    return "\n".join(lines)


def _line(name: str, *sizes: float) -> str:
    return f"{name:22}" + "".join(f"{size / GIB:13.2f}" for size in sizes)


def table(estimates: Sequence[MemoryEstimate], budget: Budget) -> str:
    """Estimates of variants of one configuration, a line each, in GiB: every kind at its most, then the peak of all."""
    head = [
        "ZeRO",
        *(f" {name}" for name in ("offload", "checkpointing", *KINDS, "peak", "needed", "CPU/node", "fits")),
    ]
    yes, rows = {False: "no", True: "yes"}, []
    for found in estimates:
        parallel, host = found.config.parallel, budget.host(found)
        sizes = [*(found.most[kind] for kind in KINDS), found.peak, budget.needed(found)]
        chosen = [str(parallel.zero_stage), yes[parallel.offload_optimizer], yes[parallel.gradient_checkpointing]]
        figures = [f"{size / GIB:.2f}" for size in sizes] + [f"{host / GIB:.2f}" if host else ""]
        rows.append([*chosen, *figures, yes[budget.fits(found)]])
    return pd.DataFrame(rows, columns=head).to_string(index=False)


def assumptions(config: TrainConfig, budget: Budget) -> str:
    """What the figures rest on."""
    lines = [
        "Kinds are at their most, which is not all at the same time: the peak is below their sum.",
        "Assumed: routers as they start, and optimiser states that exist (from the second step on).",
    ]
    if (task := find_task(config.data.task)).language:
        lines += [f"Every text has the longest length, {task.input_size(config)[0]} tokens, without padding."]
    if budget.gpu:
        lines += ["GPU kernels (docs/memory.md): fused attention, Triton experts, optimisers over lists of tensors."]
    if config.model.dispatcher == "tutel" and config.parallel.expert_parallel_size != 1:
        lines += ["The dispatcher tutel pads its buffers and keeps them in float32, which is not counted."]
    return "\n".join(lines)
