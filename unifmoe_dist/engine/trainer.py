"""One training run on a DeepSpeed engine, from configuration to summary.

L = L_task + lambda_div * sum over layers of L_div
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.base import TaskData
from unifmoe_dist.engine import build, checkpoint, clipping
from unifmoe_dist.engine.batches import TrainBatches
from unifmoe_dist.engine.cli import dump_train_config
from unifmoe_dist.engine.evaluate import Score, collect_usage, evaluate, logits_of, to_device
from unifmoe_dist.engine.ranks import Ranks, seed_everything
from unifmoe_dist.errors import UserError
from unifmoe_dist.upcycling import moe_layers
from unifmoe_dist.usage import UsageSummary


def choose_folder(config: TrainConfig) -> Path:
    """The run's folder; refuses to write over another run.

    Raises:
        UserError: the folder holds a run and --resume was not given, or --resume was given and it holds none.
    """
    if config.output is not None:
        folder = Path(config.output)
        if config.resume:
            checkpoint.latest(folder)
        elif (folder / "config.yaml").exists():
            raise UserError(
                f"{folder} already holds a run; add --resume to continue it or choose another --output."
            )
        return folder
    stem = f"runs/{config.data.task}-{'dense' if config.model.moe == 'none' else config.model.moe}"
    number = 1
    while (folder := Path(stem if number == 1 else f"{stem}-{number}")).exists():
        number += 1
    return folder


class TrainingModel(nn.Module):
    """The model inside the engine, with a module that tells DeepSpeed that some experts are sharded."""

    def __init__(self, model: nn.Module, num_experts: int | None) -> None:
        super().__init__()
        self.model = model
        if num_experts is not None:
            self.expert_marker = _expert_marker(num_experts)

    def forward(self, **inputs: Tensor) -> Any:
        return self.model(**inputs)


def _expert_marker(num_experts: int) -> nn.Module:
    # The engine treats a model as MoE only when it finds an instance of its own class among the modules.
    from deepspeed.moe.layer import MoE

    class ExpertMarker(MoE):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts = num_experts

        def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
            """The groups exist already."""

    return ExpertMarker()


class Trainer:
    """Trains, evaluates, saves and resumes one run.

    Args:
        config: A validated configuration.
        ranks: This process's place in the job.
        folder: The run's folder, the same on every rank.

    Raises:
        UserError: the model, the layers or the data do not fit together.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks, folder: Path) -> None:
        import deepspeed

        self.config, self.ranks, self.folder = config, ranks, folder
        if config.parallel.precision == "fp16" and ranks.device.type == "cpu":
            raise UserError("parallel.precision fp16 needs a GPU; on the CPU use fp32 or bf16.")
        seed_everything(config.seed)
        self.task: TaskData = build.build_task(config)
        self.model = build.build_model(config, self.task, ranks)
        self.layers = moe_layers(self.model)
        build.mark_experts(self.model, ranks)
        if ranks.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            checkpoint.write_text(folder / "config.yaml", dump_train_config(config))
        ranks.barrier()
        optimizer = build.build_optimizer(config, self.model, ranks)
        sharded = config.model.num_experts if ranks.expert_group is not None else None
        self.engine, _, _, self.schedule = deepspeed.initialize(
            model=TrainingModel(self.model, sharded),
            optimizer=optimizer,
            lr_scheduler=build.build_schedule(config),
            config=build.deepspeed_config(config, folder, ranks.world_size, len(self.task.train)),
        )
        clipping.use_true_norm(self.engine, self.model, ranks)
        self.dtype = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
        self.batches = TrainBatches(
            self.task, config.data.batch_size, config.seed, ranks.rank, ranks.world_size,
            config.parallel.gradient_accumulation,
        )  # fmt: skip
        self.step, self.best, self.seconds = 0, -1.0, 0.0
        self.records: list[dict[str, Any]] = []
        seed_everything(config.seed + 1 + ranks.rank)  # dropout differs between ranks
        if config.resume:
            self._resume()

    # -- one step ---------------------------------------------------------------------------------------------------

    def train_step(self) -> dict[str, Tensor]:
        """One optimiser step. Returns this rank's mean task loss, Gram loss and accuracy as tensors."""
        sums: dict[str, Tensor] = {}
        for inputs, labels in self.batches.step(self.step):
            labels = labels.to(self.ranks.device)
            logits = logits_of(self.engine(**to_device(inputs, self.ranks.device, self.dtype)))
            task_loss = F.cross_entropy(logits.float(), labels)
            div_loss = sum(
                (layer.diversity_loss() for layer in self.layers.values()), torch.zeros_like(task_loss)
            )
            self.engine.backward(task_loss + self.config.optim.lambda_div * div_loss)
            self.engine.step()
            hits = (logits.argmax(-1) == labels).float().mean()
            for name, value in (("task_loss", task_loss), ("div_loss", div_loss), ("accuracy", hits)):
                part = value.detach().double() / self.config.parallel.gradient_accumulation
                sums[name] = sums[name] + part if name in sums else part
        self.step += 1
        return sums

    # -- the run ----------------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, Any]:
        """Train to the last step, select the best checkpoint by validation, test it, write summary and plots."""
        config = self.config
        bar = tqdm(
            total=config.steps, initial=self.step, desc=self.task.name, dynamic_ncols=True, mininterval=1.0,
            disable=not config.progress or self.ranks.rank != 0,
        )  # fmt: skip
        started = time.perf_counter()
        window: list[dict[str, Tensor]] = []
        self.model.train()
        while self.step < config.steps:
            window.append(self.train_step())
            bar.update()
            last = self.step == config.steps
            checked = last or self.step % config.eval_every == 0
            if checked or self.step % config.log_every == 0:
                bar.set_postfix_str(self._log_training(window))
                window = []
            if checked:
                seconds = self.seconds + time.perf_counter() - started
                self._validate_and_save(seconds)
        bar.close()
        self.seconds += time.perf_counter() - started
        return self._finish()

    def _log_training(self, window: list[dict[str, Tensor]]) -> str:
        names = ("task_loss", "div_loss", "accuracy")
        local = torch.stack([torch.stack([entry[n] for n in names]) for entry in window]).mean(0)
        means = dict(zip(names, (self.ranks.all_sum(local) / self.ranks.world_size).tolist(), strict=True))
        usage = collect_usage(self.model, self.ranks)
        loss = means["task_loss"] + self.config.optim.lambda_div * means["div_loss"]
        record = {
            "kind": "train",
            "step": self.step,
            "loss": loss,
            **means,
            "lr": self.schedule.get_last_lr()[0],
        }
        self._record(record, usage)
        text = f"loss {loss:.3f} acc {means['accuracy']:.3f}"
        if usage:
            c_b, k, alpha = (_mean(usage, n) for n in ("block_compute", "expert_count", "shared_demand"))
            loads = [
                sum(u.expert_load[e] for u in usage.values()) / len(usage) for e in range(len(_first(usage)))
            ]
            text += f" C_B {c_b:.2f} k {k:.2f} α {alpha:.2f} load " + "/".join(
                f"{100 * v:.0f}" for v in loads
            )
        return text

    def _validate_and_save(self, seconds: float) -> None:
        score = self._evaluate(self.task.validation)
        better = score.accuracy > self.best
        self.best = max(self.best, score.accuracy)
        record = {"kind": "validation", "step": self.step, "accuracy": score.accuracy, "best": self.best}
        self._record({**record, "per_environment": score.per_dataset}, score.usage)
        progress = {"step": self.step, "best": self.best, "seconds": seconds}
        saved = checkpoint.save(
            self.folder / "checkpoints", self.model, self.engine, self.ranks, progress, self.schedule
        )
        if self.ranks.rank == 0:
            if better:
                checkpoint.write_text(self.folder / "checkpoints" / "best", saved.name)
            checkpoint.prune(self.folder / "checkpoints")
        self.ranks.barrier()  # `best` must be in place before any rank reads it

    def _finish(self) -> dict[str, Any]:
        best = Path((self.folder / "checkpoints" / "best").read_text().strip())
        checkpoint.load_weights(self.folder / "checkpoints" / best, self.model)
        score = self._evaluate(self.task.test)
        summary = summarise(self.config, score, self.ranks.world_size, self.seconds)
        summary.update(steps=self.step, best_step=int(best.name.split("-")[1]), validation_accuracy=self.best)
        if self.config.baseline and self.config.data.task == "digits" and self.ranks.rank == 0:
            from unifmoe_dist.data.digits import linear_baseline

            summary["linear_baseline_accuracy"] = linear_baseline(self.task)
        if self.ranks.rank == 0:
            from unifmoe_dist.analysis.training_plots import plot_run

            checkpoint.write_text(self.folder / "summary.json", json.dumps(summary, indent=1))
            plot_run(self.folder)
        return summary

    def _evaluate(self, datasets: list) -> Score:
        return evaluate(self.model, self.task, datasets, self.config.data.eval_batch_size, self.ranks)

    # -- records and resuming ---------------------------------------------------------------------------------------

    def _record(self, record: dict[str, Any], usage: dict[str, UsageSummary]) -> None:
        """Append one line to metrics.jsonl and the same numbers to TensorBoard; rank 0 only."""
        if self.ranks.rank != 0:
            return
        with (self.folder / "metrics.jsonl").open("a") as handle:
            handle.write(json.dumps({**record, "layers": {n: asdict(u) for n, u in usage.items()}}) + "\n")
        events = [
            (f"{record['kind']}/{name}", value, self.step)
            for name, value in record.items()
            if isinstance(value, float)
        ]
        for layer, u in usage.items():
            for name in ("block_compute", "expert_count", "shared_demand", "dropped"):
                events.append((f"{record['kind']}/{layer}/{name}", getattr(u, name), self.step))
            events += [
                (f"{record['kind']}/{layer}/load/{e}", v, self.step) for e, v in enumerate(u.expert_load)
            ]
        self.engine.monitor.write_events(events)

    def _resume(self) -> None:
        folder = checkpoint.latest(self.folder)
        progress = checkpoint.load(folder, self.model, self.engine, self.ranks, self.schedule)
        self.step, self.best, self.seconds = progress["step"], progress["best"], progress["seconds"]
        metrics = self.folder / "metrics.jsonl"
        if self.ranks.rank == 0 and metrics.is_file():
            # Lines written after the checkpoint will be written again.
            lines = [line for line in metrics.read_text().splitlines() if _step_of(line) <= self.step]
            checkpoint.write_text(metrics, "".join(line + "\n" for line in lines))
        self.ranks.barrier()


def summarise(config: TrainConfig, score: Score, world_size: int, seconds: float) -> dict[str, Any]:
    """The numbers of summary.json that testing gives."""
    dense = float(config.model.num_blocks)
    return {
        "task": config.data.task,
        "held_out": config.data.held_out if config.data.task == "digits" else None,
        "moe": config.model.moe,
        "seed": config.seed,
        "test_accuracy": score.accuracy,
        "mean_block_compute": _mean(score.usage, "block_compute") if score.usage else dense,
        "mean_expert_count": _mean(score.usage, "expert_count") if score.usage else 0.0,
        "mean_shared_demand": _mean(score.usage, "shared_demand") if score.usage else None,
        "dropped_fraction": _mean(score.usage, "dropped") if score.usage else 0.0,
        "num_blocks": config.model.num_blocks,
        "world_size": world_size,
        "expert_parallel_size": config.parallel.expert_parallel_size,
        "wall_seconds": seconds,
    }


def _mean(usage: dict[str, UsageSummary], name: str) -> float:
    return sum(getattr(u, name) for u in usage.values()) / len(usage)


def _first(usage: dict[str, UsageSummary]) -> list[float]:
    return next(iter(usage.values())).expert_load


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return 2**62  # a line cut short by a crash
