"""One training run on a DeepSpeed engine, from configuration to summary.

L = L_algorithm + sum over layers of weight * auxiliary loss; for UniF-MoE that is lambda_div * L_div

L_algorithm is the task loss, or that of the training algorithm (algorithms).
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import Signals
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.task import Batch, TaskData
from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_layer import AppliedStep
from unifmoe_dist.profiling import profile_range
from unifmoe_dist.runtime import heartbeat
from unifmoe_dist.runtime.ranks import Ranks, seed_everything
from unifmoe_dist.runtime.signals import StopSignals
from unifmoe_dist.train import build, checkpoint, clipping, optimizer_state
from unifmoe_dist.train.announce import first_lines
from unifmoe_dist.train.batches import TrainBatches
from unifmoe_dist.train.changes import keep_options
from unifmoe_dist.train.cli import dump_train_config, load_train_config
from unifmoe_dist.train.epochs import check_epochs, in_steps, steps_per_epoch
from unifmoe_dist.train.evaluate import Score, collect_usage, evaluate, to_device
from unifmoe_dist.train.health import StepCheck, Verdict, locate, skip_update, unnoticed
from unifmoe_dist.train.own_model import keep_backbone
from unifmoe_dist.train.preflight import check_layers
from unifmoe_dist.train.progress import BAR, mean_over_layers, show_beside, training_numbers
from unifmoe_dist.train.run import agree, check_free, resumes, set_aside
from unifmoe_dist.train.selection import Selection
from unifmoe_dist.upcycling import moe_layers
from unifmoe_dist.usage import UsageSummary


def choose_folder(config: TrainConfig) -> Path:
    """The run's folder, made if it was named; refuses to write over another run.

    Raises:
        UserError: the folder holds a run and --resume was not given, or --resume was given and it holds none, or one
            that has gone beyond config.steps; the folder cannot be made.
    """
    if config.output is not None:
        folder = Path(config.output)
        try:
            if resumes(config.resume, folder):
                reached = checkpoint.load_progress(checkpoint.latest(folder))["step"]
                if config.epochs is None and config.steps < reached:  # with epochs, the data must be read first
                    raise UserError(
                        f"{folder} is at step {reached} already, beyond --steps {config.steps}; give a larger --steps, "
                        "or none to test the run again."
                    )
                _check_same_run(folder, config)
            else:
                _check_no_run(folder, config)
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output {folder} cannot be used ({error}); choose another folder.") from error
        return folder
    stem = f"runs/{config.data.task}-{'dense' if config.model.moe == 'none' else config.model.moe}"
    if config.algorithm.name != "erm":
        stem += f"-{config.algorithm.name}"
    number = 1
    while (folder := Path(stem if number == 1 else f"{stem}-{number}")).exists():
        number += 1
    return folder


def _check_no_run(folder: Path, config: TrainConfig) -> None:
    """Refuse a folder where a new run would write over something."""
    path = folder / "config.yaml"
    if path.exists() and config.resume != "auto":
        saved = checkpoint.complete(folder / "checkpoints")
        advice = "add --resume to continue it" if saved else "it has no checkpoint to resume, so delete it"
        raise UserError(f"{folder} already holds a run; {advice} or choose another --output.")
    check_free(folder)


_FIXED_IN_NUMBER = ("unif", "topk", "gmoe")
"""Methods whose layers have the experts that model.num_experts says, all along."""


def _check_same_run(folder: Path, config: TrainConfig) -> None:
    """Refuse options under which a run's weights would load but mean something else, or its scores would."""
    path = folder / "config.yaml"
    old = load_train_config(str(path)) if path.is_file() else config
    same_task = old.data.task == config.data.task  # otherwise environments are not to be compared

    def fixed(options: TrainConfig) -> dict[str, Any]:
        data = options.data
        return {
            "model.moe": options.model.moe,
            "model.num_experts": options.model.num_experts if options.model.moe in _FIXED_IN_NUMBER else None,
            "model.num_blocks": options.model.num_blocks,
            "model.top_k": options.model.top_k,
            "model.gate_temperature": options.model.gate_temperature if options.model.moe == "dynmoe" else None,
            "model.shared_demand": options.model.shared_demand,
            "model.fixed_experts": options.model.fixed_experts,
            "model.block_choice": options.model.block_choice,
            "model.backbone": options.model.backbone,
            "data.task": data.task,
            "data.held_out": build.held_out(options) if same_task else None,
            "data.split_seed": options.seed if data.split_seed is None else data.split_seed,
            "algorithm.name": options.algorithm.name,
            "optim.name": options.optim.name.removesuffix("w"),  # adam and adamw keep the same state
        }

    saved, given = fixed(old), fixed(config)
    for name, value in saved.items():
        if given[name] != value:
            if name == "data.split_seed" and config.data.split_seed is None and old.data.split_seed is None:
                name, given["seed"] = "seed", config.seed  # what was given; it also splits the data
            raise UserError(
                f"{folder} was trained with {name} {value}, so it cannot be resumed with {given[name]}; "
                "start another run in another --output."
            )


