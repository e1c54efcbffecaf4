"""What a run tells people: its first lines, the numbers beside its bar, and its end. summary.json has every digit."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from unifmoe_dist.algorithms.registry import REGISTRY as ALGORITHMS
from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.metrics import ACCURACY, metric_named
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.data.task import TaskData
from unifmoe_dist.engines import is_spread
from unifmoe_dist.methods.registry import method_of
from unifmoe_dist.runtime.ranks import Ranks
from unifmoe_dist.usage import UsageSummary

# -- the start ------------------------------------------------------------------------------------------------------


def first_lines(
    config: TrainConfig, ranks: Ranks, task: TaskData, model: nn.Module, folder: Path, step: int
) -> list[str]:
    """What is worth knowing before the first step; `step` steps are done. `config` is in steps."""
    if step >= config.steps:
        return [f"{folder} is complete at step {step}; it is tested again"]
    begun = f"goes on from step {step} of {config.steps}" if step else f"starts, {config.steps} steps"
    if ranks.device.type == "cuda":
        device = torch.cuda.get_device_name(ranks.device)
    else:
        device = f"CPU, {_counted(torch.get_num_threads(), 'thread')} per rank"
    parallel, size = config.parallel, config.expert_parallel_size(ranks.world_size)
    held, several = find_task(config.data.task).held_out(config), len(task.train) > 1
    batch = config.data.batch_size * len(task.train)
    at_once = batch // ranks.world_size // parallel.gradient_accumulation
    return [
        f"{folder} {begun}",
        f"  {_counted(ranks.world_size, 'rank')} on {device}; expert-parallel size {size}, ZeRO {parallel.zero_stage}, "
        f"{parallel.precision}",
        f"  model: {_kind(config)}; {_parameters(model, size)}",
        f"  data: {task.name}{f', {held} held out' if held else ''}; {_items(task.train)} items"
        f"{f' of {len(task.train)} environments' if several else ''} to train, {_items(task.validation)} to validate, "
        f"{_items(task.test)} to test",
        f"  batch: {batch:,} items a step{f' ({config.data.batch_size} of each environment)' if several else ''}, "
        f"{at_once:,} at a time on each rank",
    ]


def _kind(config: TrainConfig) -> str:
    chosen = config.model
    if not method_of(chosen.moe).layer:
        return "dense model"
    layers = f"layer{'s' * (len(chosen.layers) > 1)} {', '.join(map(str, chosen.layers))}"
    return f"{chosen.moe} in {layers} with {chosen.num_experts} experts each"


def _parameters(model: nn.Module, expert_parallel_size: int) -> str:
    own = whole = 0
    for parameter in model.parameters():
        own += parameter.numel()
        whole += parameter.numel() * (expert_parallel_size if is_spread(parameter) else 1)
    return f"{whole:,} parameters" + (f" ({own:,} on each rank)" if own != whole else "")


def _items(datasets: Sequence[Any]) -> str:
    return f"{sum(len(data) for data in datasets):,}"


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


# -- the bar --------------------------------------------------------------------------------------------------------

BAR = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
LEAST = 10
"""Columns that the bar keeps, on terminals that have room for any number at all."""


def training_numbers(means: Mapping[str, float], usage: Mapping[str, UsageSummary]) -> list[str]:
    """Numbers of the last steps, most important first: loss and accuracy; of MoE layers C_B, k, alpha and loads.

    Args:
        means: Mean "loss" and "accuracy", and where they are counted "tokens_per_second".
        usage: Of each MoE layer; numbers are means over layers, but of all experts' loads the least and the most.
    """
    numbers = [f"loss {means['loss']:.3f}", f"acc {means['accuracy']:.3f}"]
    if "tokens_per_second" in means:
        numbers.append(f"{means['tokens_per_second']:,.0f} tokens/s")
    if usage:
        for label, name in (("C_B", "block_compute"), ("k", "expert_count"), ("α", "shared_demand")):
            numbers.append(f"{label} {mean_over_layers(usage, name):.2f}")
        loads = [load for layer in usage.values() for load in layer.expert_load]
        numbers.append(f"loads {100 * min(loads):.0f}-{100 * max(loads):.0f}%")
    return numbers


def mean_over_layers(usage: Mapping[str, UsageSummary], name: str) -> float:
    """Mean of a field over MoE layers, of which there is at least one."""
    return sum(getattr(layer, name) for layer in usage.values()) / len(usage)


def show_beside(bar: tqdm, numbers: Sequence[str]) -> None:
    """Put as many of the numbers beside the bar as leave it LEAST columns of the terminal."""
    state = bar.format_dict
    columns = state["ncols"]
    if columns:
        alone = tqdm.format_meter(**{**state, "ncols": None, "postfix": "", "bar_format": BAR.replace("{bar}", "")})
        room = columns - len(alone) - len(", ") - LEAST
        numbers = [n for i, n in enumerate(numbers) if len(" ".join(numbers[: i + 1])) <= room]
    bar.set_postfix_str(" ".join(numbers))


# -- the end --------------------------------------------------------------------------------------------------------


def result_sentence(summary: Mapping[str, Any], split: str = "test") -> str:
    """How a model did on a split, beside what it can be compared with, and what it executed.

    The summary is that of `summarise`, perhaps with the validation score and the baseline of a whole run.
    """
    method, algorithm = method_of(summary["moe"]), ALGORITHMS[summary["algorithm"]]
    name = method.title if algorithm.plain else algorithm.title
    where = f" ({summary['held_out']} held out)" if summary["held_out"] else ""
    metric = metric_named(summary["metric"])
    words = f"{name} on {summary['task']}{where}: {split} {metric.title} {metric.shown(summary['score'])}"
    beside = []
    if "validation_score" in summary:
        beside.append(f"validation {metric.shown(summary['validation_score'])}")
    if "linear_baseline_accuracy" in summary:
        linear = ACCURACY.shown(summary["linear_baseline_accuracy"])
        beside.append(f"a linear classifier has {linear} on the same test data")
    words += f" ({'; '.join(beside)})" if beside else ""
    if not method.layer:
        return words + "."
    blocks, experts = summary["mean_block_compute"], summary["mean_expert_count"]
    return (
        f"{words}, with {blocks:.2f} blocks per token and layer (a dense FFN is {summary['num_blocks']}) and "
        f"{experts:.2f} {'residual ' if method.shared else ''}experts."
    )


def closing_words(summary: Mapping[str, Any], folder: Path) -> str:
    """The end of a run: its result, how long it took, where everything is and how to look into it."""
    ranks = "1 rank" if summary["world_size"] == 1 else f"{summary['world_size']} ranks"
    steps = f"step {summary['best_step']} of {summary['steps']} was best"
    lines = [
        result_sentence(summary),
        f"Training took {summary['wall_seconds']:.0f} s on {ranks}; {steps} on the validation data and was tested.",
        f"Numbers: {folder / 'summary.json'}; plots: {folder / 'plots'}",
        f"A report of what its layers do: python launch/analyze.py {shlex.quote(str(folder))}",
    ]
    return "\n".join(lines)
