"""One training run, from configuration to summary."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from signal import Signals
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.data.task import Batch, TaskData
from unifmoe_dist.errors import UserError
from unifmoe_dist.files import write_text
from unifmoe_dist.runtime import heartbeat
from unifmoe_dist.runtime.ranks import Ranks, seed_everything
from unifmoe_dist.runtime.signals import StopSignals
from unifmoe_dist.train import build, checkpoint, deepspeed
from unifmoe_dist.train.balancing import Balance
from unifmoe_dist.train.batches import TrainBatches
from unifmoe_dist.train.cli import dump_train_config
from unifmoe_dist.train.evaluate import Score, collect_usage, evaluate
from unifmoe_dist.train.feed import TrainFeed
from unifmoe_dist.train.folder import keep_options
from unifmoe_dist.train.health import locate
from unifmoe_dist.train.length import Selection, check_epochs, in_steps, steps_per_epoch
from unifmoe_dist.train.own_model import keep_backbone
from unifmoe_dist.train.run import agree, set_aside
from unifmoe_dist.train.step import StepResult, TrainingStep
from unifmoe_dist.train.words import BAR, first_lines, mean_over_layers, show_beside, training_numbers
from unifmoe_dist.usage import UsageSummary


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
        self.ranks, self.folder = ranks, folder
        if config.parallel.precision == "fp16" and ranks.device.type == "cpu":
            raise UserError("parallel.precision fp16 needs a GPU; on the CPU use fp32 or bf16.")
        build.check_layers(config)
        seed_everything(config.seed)
        heartbeat.doing(f"reading the data of {config.data.task}")
        self.task: TaskData = build.build_task(config) if task is None else task
        self.epoch_steps = steps_per_epoch(config, self.task)
        given, config = config, in_steps(config, self.task)
        self.config = config
        heartbeat.doing("building the model")
        self.algorithm = build.build_algorithm(config, self.task, ranks)
        self.model = self.algorithm.model
        resuming = agree(config.resume, folder, ranks)
        options = ""
        if ranks.rank == 0:
            options = dump_train_config(given)
            folder.mkdir(parents=True, exist_ok=True)
            if not resuming:
                set_aside(folder, options)
            keep_backbone(folder, given, self.model)
        ranks.barrier()
        heartbeat.doing("starting DeepSpeed")
        self._one_step = TrainingStep(config, self.algorithm, ranks, len(self.task.train), self.epoch_steps, folder)
        self.engine, self.layers = self._one_step.engine, self._one_step.layers
        self.schedule = self.engine.lr_scheduler
        self.balance = Balance(self.layers if config.parallel.expert_placement == "balanced" else {}, ranks)
        batches = TrainBatches(
            self.task,
            config.data.batch_size,
            config.seed,
            ranks.rank,
            ranks.world_size,
            config.parallel.gradient_accumulation,
            config.data.workers,
            config.data.sampling == "replacement",
            pin=ranks.device.type == "cuda",
        )
        self.batches = TrainFeed(batches, ranks.device)
        self.step, self.seconds, self.selection = 0, 0.0, Selection(metric=self.task.metric)
        self.skipped, self.saved_step, self.latest = 0, -1, ""
        self.dropped: float | None = None
        self.signals = StopSignals()
        seed_everything(config.seed + 1 + ranks.rank)  # dropout differs between ranks
        if resuming:
            self._resume()
        heartbeat.doing("making kernels ready")
        self._one_step.warm_up(lambda: batches.sample(self.step))
        if ranks.rank == 0:  # last: options with which a run cannot go on must not replace those it was made with
            if resuming:
                keep_options(folder, given)
            write_text(folder / "config.yaml", options)

    # -- one step ---------------------------------------------------------------------------------------------------

    def train_step(self) -> StepResult:
        """One optimiser step over all ranks.

        Raises:
            UserError: a loss or gradient is not finite on some rank, and the run is to stop then.
        """
        result = self._one_step(
            self.batches.step(self.step),
            self.step,
            self._refuse,
            signal=lambda: self.signals.received,
            fetch=self.batches.fetch,
        )
        self.step += 1
        self.skipped += not result.applied
        return result

    def _refuse(self) -> None:
        """Do not apply a step that is not finite: name the place, then stop or drop the update; collective."""
        stop = self.config.optim.on_nonfinite == "stop"
        if not stop and self.skipped:  # the first skip has been explained
            return deepspeed.skip_update(self.engine)

        def loss_of(batch: Batch) -> Tensor:
            return self._one_step.losses(self.algorithm, batch, self.step)["loss"]

        batches = self.batches.step(self.step)
        place, in_weights = locate(self.algorithm, batches, loss_of, self.ranks, self._one_step.inputs)
        what = f"step {self.step + 1}: a loss or gradient is not finite; first seen on {place}"
        if stop or in_weights:  # a weight that is not finite stays so: no later step can be better
            saved = f"step {self.saved_step} is saved" if self.saved_step >= 0 else "no checkpoint has been written yet"
            raise UserError(
                f"{what}. The update was not applied and {saved}; lower optim.lr, look at the data of that step, or "
                "drop such updates with --optim.on_nonfinite skip."
            )
        if self.ranks.rank == 0:
            tqdm.write(f"warning: {what}. This update is skipped; further ones are counted in metrics.jsonl.")
        deepspeed.skip_update(self.engine)

    # -- the run ----------------------------------------------------------------------------------------------------

    def fit(self) -> dict[str, Any] | None:
        """Train to the last step, select the best checkpoint by validation, test it and write the summary.

        Returns:
            The summary, or None after a stop signal: then the run is saved at its last step, to be resumed.
        """
        config = self.config
        shown = config.progress and self.ranks.rank == 0
        bar = self._begin(shown)
        if config.eval_at_start and self.step == 0:
            self._score_at_start()
        started = logged = time.perf_counter()
        window: list[dict[str, Tensor]] = []
        self.algorithm.train()
        with self.signals:
            while self.step < config.steps and not self.selection.exhausted(config.patience):
                result = self.train_step()
                if result.finite:
                    window.append(result.sums)
                bar.update()
                heartbeat.doing(f"step {self.step} of {config.steps}{self.latest}")
                checked = self.step == config.steps or self.step % config.eval_every == 0
                if checked or result.signal or self.step % config.log_every == 0:
                    numbers = self._log_training(window, time.perf_counter() - logged)
                    show_beside(bar, numbers)
                    window = []
                seconds = self.seconds + time.perf_counter() - started
                if checked:
                    self._save(seconds, self._validate(), last=bool(result.signal) or self.step == config.steps)
                    if shown and bar.disable:
                        best = f"best {self.task.metric.name} {self.selection.score:.3f} at step {self.selection.step}"
                        print(f"step {self.step}/{config.steps}: {' '.join(numbers)}, {best}", flush=True)
                        heartbeat.heard()
                elif result.signal:
                    self._save(seconds, better=False, last=True)
                if not window:  # evaluations and checkpoints are no part of the speed of training
                    logged = time.perf_counter()
                if result.signal:
                    bar.close()
                    if self.ranks.rank == 0:
                        name = Signals(result.signal).name
                        print(f"saved at step {self.step} after {name}; continue with --resume", flush=True)
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

    def _begin(self, shown: bool) -> tqdm:
        """Say what is trained, and make the bar."""
        config = self.config
        if shown:
            lines = first_lines(config, self.ranks, self.task, self.algorithm, self.folder, self.step)
            tqdm.write("\n".join(lines), file=sys.stderr)
            heartbeat.heard()
        heartbeat.doing(f"step {self.step + 1} of {config.steps}")
        return tqdm(  # disable=None: only on a terminal; a log file gets a line per evaluation instead
            total=config.steps,
            initial=self.step,
            desc=self.task.name,
            dynamic_ncols=True,
            mininterval=1.0,
            disable=None if shown else True,
            bar_format=BAR,
        )

    def _score_at_start(self) -> None:
        """Record what the model scores before it is trained."""
        for kind, datasets in (("validation", self.task.validation), ("test", self.task.test)):
            heartbeat.doing(f"scoring the {kind} data before the first step")
            score = self._evaluate(datasets)
            scores = {"metric": score.metric, "accuracy": score.accuracy, score.metric: score.value}
            self._record({"kind": kind, "step": 0, **scores, **self._by_name(score, kind)}, score.usage)

    def _by_name(self, score: Score, kind: str) -> dict[str, Any]:
        """The score of each domain, of a task that has some, or of each environment in order."""
        if names := self.task.domains.get(kind):
            return {"per_domain": dict(zip(names, score.per_dataset, strict=True))}
        return {"per_environment": score.per_dataset}

    def _log_training(self, window: list[dict[str, Tensor]], seconds: float) -> list[str]:
        """Record the means of the steps of a window, which took so many seconds; numbers for the bar."""
        if not window:
            return [f"{self.skipped} updates skipped"]
        names = list(window[0])
        local = torch.stack([torch.stack([entry[n] for n in names]) for entry in window]).mean(0)
        means = dict(zip(names, (self.ranks.all_sum(local) / self.ranks.world_size).tolist(), strict=True))
        if self.task.tokens:
            batch = self.config.data.batch_size * len(self.task.train)
            means["tokens_per_second"] = len(window) * batch * self.task.tokens / seconds
        usage = collect_usage(self.model, self.ranks)
        self.dropped = mean_over_layers(usage, "dropped") if usage else 0.0
        kind = {"kind": "train", "step": self.step}
        self._record({**kind, **means, "lr": self.schedule.get_last_lr()[0], "skipped_steps": self.skipped}, usage)
        self.latest = f", loss {means['loss']:.3f}"
        return training_numbers(means, usage)

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
        self._record({**record, **self._by_name(score, "validation")}, score.usage)
        return better

    def _save(self, seconds: float, better: bool, last: bool = False) -> None:
        """Write a checkpoint, then have experts lie anew for the steps that follow, unless it is the last."""
        heartbeat.doing(f"step {self.step} of {self.config.steps}, writing a checkpoint")
        if busiest := self.balance.choose():
            self._record({"kind": "busiest_rank", "step": self.step, **busiest}, {})
        progress = {
            "step": self.step,
            "epoch_steps": self.epoch_steps,
            "seconds": seconds,
            "skipped_steps": self.skipped,
            **self.selection.progress(),
            **self.balance.progress(),
        }
        folder, extra = self.folder / "checkpoints", self.algorithm.extra
        saved = checkpoint.save(folder, self.model, self.engine, self.ranks, progress, self.schedule, extra)
        self.saved_step = self.step
        if better:
            self._name_best(saved.name)
        if self.ranks.rank == 0:
            checkpoint.prune(folder, self.config.keep_checkpoints)
        self.ranks.barrier()
        if self.balance.moves and not last:
            self.balance.lay_out(f"step {self.step}/{self.config.steps}")
            checkpoint.load(saved, self.model, self.engine, self.ranks, self.schedule, extra)

    def _name_best(self, name: str) -> None:
        if self.ranks.rank == 0:
            write_text(self.folder / "checkpoints" / "best", name)
        self.ranks.barrier()  # it must be in place before any rank reads it

    def _finish(self) -> dict[str, Any]:
        best = Path((self.folder / "checkpoints" / "best").read_text().strip())
        checkpoint.load_weights(self.folder / "checkpoints" / best, self.model)
        heartbeat.doing("scoring the test data with the best checkpoint")
        score = self._evaluate(self.task.test)
        summary = {
            **summarise(self.config, score),
            "dropped_fraction": self.dropped,  # by the limit of capacity, in the steps last logged; testing has none
            **({"per_domain": self._by_name(score, "test")["per_domain"]} if self.task.domains else {}),
            "world_size": self.ranks.world_size,
            "wall_seconds": self.seconds,
            "expert_parallel_size": self.config.expert_parallel_size(self.ranks.world_size),
            "steps": self.step,
            "epochs": self.step / self.epoch_steps,
            "best_step": int(best.name.split("-")[1]),
            "validation_score": self.selection.score,
            "validation_accuracy": self.selection.accuracy,
            "skipped_steps": self.skipped,
        }
        if self.config.baseline and self.task.linear_baseline is not None and self.ranks.rank == 0:
            summary["linear_baseline_accuracy"] = self.task.linear_baseline(self.task)
        if self.ranks.rank == 0:
            write_text(self.folder / "summary.json", json.dumps(summary, indent=1))
        return summary

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
        parts = record.get("per_domain", {}).items()
        events += [(f"{record['kind']}/{record.get('metric')}/{name}", value, self.step) for name, value in parts]
        for layer, u in usage.items():
            for name in ("block_compute", "expert_count", "shared_demand", "dropped"):
                events.append((f"{record['kind']}/{layer}/{name}", getattr(u, name), self.step))
            events += [(f"{record['kind']}/{layer}/load/{e}", v, self.step) for e, v in enumerate(u.expert_load)]
        self.engine.monitor.write_events(events)

    def _resume(self) -> None:
        folder, extra = checkpoint.latest(self.folder), self.algorithm.extra
        self.balance.resume(checkpoint.load_progress(folder))
        progress = checkpoint.load(folder, self.model, self.engine, self.ranks, self.schedule, extra)
        check_epochs(self.config, self.epoch_steps, progress)
        self.step, self.seconds, self.skipped = progress["step"], progress["seconds"], progress["skipped_steps"]
        self.saved_step, self.selection = self.step, Selection.from_progress(progress, self.task.metric)
        best = folder.parent / f"step-{self.selection.step:06d}"
        if not best.is_dir():  # nothing was validated yet, or the run was taken back to before its best
            self.selection = Selection(metric=self.task.metric)
        self.ranks.barrier()
        if self.ranks.rank == 0:
            # The run may have been killed before it could name its last checkpoint, or its best.
            write_text(folder.parent / "latest", folder.name)
            if self.selection.step:
                write_text(folder.parent / "best", best.name)
            checkpoint.prune(folder.parent, self.config.keep_checkpoints)
            metrics = self.folder / "metrics.jsonl"
            if metrics.is_file():  # lines written after the checkpoint will be written again
                lines = metrics.read_text(errors="replace").splitlines()
                write_text(metrics, "".join(f"{line}\n" for line in lines if _step_of(line) <= self.step))
        self.ranks.barrier()


def summarise(config: TrainConfig, score: Score) -> dict[str, Any]:
    """What was scored and how it did: the part of summary.json that testing gives."""

    def mean(name: str, of_dense: float | None) -> float | None:
        return mean_over_layers(score.usage, name) if score.usage else of_dense

    return {
        "task": config.data.task,
        "held_out": find_task(config.data.task).held_out(config),
        "moe": config.model.moe,
        "algorithm": config.algorithm.name,
        "seed": config.seed,
        "lr": config.optim.lr,
        "metric": score.metric,
        "score": score.value,
        "test_accuracy": score.accuracy,
        "mean_block_compute": mean("block_compute", float(config.model.num_blocks)),
        "mean_expert_count": mean("expert_count", 0.0),
        "mean_shared_demand": mean("shared_demand", None),
        "dropped_fraction": mean("dropped", 0.0),
        "num_blocks": config.model.num_blocks,
    }


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 2**62  # a line cut short by a crash
