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
        layers = list(usage.values())

        def mean(name: str) -> float:
            return sum(getattr(layer, name) for layer in layers) / len(layers)

        numbers += [f"C_B {mean('block_compute'):.2f}", f"k {mean('expert_count'):.2f}"]
        numbers.append(f"α {mean('shared_demand'):.2f}")
        loads = [load for layer in layers for load in layer.expert_load]
        numbers.append(f"loads {100 * min(loads):.0f}-{100 * max(loads):.0f}%")
    return numbers


def show_beside(bar: tqdm, numbers: Sequence[str]) -> None:
    """Put as many of the numbers beside the bar as leave it LEAST columns of the terminal."""
    state = bar.format_dict
    columns = state["ncols"]
    if columns:
        alone = tqdm.format_meter(**{**state, "ncols": None, "postfix": "", "bar_format": BAR.replace("{bar}", "")})
        room = columns - len(alone) - len(", ") - LEAST
        numbers = [n for i, n in enumerate(numbers) if len(" ".join(numbers[: i + 1])) <= room]
    bar.set_postfix_str(" ".join(numbers))