@dataclass(frozen=True)
class StepResult:
    """One training step.

    Args:
        sums: This rank's mean "loss", "task_loss", "div_loss" (the layers' auxiliary losses, not weighted) and
            "accuracy", as tensors.
        finite: Whether losses and gradients were finite on all ranks; otherwise the update was skipped.
        signal: Number of a stop signal that reached some rank, or 0.
    """

    sums: dict[str, Tensor]
    finite: bool
    signal: int


class TrainingModel(nn.Module):
    """The model (or algorithm) inside the engine, with a module that tells DeepSpeed that some experts are sharded."""

    def __init__(self, model: nn.Module, num_experts: int | None) -> None:
        super().__init__()
        self.model = model
        if num_experts is not None:
            self.expert_marker = _expert_marker(num_experts)

    def forward(self, *arguments: Any, **inputs: Any) -> Any:
        return self.model(*arguments, **inputs)


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
        task: The data; None takes what the configuration names.

    Raises:
        UserError: the model, the layers or the data do not fit together.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks, folder: Path, task: TaskData | None = None) -> None:
        import deepspeed

        self.ranks, self.folder = ranks, folder
        if config.parallel.precision == "fp16" and ranks.device.type == "cpu":
            raise UserError("parallel.precision fp16 needs a GPU; on the CPU use fp32 or bf16.")
        check_layers(config)
        seed_everything(config.seed)
        heartbeat.doing(f"reading the data of {config.data.task}")
        self.task: TaskData = build.build_task(config) if task is None else task
        self.epoch_steps = steps_per_epoch(config, self.task)
        given, config = config, in_steps(config, self.task)
        self.config = config
        heartbeat.doing("building the model")
        self.algorithm = build.build_algorithm(config, self.task, ranks)
        self.model = self.algorithm.model
        others = {f"extra.{name}": layer for name, layer in moe_layers(self.algorithm.extra).items()}
        self.layers = {**moe_layers(self.model), **others}
        build.mark_experts(self.algorithm, ranks)
        resuming = agree(config.resume, folder, ranks)
        if ranks.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            if not resuming:
                set_aside(folder, dump_train_config(given))
            keep_backbone(folder, given, self.model)
        ranks.barrier()
        heartbeat.doing("starting DeepSpeed")
        optimizer = build.build_optimizer(config, self.algorithm, ranks)
        sharded = config.model.num_experts if ranks.expert_group is not None and self.layers else None
        self.engine, _, _, self.schedule = deepspeed.initialize(
            model=TrainingModel(self.algorithm, sharded),
            optimizer=optimizer,
            lr_scheduler=build.build_schedule(config),
            config=build.deepspeed_config(
                config, folder, ranks.world_size, len(self.task.train), build.reduce_bucket(self.algorithm)
            ),
        )
        clipping.use_true_norm(self.engine, self.algorithm, ranks)
        self.dtype = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
        self.batches = TrainBatches(
            self.task,
            config.data.batch_size,
            config.seed,
            ranks.rank,
            ranks.world_size,
            config.parallel.gradient_accumulation,
            config.data.workers,
            config.data.sampling == "replacement",
        )
        self.step, self.seconds, self.selection = 0, 0.0, Selection()
        self.skipped, self.saved_step, self.latest = 0, -1, ""
        self.signals = StopSignals()
        self.check = StepCheck(self.engine, ranks, scaled=config.parallel.precision == "fp16")
        seed_everything(config.seed + 1 + ranks.rank)  # dropout differs between ranks
        if resuming:
            self._resume()
        if ranks.rank == 0:  # last: options with which a run cannot go on must not replace those it was made with
            if resuming:
                keep_options(folder, given)
            checkpoint.write_text(folder / "config.yaml", dump_train_config(given))

    # -- one step ---------------------------------------------------------------------------------------------------

    def train_step(self) -> StepResult:
        """One optimiser step over all ranks.

        Raises:
            UserError: a loss or gradient is not finite on some rank, and the run is to stop then.
        """
        sums: dict[str, Tensor] = {}
        verdict = Verdict(True, 0)
        usage = {layer: layer.usage.snapshot() for layer in self.layers.values()}
        for batch in self.batches.step(self.step):
            losses = self._losses(self.engine, batch)
            self.check.note(losses["loss"])
            self.engine.backward(losses["loss"])
            if self.engine.is_gradient_accumulation_boundary():
                verdict = self.check.agree(self.signals.received)
            if verdict.finite:
                with profile_range("optimizer"):
                    self.engine.step()
            else:
                self._refuse()
            for name, value in losses.items():
                part = value.detach().double() / self.config.parallel.gradient_accumulation
                sums[name] = sums[name] + part if name in sums else part
        self.step += 1
        if not verdict.finite:
            for layer, totals in usage.items():  # as if this batch had never been seen
                layer.usage.restore(totals)
        applied = verdict.finite and self.engine.was_step_applied()
        self.skipped += not applied
        if applied:
            self._after_step(batch)
        return StepResult(sums, verdict.finite, verdict.signal)

    def _losses(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """What one batch gives: "loss", which is minimised, its parts, and the accuracy.

        `model` is the algorithm, or the engine around it.
        """
        labels = batch[1].to(self.ranks.device)
        task_loss, logits = model(self._inputs(batch), labels, self.step)
        loss, div_loss = task_loss, torch.zeros_like(task_loss)
        for layer in self.layers.values():
            auxiliary = layer.auxiliary_loss()
            loss, div_loss = loss + layer.auxiliary_weight * auxiliary, div_loss + auxiliary
        hits = (logits.argmax(-1) == labels).float().mean()
        return {"loss": loss, "task_loss": task_loss, "div_loss": div_loss, "accuracy": hits}

    def _after_step(self, batch: Batch) -> None:
        """Let the layers change what their methods change between steps."""

        @torch.no_grad()
        def task_loss() -> float:
            with unnoticed(self.model, self.ranks.device):
                loss = self._losses(self.algorithm, batch)["task_loss"]
            return float(self.ranks.all_sum(loss)) / self.ranks.world_size

        step = AppliedStep(self.step, self.ranks.all_sum, task_loss, self.epoch_steps)
        for layer in self.layers.values():
            optimizer_state.take_over(self.engine, layer.after_step(step))

    def _inputs(self, batch: Batch) -> dict[str, Tensor]:
        return to_device(batch[0], self.ranks.device, self.dtype)

    def _refuse(self) -> None:
        """Do not apply a step that is not finite: name the place, then stop or drop the update; collective."""
        stop = self.config.optim.on_nonfinite == "stop"
        if not stop and self.skipped:  # the first skip has been explained
            return skip_update(self.engine)

        def loss_of(batch: Batch) -> Tensor:
            return self._losses(self.algorithm, batch)["loss"]

        place, in_weights = locate(self.algorithm, self.batches.step(self.step), loss_of, self.ranks, self._inputs)
        what = f"step {self.step + 1}: a loss or gradient is not finite; first seen on {place}"
        if stop or in_weights:  # a weight that is not finite stays so: no later step can be better
            saved = f"step {self.saved_step} is saved" if self.saved_step >= 0 else "no checkpoint has been written yet"
            raise UserError(
                f"{what}. The update was not applied and {saved}; lower optim.lr, look at the data of that step, or "
                "drop such updates with --optim.on_nonfinite skip."
            )
        if self.ranks.rank == 0:
            tqdm.write(f"warning: {what}. This update is skipped; further ones are counted in metrics.jsonl.")
        skip_update(self.engine)

    # -- the run ----------------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, Any] | None:
        """Train to the last step, select the best checkpoint by validation, test it, write summary and plots.

        Returns:
            The summary, or None after a stop signal: then the run is saved at its last step, to be resumed.
        """
        config = self.config
        shown = config.progress and self.ranks.rank == 0
        if shown:
            lines = first_lines(config, self.ranks, self.task, self.algorithm, self.folder, self.step)
            tqdm.write("\n".join(lines), file=sys.stderr)
            heartbeat.heard()
        heartbeat.doing(f"step {self.step + 1} of {config.steps}")
        bar = tqdm(  # disable=None: only on a terminal; a log file gets a line per evaluation instead
            total=config.steps,
            initial=self.step,
            desc=self.task.name,
            dynamic_ncols=True,
            mininterval=1.0,
            disable=None if shown else True,
            bar_format=BAR,
        )
        started = time.perf_counter()
        window: list[dict[str, Tensor]] = []
        self.algorithm.train()
        with self.signals:
            while self.step < config.steps and not self.selection.exhausted(config.patience):
                result = self.train_step()
                if result.finite:
                    window.append(result.sums)
                bar.update()
                heartbeat.doing(f"step {self.step} of {config.steps}{self.latest}")
                last = self.step == config.steps
                checked = last or self.step % config.eval_every == 0
                if checked or result.signal or self.step % config.log_every == 0:
                    numbers = self._log_training(window)
                    show_beside(bar, numbers)
                    window = []
                seconds = self.seconds + time.perf_counter() - started
                if checked:
                    self._validate_and_save(seconds)
                    if shown and bar.disable:
                        best = f"best {self.task.metric.name} {self.selection.score:.3f} at step {self.selection.step}"
                        print(f"step {self.step}/{config.steps}: {' '.join(numbers)}, {best}", flush=True)
                        heartbeat.heard()
                elif result.signal:
                    self._save(seconds, better=False)
                if result.signal:
                    bar.close()
                    self._say_saved(result.signal)
                    return None
        bar.close()
        self.batches.close()
        if self.step < config.steps and self.ranks.rank == 0:
            print(f"stopped at step {self.step}: {config.patience} evaluations in a row were no better", flush=True)
        self.seconds += time.perf_counter() - started
        if not self.selection.step:  # resumed at its last step, where a stop signal had saved it
            self._validate()
            self._name_best(f"step-{self.step:06d}")
        return self._finish()

    def _say_saved(self, signal: int) -> None:
        if self.ranks.rank == 0:
            print(f"saved at step {self.step} after {Signals(signal).name}; continue with --resume", flush=True)

    def _log_training(self, window: list[dict[str, Tensor]]) -> list[str]:
        if not window:
            return [f"{self.skipped} updates skipped"]
        names = list(window[0])
        local = torch.stack([torch.stack([entry[n] for n in names]) for entry in window]).mean(0)
        means = dict(zip(names, (self.ranks.all_sum(local) / self.ranks.world_size).tolist(), strict=True))
        usage = collect_usage(self.model, self.ranks)
        record = {
            "kind": "train",
            "step": self.step,
            **means,
            "lr": self.schedule.get_last_lr()[0],
            "skipped_steps": self.skipped,
        }
        self._record(record, usage)
        self.latest = f", loss {means['loss']:.3f}"
        return training_numbers(means, usage)

    def _validate_and_save(self, seconds: float) -> None:
        better = self._validate()
        self._save(seconds, better)

    def _validate(self) -> bool:
        """Score the validation data; whether that is the best so far."""
        heartbeat.doing(f"step {self.step} of {self.config.steps}, scoring the validation data")
        score = self._evaluate(self.task.validation)
        better = self.selection.offer(self.step, score.value, score.accuracy)
        record = {
            "kind": "validation",
            "step": self.step,
            "epoch": self.step / self.epoch_steps,
            "metric": score.metric,
            "accuracy": score.accuracy,
            score.metric: score.value,
            "best": self.selection.score,
            "evaluations_without_improvement": self.selection.waited,
        }
        self._record({**record, "per_environment": score.per_dataset}, score.usage)
        return better

    def _save(self, seconds: float, better: bool) -> None:
        progress = {
            "step": self.step,
            "epoch_steps": self.epoch_steps,
            "seconds": seconds,
            "skipped_steps": self.skipped,
            **self.selection.progress(),
        }
        heartbeat.doing(f"step {self.step} of {self.config.steps}, writing a checkpoint")
        folder = self.folder / "checkpoints"
        extra = self.algorithm.extra
        saved = checkpoint.save(folder, self.model, self.engine, self.ranks, progress, self.schedule, extra)
        self.saved_step = self.step
        if better:
            self._name_best(saved.name)
        if self.ranks.rank == 0:
            checkpoint.prune(folder, self.config.keep_checkpoints)
        self.ranks.barrier()

    def _name_best(self, name: str) -> None:
        if self.ranks.rank == 0:
            checkpoint.write_text(self.folder / "checkpoints" / "best", name)
        self.ranks.barrier()  # it must be in place before any rank reads it

    def _finish(self) -> dict[str, Any]:
        best = Path((self.folder / "checkpoints" / "best").read_text().strip())
        checkpoint.load_weights(self.folder / "checkpoints" / best, self.model)
        heartbeat.doing("scoring the test data with the best checkpoint")
        score = self._evaluate(self.task.test)
        summary = summarise(self.config, score)
        summary.update(
            world_size=self.ranks.world_size,
            wall_seconds=self.seconds,
            expert_parallel_size=self.config.expert_parallel_size(self.ranks.world_size),
        )
        summary.update(
            steps=self.step,
            epochs=self.step / self.epoch_steps,
            best_step=int(best.name.split("-")[1]),
            validation_score=self.selection.score,
            validation_accuracy=self.selection.accuracy,
        )
        summary["skipped_steps"] = self.skipped
        if self.config.baseline and self.config.data.task == "digits" and self.ranks.rank == 0:
            from unifmoe_dist.data.digits import linear_baseline

            summary["linear_baseline_accuracy"] = linear_baseline(self.task)
        if self.ranks.rank == 0:
            checkpoint.write_text(self.folder / "summary.json", json.dumps(summary, indent=1))
            self._plot()
        return summary

    def _plot(self) -> None:
        """Draw the run's plots; a run that has finished does not fail for want of them."""
        try:
            from unifmoe_dist.studies.training_plots import plot_run

            plot_run(self.folder)
        except Exception as error:  # a backend of matplotlib, fonts, the disk
            why = " ".join(str(error).split())
            tqdm.write(f"warning: the plots could not be drawn ({why}); everything else is saved", file=sys.stderr)

    def _evaluate(self, datasets: list) -> Score:
        data = self.config.data
        return evaluate(self.model, self.task, datasets, data.eval_batch_size, self.ranks, data.workers)

    # -- records and resuming ---------------------------------------------------------------------------------------

    def _record(self, record: dict[str, Any], usage: dict[str, UsageSummary]) -> None:
        """Append one line to metrics.jsonl and the same numbers to TensorBoard; rank 0 only."""
        if self.ranks.rank != 0:
            return
        with (self.folder / "metrics.jsonl").open("a") as handle:
            handle.write(json.dumps({**record, "layers": {n: asdict(u) for n, u in usage.items()}}) + "\n")
        events = [
            (f"{record['kind']}/{name}", value, self.step) for name, value in record.items() if isinstance(value, float)
        ]
        for layer, u in usage.items():
            for name in ("block_compute", "expert_count", "shared_demand", "dropped"):
                events.append((f"{record['kind']}/{layer}/{name}", getattr(u, name), self.step))
            events += [(f"{record['kind']}/{layer}/load/{e}", v, self.step) for e, v in enumerate(u.expert_load)]
        self.engine.monitor.write_events(events)

    def _resume(self) -> None:
        folder = checkpoint.latest(self.folder)
        extra = self.algorithm.extra
        progress = checkpoint.load(folder, self.model, self.engine, self.ranks, self.schedule, extra)
        check_epochs(self.config, self.epoch_steps, progress)
        self.step, self.seconds, self.skipped = progress["step"], progress["seconds"], progress["skipped_steps"]
        self.saved_step, self.selection = self.step, Selection.from_progress(progress)
        best = folder.parent / f"step-{self.selection.step:06d}"
        if not best.is_dir():  # nothing was validated yet, or the run was taken back to before its best
            self.selection = Selection()
        self.ranks.barrier()
        if self.ranks.rank == 0:
            # The run may have been killed before it could name its last checkpoint, or its best.
            checkpoint.write_text(folder.parent / "latest", folder.name)
            if self.selection.step:
                checkpoint.write_text(folder.parent / "best", best.name)
            checkpoint.prune(folder.parent, self.config.keep_checkpoints)
        metrics = self.folder / "metrics.jsonl"
        if self.ranks.rank == 0 and metrics.is_file():
            # Lines written after the checkpoint will be written again.
            lines = [line for line in metrics.read_text().splitlines() if _step_of(line) <= self.step]
            checkpoint.write_text(metrics, "".join(line + "\n" for line in lines))
        self.ranks.barrier()


def summarise(config: TrainConfig, score: Score) -> dict[str, Any]:
    """What was scored and how it did: the part of summary.json that testing gives."""
    dense = float(config.model.num_blocks)
    return {
        "task": config.data.task,
        "held_out": build.held_out(config),
        "moe": config.model.moe,
        "algorithm": config.algorithm.name,
        "seed": config.seed,
        "lr": config.optim.lr,
        "metric": score.metric,
        "score": score.value,
        "test_accuracy": score.accuracy,
        "mean_block_compute": mean_over_layers(score.usage, "block_compute") if score.usage else dense,
        "mean_expert_count": mean_over_layers(score.usage, "expert_count") if score.usage else 0.0,
        "mean_shared_demand": mean_over_layers(score.usage, "shared_demand") if score.usage else None,
        "dropped_fraction": mean_over_layers(score.usage, "dropped") if score.usage else 0.0,
        "num_blocks": config.model.num_blocks,
    }


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError):
        return 2**62  # a line cut short by a crash
