"""What every report has, whatever the run: key numbers, training, cost, options, environment, and how to repeat."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from unifmoe_dist import __version__
from unifmoe_dist.config import TrainConfig
from unifmoe_dist.config.named import as_word, by_dotted_name
from unifmoe_dist.methods.registry import METHODS
from unifmoe_dist.studies.cost.cost_table import STATISTICS
from unifmoe_dist.studies.cost.paper import published_cost
from unifmoe_dist.studies.figures.training import compute_figure, curves_figure
from unifmoe_dist.studies.page import Block, Cell, Code, KeyNumber, Number, Picture, Section, Table
from unifmoe_dist.studies.run_report.loading import LoadedRun, layer_names
from unifmoe_dist.studies.run_report.study import RunStudy
from unifmoe_dist.train.cli import dump_train_config
from unifmoe_dist.upcycling import moe_layers

_PACKAGES = ("torch", "deepspeed", "timm", "transformers", "numpy", "scipy", "matplotlib")


def key_numbers(found: RunStudy) -> list[KeyNumber]:
    """What a reader wants first."""
    run, summary, model = found.run, found.run.summary, found.run.config.model
    numbers = []
    if summary is not None:
        metric = str(summary["metric"]).replace("_", " ")
        where = f"held out: {summary['held_out']}" if summary["held_out"] else "test data"
        numbers.append(KeyNumber(f"test {metric}", Number(summary["score"], ".1%"), where))
        note = f"checkpoint of step {summary['best_step']}"
        numbers.append(KeyNumber(f"validation {metric}", Number(summary["validation_score"], ".1%"), note))
        if (linear := summary.get("linear_baseline_accuracy")) is not None:
            numbers.append(KeyNumber("linear classifier", Number(linear, ".1%"), "test accuracy, to compare"))
    if found.executed:

        def mean(name: str) -> Number:
            values = [getattr(usage, name) for usage in found.executed.values()]
            return Number(sum(values) / len(values))

        experts = next(iter(run.layers.values())).config.num_experts
        numbers.append(KeyNumber("blocks per token, C_B", mean("block_compute"), f"a dense FFN: {model.num_blocks}"))
        numbers.append(KeyNumber("experts per token, k", mean("expert_count"), f"of {experts}"))
        if found.usage:
            numbers.append(KeyNumber("shared demand, α", mean("shared_demand"), "mean over layers"))
    cost = next(column for column in found.costs if column.trained).record()
    item = "sentence" if run.is_text else "image"
    numbers.append(KeyNumber("N (2²⁰)", Number(cost["N"], "#.3g"), "parameters"))
    numbers.append(KeyNumber("N_A (2²⁰)", Number(cost["N_A"], "#.3g"), "parameters a token uses"))
    numbers.append(KeyNumber("FLOPs (2³⁰)", Number(cost["FLOPs"], "#.3g"), f"per {item}"))
    if summary is not None:
        seconds = Number(summary["wall_seconds"], ",.0f")
        numbers.append(KeyNumber("training time (s)", seconds, f"on {_ranks(summary)}"))
    return numbers


def _ranks(summary: dict[str, Any]) -> str:
    return f"{summary['world_size']} rank{'s' if summary['world_size'] > 1 else ''}"


def training_section(runs: Sequence[LoadedRun]) -> list[Section]:
    """Learning curves, on the same axes for several runs; none where nothing was recorded."""
    several = len(runs) > 1
    runs = [run for run in runs if run.records]
    records = {run.name if several else "": list(map(_with_layer_names, run.records)) for run in runs}
    if not records:
        return []
    caption = (
        "Left: task loss; then, where layers have one, their auxiliary loss before weighting, on its own axis. "
        "Right: scores on the training batches and on the validation data, of which the best selects the checkpoint."
    )
    blocks: list[Block] = [Picture("curves", "Learning curves", caption, curves_figure(records))]
    if (compute := compute_figure(records)) is not None:
        caption = (
            "Means over the tokens of the training batches, layer by layer: executed blocks, (residual) experts "
            "and, for UniF-MoE, shared demand."
        )
        caption += " Line styles tell runs apart, colours layers." if several else ""
        blocks.append(Picture("compute", "Computation over training", caption, compute))
    blocks += [f"{run.name} has not finished: it has no test score yet." for run in runs if run.summary is None]
    return [Section("Training", blocks)]


def _with_layer_names(record: dict[str, Any]) -> dict[str, Any]:
    layers = record.get("layers") or {}
    return {**record, "layers": {name: layers[module] for module, name in layer_names(list(layers)).items()}}


def load_section(found: RunStudy, prefix: str) -> list[Section]:
    """Loads of a run whose layers have no shared expert."""
    rows: list[dict[str, Cell]] = [
        {
            "layer": name,
            "k": Number(usage.expert_count),
            "C_B": Number(usage.block_compute),
            **{f"expert {e}": Number(load, ".1%") for e, load in enumerate(usage.expert_load)},
        }
        for name, usage in found.executed.items()
        if name not in found.usage
    ]
    caption = (
        f"Experts per token k, blocks per token C_B (a dense FFN: {found.run.config.model.num_blocks}), and the "
        "fraction of tokens that each expert gets, over the sample of test data. Equal fractions mean balanced "
        "experts."
    )
    return [Section("Expert load", [Table(f"{prefix}load", caption, rows)])] if rows else []


def cost_section(found: Sequence[RunStudy]) -> Section:
    """N, N_A, FLOPs and, where measured, seconds and memory, one row per model; for images the paper beside."""
    with_published = not any(one.run.is_text for one in found)
    columns = list({column.label: column for one in found for column in one.costs}.values())
    rows: list[dict[str, Cell]] = []
    for column in columns:
        record, published = column.record(), published_cost(column.method or "") if with_published else {}
        numbers = {
            name: Number(
                record[name],
                "#.3g" if abs(record[name]) < 1 else ".2f",
                f"({published[name]:.2f})" if name in published else "",
            )
            for name in STATISTICS
            if name in record
        }
        rows.append({"model": column.label, **numbers})
    caption = (
        "N: parameters, in 2²⁰. N_A: those that a token uses, on average. FLOPs: two per multiply-add of matrix "
        "products, in 2³⁰ per item, counted from the blocks that were executed."
    )
    if with_published:
        caption += (
            " In brackets the paper's number for DeiT-S/16 on VLCS and an RTX 3090: to be compared only with the same "
            "backbone and device."
        )
    families = [METHODS[column.method].family if column.method else None for column in columns]
    if with_published and not {"static", "dynamic"}.isdisjoint(families):
        caption += (
            " The paper's FLOPs of GMoE and EMoE are those of buffers padded by 1.5 and its FLOPs of DynMoE those of "
            "all experts, as far as its numbers can be taken apart (docs/insight.md); here all count what they execute."
        )
    measured = next((column.measured for column in columns if column.measured), None)
    if measured is not None:
        caption += (
            " T-TPS and I-TPS: seconds of a training step (with the run's own batch) and of an inference step of "
            "64 items, median of 10; T-RTM and I-RTM: peak memory of both in GiB. Device here: "
            f"{measured.device}, memory of {measured.memory_kind}. Seconds mean little where the "
            "machine had other work too."
        )
    if any(not column.trained for column in columns):
        caption += (
            " Methods other than the run's own are built anew and not trained: where the number of experts is "
            "decided by the router (DynMoE, MASS, UniF-MoE), their N_A and FLOPs are those before training. N of "
            "DynMoE and MASS counts the slots of experts that training may add."
        )
        labels = [column.label for column, family in zip(columns, families, strict=True) if family == "algorithm"]
        trained_alike = ", ".join(labels)
        if trained_alike:
            caption += (
                f" {trained_alike} change training alone and deploy a dense model (DMDA with a second linear head): "
                "what they cost is in T-TPS and T-RTM, which --cost measures."
            )
    if missing := {label: reason for one in found for label, reason in one.costs_missing.items()}:
        # a reason ends where its advice on training begins
        reasons = "; ".join(f"{label} ({reason.partition(';')[0]})" for label, reason in missing.items())
        caption += f" Not possible with this run's options: {reasons}."
    return Section("Cost", [Table("cost", caption, rows)])


def option_section(run: LoadedRun, prefix: str, heading: str) -> Section:
    """Options that differ from the defaults, then all."""
    default = by_dotted_name(asdict(TrainConfig()))
    rows: list[dict[str, Cell]] = [
        {"option": name, "here": as_word(value), "default": as_word(default[name])}
        for name, value in by_dotted_name(asdict(run.config)).items()
        if value != default[name]
    ]
    table = Table(f"{prefix}options", "Options that differ from the defaults.", rows)
    return Section(heading, [table, Code(dump_train_config(run.config).strip(), "All options, as in config.yaml:")])


def environment_section(runs: Sequence[LoadedRun], command: str) -> Section:
    """Versions and devices of this analysis, seed and ranks of the training, and the commands of both."""
    device = runs[0].device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    facts = {"unifmoe_dist": __version__, "Python": platform.python_version()}
    facts |= {package: importlib.metadata.version(package) for package in _PACKAGES}
    facts["analysed on"] = f"{device.type} ({name}), threads: {torch.get_num_threads()}"
    for run in runs:
        facts[f"{run.name}: seed"] = str(run.config.seed)
        facts[f"{run.name}: trained on"] = _ranks(run.summary) if run.summary else "unknown: not finished"
        facts[f"{run.name}: checkpoint"] = f"{run.checkpoint.name} (step {run.step})"
        modules = layer_names(list(moe_layers(run.model)))
        facts |= {f"{run.name}: {layer}": module for module, layer in modules.items()}
    rows = [{"what": what, "version or value": value} for what, value in facts.items()]
    trainings = "\n".join(map(train_command, runs))
    return Section(
        "Environment, and how to repeat",
        [
            Table("environment", "What this report was made with.", rows),
            Code(trainings, "Train again (as many ranks give the same batches and losses to rounding):"),
            Code(command, "Make this report again:"),
            "Beside this page: figures/ (PNG, PDF), tables/ (CSV) and numbers.json, which holds every number "
            "at full precision. The page itself needs none of them; only its PNG, PDF and CSV links do.",
        ],
    )


def train_command(run: LoadedRun) -> str:
    """A command that trains a run anew, in a folder of another name."""
    ranks = run.summary["world_size"] if run.summary else 1
    start = ["python"] if ranks == 1 else ["torchrun", "--nproc-per-node", str(ranks)]
    config, output = str(run.folder / "config.yaml"), f"{run.folder}-again"
    return shlex.join([*start, "launch/train.py", "--config", config, "--resume", "false", "--output", output])
