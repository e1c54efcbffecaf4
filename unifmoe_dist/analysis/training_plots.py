"""Plots of one run from its metrics.jsonl: learning curves, compute over time, expert and block usage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All records of a run."""
    with (folder / "metrics.jsonl").open() as handle:
        return [json.loads(line) for line in handle]


def plot_run(folder: Path) -> list[Path]:
    """Write curves.png and, for a UniF-MoE run, compute.png and usage.png into folder/plots."""
    records = read_metrics(folder)
    train = [r for r in records if r["kind"] == "train"]
    validation = [r for r in records if r["kind"] == "validation"]
    plots = folder / "plots"
    plots.mkdir(exist_ok=True)
    written = [_curves(train, validation, plots / "curves.png")]
    if train and train[-1]["layers"]:
        written += [_compute(train, plots / "compute.png"), _usage(validation[-1], plots / "usage.png")]
    return written


def _style(axis: Any, xlabel: str, ylabel: str, title: str) -> None:
    axis.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _curves(train: list[dict], validation: list[dict], path: Path) -> Path:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    steps = [r["step"] for r in train]
    left.plot(steps, [r["task_loss"] for r in train], label="task loss")
    if any(r["div_loss"] for r in train):
        left.plot(steps, [r["div_loss"] for r in train], label="auxiliary loss (unweighted)")
    left.set_yscale("log")
    left.legend(frameon=False)
    _style(left, "step", "loss (log scale)", "Training loss")
    right.plot(steps, [100 * r["accuracy"] for r in train], alpha=0.6, label="training batches")
    scores = {"accuracy": "validation"}
    if validation and (metric := validation[-1]["metric"]) != "accuracy":
        scores[metric] = f"validation, {metric.replace('_', ' ')}"
    for name, label in scores.items():
        right.plot([r["step"] for r in validation], [100 * r[name] for r in validation], "o-", label=label)
    right.legend(frameon=False, loc="lower right")
    what = "accuracy" if len(scores) == 1 else "score"
    _style(right, "step", f"{what} (%)", what.capitalize())
    return _save(figure, path)


def _compute(train: list[dict], path: Path) -> Path:
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4))
    steps = [r["step"] for r in train]
    titles = {
        "block_compute": ("blocks per token", "$C_B$"),
        "expert_count": ("residual experts per token", "$k$"),
        "shared_demand": ("shared demand", r"$\alpha$"),
    }
    for axis, (name, (label, title)) in zip(axes, titles.items(), strict=True):
        for layer in train[-1]["layers"]:
            axis.plot(steps, [r["layers"][layer][name] for r in train], label=layer)
        _style(axis, "step", f"mean {label}", title)
    axes[0].legend(frameon=False, fontsize=8)
    return _save(figure, path)


def _usage(record: dict, path: Path) -> Path:
    layers = record["layers"]
    figure, axes = plt.subplots(len(layers), 2, figsize=(9, 2.6 * len(layers)), squeeze=False)
    for row, (name, layer) in zip(axes, layers.items(), strict=True):
        for axis, key, label in ((row[0], "expert_load", "residual expert"), (row[1], "block_load", "shared block")):
            values = 100 * np.asarray(layer[key])
            axis.bar(np.arange(len(values)), values, color="tab:blue" if key == "expert_load" else "tab:orange")
            axis.set_xticks(np.arange(len(values)))
            _style(axis, label, "tokens using it (%)", f"{name}: {label} usage, step {record['step']}")
            axis.title.set_fontsize(9)
            axis.grid(visible=False, axis="x")
    return _save(figure, path)
