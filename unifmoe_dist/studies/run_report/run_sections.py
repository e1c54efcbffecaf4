"""What every report has, whatever the run: key numbers, training, cost, options, environment, and how to repeat."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from unifmoe_dist import __version__
from unifmoe_dist.config import TrainConfig
from unifmoe_dist.methods.registry import METHODS
from unifmoe_dist.studies.cost.paper import published_cost
from unifmoe_dist.studies.cost.table import STATISTICS
from unifmoe_dist.studies.figures.training import compute_figure, curves_figure
from unifmoe_dist.studies.html import Block, Cell, Code, KeyNumber, Number, Picture, Section, Table, Text
from unifmoe_dist.studies.run_report.costs import CostTable
from unifmoe_dist.studies.run_report.loading import LoadedRun, layer_names
from unifmoe_dist.studies.run_report.study import RunStudy, cost_record
from unifmoe_dist.train.cli import dump_train_config
from unifmoe_dist.train.option_values import as_word, by_dotted_name
from unifmoe_dist.upcycling import moe_layers

_PACKAGES = ("torch", "deepspeed", "timm", "transformers", "numpy", "scipy", "matplotlib")


def key_numbers(found: RunStudy) -> list[KeyNumber]:
    """What a reader wants first."""
    run, model = found.run, found.run.config.model
    numbers = []
    if (summary := run.summary) is not None:
        metric = str(summary["metric"]).replace("_", " ")
        where = f"held out: {summary['held_out']}" if summary["held_out"] else "test data"
        numbers.append(KeyNumber(f"test {metric}", Number(summary["score"], ".1%"), where))
        note = f"checkpoint of step {summary['best_step']}"
        numbers.append(KeyNumber(f"validation {metric}", Number(summary["validation_score"], ".1%"), note))
        if (linear := summary.get("linear_baseline_accuracy")) is not None:
            numbers.append(KeyNumber("linear classifier", Number(linear, ".1%"), "test accuracy, to compare"))
    if found.executed:
        compute, count, demand = (_mean_executed(found, n) for n in ("block_compute", "expert_count", "shared_demand"))
        numbers.append(KeyNumber("blocks per token, C_B", Number(compute), f"a dense FFN: {model.num_blocks}"))
        experts = next(iter(run.layers.values())).config.num_experts
        numbers.append(KeyNumber("experts per token, k", Number(count), f"of {experts}"))
        if found.usage:
            numbers.append(KeyNumber("shared demand, α", Number(demand), "mean over layers"))
    cost = cost_record(found.own_cost)
    numbers.append(KeyNumber("N (2²⁰)", Number(cost["N"], "#.3g"), "parameters"))
    numbers.append(KeyNumber("N_A (2²⁰)", Number(cost["N_A"], "#.3g"), "parameters a token uses"))
    item = "sentence" if run.is_text else "image"
    numbers.append(KeyNumber("FLOPs (2³⁰)", Number(cost["FLOPs"], "#.3g"), f"per {item}"))
    if run.summary is not None:
        ranks = run.summary["world_size"]
        numbers.append(
            KeyNumber(
                "training time (s)",
                Number(run.summary["wall_seconds"], ",.0f"),
                f"on {ranks} rank{'s' if ranks > 1 else ''}",
            )
        )
    return numbers


def _mean_executed(found: RunStudy, name: str) -> float:
    values = [getattr(usage, name) for usage in found.executed.values()]
    return sum(values) / len(values)


def training_section(runs: Sequence[LoadedRun]) -> list[Section]:
    """Learning curves, on the same axes for several runs; none where nothing was recorded."""
    several = len(runs) > 1
    runs = [run for run in runs if run.records]
    records = {run.name if several else "": _with_layer_names(run.records) for run in runs}
    if not records:
        return []
    blocks: list[Block] = [
        Picture(
            "curves",
            "Learning curves",
            "Left: task loss; then, where layers have one, their auxiliary loss before weighting, on its own axis. "
            "Right: scores on the training batches and on the validation data, of which the best selects the "
            "checkpoint.",
            curves_figure(records),
        )
    ]
    if (compute := compute_figure(records)) is not None:
        caption = (
            "Means over the tokens of the training batches, layer by layer: executed blocks, (residual) experts "
            "and, for UniF-MoE, shared demand."
        )
        caption += " Line styles tell runs apart, colours layers." if several else ""
        blocks.append(Picture("compute", "Computation over training", caption, compute))
    for run in runs:
        if run.summary is None:
            blocks.append(Text(f"{run.name} has not finished: it has no test score yet."))
    return [Section("Training", blocks)]


def _with_layer_names(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [
        {**record, "layers": {name: record["layers"][module] for module, name in layer_names(list(layers)).items()}}
        if (layers := record.get("layers"))
        else record
        for record in records
    ]


def load_section(found: RunStudy, prefix: str) -> list[Section]:
    """Loads of a run whose layers have no shared expert."""
    executed = {name: usage for name, usage in found.executed.items() if name not in found.usage}
    if not executed:
        return []
    widest = max(len(usage.expert_load) for usage in executed.values())
    rows: list[list[Cell]] = [
        [
            name,
            Number(usage.expert_count),
            Number(usage.block_compute),
            *(Number(load, ".1%") for load in usage.expert_load),
            *[""] * (widest - len(usage.expert_load)),
        ]
        for name, usage in executed.items()
    ]
    caption = (
        f"Experts per token k, blocks per token C_B (a dense FFN: {found.run.config.model.num_blocks}), and the "
        "fraction of tokens that each expert gets, over the sample of test data. Equal fractions mean balanced "
        "experts."
    )
    columns = ["layer", "k", "C_B", *(f"expert {e}" for e in range(widest))]
    return [Section("Expert load", [Table(f"{prefix}load", caption, columns, rows)])]


def cost_section(tables: Sequence[CostTable], with_published: bool) -> Section:
    """N, N_A, FLOPs and, where measured, seconds and memory, one row per model.

    `with_published` puts the paper's numbers, which are of a vision model, beside them.
    """
    columns = list({column.label: column for table in tables for column in table.columns}.values())
    missing = {label: reason for table in tables for label, reason in table.missing.items()}
    shown = [s for s in STATISTICS if any(s in cost_record(column) for column in columns)]
    rows: list[list[Cell]] = []
    for column in columns:
        record = cost_record(column)
        published = published_cost(column.method or "") if with_published else {}
        rows.append(
            [
                column.label,
                *(
                    Number(
                        record.get(s),
                        "#.3g" if abs(record.get(s) or 0) < 1 else ".2f",
                        f"({published[s]:.2f})" if s in published else "",
                    )
                    for s in shown
                ),
            ]
        )
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
    if missing:  # a reason ends where its advice on training begins
        reasons = "; ".join(f"{label} ({reason.partition(';')[0]})" for label, reason in missing.items())
        caption += f" Not possible with this run's options: {reasons}."
    return Section("Cost", [Table("cost", caption, ["model", *shown], rows)])


def option_section(run: LoadedRun, prefix: str, heading: str) -> Section:
    """Options that differ from the defaults, then all."""
    given, default = by_dotted_name(asdict(run.config)), by_dotted_name(asdict(TrainConfig()))
    rows: list[list[Cell]] = [
        [name, as_word(value), as_word(default[name])] for name, value in given.items() if value != default[name]
    ]
    table = Table(f"{prefix}options", "Options that differ from the defaults.", ["option", "here", "default"], rows)
    return Section(heading, [table, Code(dump_train_config(run.config).strip(), "All options, as in config.yaml:")])


def environment_section(runs: Sequence[LoadedRun], command: str) -> Section:
    """Versions and devices of this analysis, seed and ranks of the training, and the commands of both."""
    device = runs[0].device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    rows: list[list[Cell]] = [["unifmoe_dist", __version__], ["Python", platform.python_version()]]
    rows += [[package, importlib.metadata.version(package)] for package in _PACKAGES]
    rows.append(["analysed on", f"{device.type} ({name}), threads: {torch.get_num_threads()}"])
    for run in runs:
        ranks = run.summary["world_size"] if run.summary else None
        rows.append([f"{run.name}: seed", str(run.config.seed)])
        trained = f"{ranks} rank{'s' if ranks > 1 else ''}" if ranks else "unknown: not finished"
        rows.append([f"{run.name}: trained on", trained])
        rows.append([f"{run.name}: checkpoint", f"{run.checkpoint.name} (step {run.step})"])
        rows += [[f"{run.name}: {name}", module] for module, name in layer_names(list(moe_layers(run.model))).items()]
    trainings = "\n".join(train_command(run) for run in runs)
    return Section(
        "Environment, and how to repeat",
        [
            Table("environment", "What this report was made with.", ["what", "version or value"], rows),
            Code(trainings, "Train again (as many ranks give the same batches and losses to rounding):"),
            Code(command, "Make this report again:"),
            Text(
                "Beside this page: figures/ (PNG, PDF), tables/ (CSV) and numbers.json, which holds every number "
                "at full precision. The page itself needs none of them; only its PNG, PDF and CSV links do."
            ),
        ],
    )


def train_command(run: LoadedRun) -> str:
    """A command that trains a run anew, in a folder of another name."""
    ranks = run.summary["world_size"] if run.summary else 1
    start = ["python"] if ranks == 1 else ["torchrun", "--nproc-per-node", str(ranks)]
    words = [
        *start,
        "launch/train.py",
        "--config",
        str(run.folder / "config.yaml"),
        "--resume",
        "false",
        "--output",
        f"{run.folder}-again",
    ]
    return shlex.join(words)
