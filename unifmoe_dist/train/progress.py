"""What a run shows of its progress: a bar that keeps some length, and numbers as far as they fit beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tqdm import tqdm

from unifmoe_dist.usage import UsageSummary

BAR = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
LEAST = 10
"""Columns that the bar keeps, on terminals that have room for any number at all."""


def training_numbers(means: Mapping[str, float], usage: Mapping[str, UsageSummary]) -> list[str]:
    """Numbers of the last steps, most important first: loss and accuracy; of MoE layers C_B, k, alpha and loads.

    Args:
        means: Mean "loss" and "accuracy".
        usage: Of each MoE layer; numbers are means over layers, but of all experts' loads the least and the most.
    """
    numbers = [f"loss {means['loss']:.3f}", f"acc {means['accuracy']:.3f}"]
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
