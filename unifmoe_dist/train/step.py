"""One optimiser step of a training algorithm on a DeepSpeed engine.

L = L_algorithm + sum over layers of weight * auxiliary loss; for UniF-MoE that is lambda_div * L_div

L_algorithm is the task loss, or that of the training algorithm (algorithms).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unifmoe_dist.algorithms import Algorithm
from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.task import Batch
from unifmoe_dist.expert_layer import AppliedStep
from unifmoe_dist.kernels import takes_triton
from unifmoe_dist.profiling import profile_range
from unifmoe_dist.runtime.ranks import Ranks
from unifmoe_dist.train import build, deepspeed
from unifmoe_dist.train.health import StepCheck, Verdict, unnoticed
from unifmoe_dist.train.nested import to_device
from unifmoe_dist.upcycling import moe_layers
from unifmoe_dist.warming import tokens_reaching, warm_up


@dataclass(frozen=True)
class StepResult:
    """One training step.

    Args:
        sums: This rank's mean "loss", "task_loss", "div_loss" (the layers' auxiliary losses, not weighted) and
            "accuracy", as tensors.
        finite: Whether losses and gradients were finite on all ranks; otherwise the update was skipped.
        applied: Whether the weights were updated: not if fp16's gradients overflowed either.
        signal: Number of a stop signal that reached some rank, or 0.
    """

    sums: dict[str, Tensor]
    finite: bool
    applied: bool
    signal: int


class TrainingStep:
    """A training algorithm on an engine of its own, and the step that trains it.

    The configuration is in steps, of which one pass over the data has `epoch_steps`. `folder` gets TensorBoard's
    events; None writes none.
    """

    def __init__(
        self,
        config: TrainConfig,
        algorithm: Algorithm,
        ranks: Ranks,
        environments: int = 1,
        epoch_steps: int = 1,
        folder: Path | None = None,
    ) -> None:
        self.algorithm, self.ranks, self.epoch_steps = algorithm, ranks, epoch_steps
        others = {f"extra.{name}": layer for name, layer in moe_layers(algorithm.extra).items()}
        self.layers = {**moe_layers(algorithm.model), **others}
        optimizer, schedule = build.build_optimizer(config, algorithm), build.build_schedule(config)
        self.engine = deepspeed.start(config, algorithm, ranks, optimizer, schedule, environments, folder)
        self.dtype = next(p.dtype for p in algorithm.model.parameters() if p.is_floating_point())
        self._micro_batches = config.parallel.gradient_accumulation
        self._check = StepCheck(self.engine, ranks, scaled=config.parallel.precision == "fp16")

    def __call__(
        self,
        batches: Iterable[Batch],
        number: int,
        refuse: Callable[[], None] | None = None,
        signal: Callable[[], int] = lambda: 0,
        fetch: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """One optimiser step over all ranks; collective.

        Args:
            batches: This rank's micro-batches.
            number: Steps done before this one.
            refuse: Called instead of the update where the step is not finite, collective; None drops the update.
            signal: Number of a stop signal that has reached this rank, or 0.
            fetch: Called when the device has all the work on a batch and the host has not waited for it: the time to
                start the next one on its way.
        """
        sums: dict[str, Tensor] = {}
        verdict = Verdict(True, 0)
        usage = {layer: layer.usage.snapshot() for layer in self.layers.values()}
        for batch in batches:
            losses = self.losses(self.engine, batch, number)
            self._check.note(losses["loss"])
            self.engine.backward(losses["loss"])
            fetch()
            if self.engine.is_gradient_accumulation_boundary():
                verdict = self._check.agree(signal())
            if verdict.finite:
                with profile_range("optimizer"):
                    self.engine.step()
            elif refuse is not None:
                refuse()
            else:
                deepspeed.skip_update(self.engine)
            for name, value in losses.items():
                part = value.detach().double() / self._micro_batches
                sums[name] = sums[name] + part if name in sums else part
        if not verdict.finite:
            for layer, totals in usage.items():  # as if this batch had never been seen
                layer.usage.restore(totals)
        applied = verdict.finite and self.engine.was_step_applied()
        if applied:
            self.after_step(batch, number + 1)
        return StepResult(sums, verdict.finite, applied, verdict.signal)

    def losses(self, model: Any, batch: Batch, number: int) -> dict[str, Tensor]:
        """What one batch gives: "loss", which is minimised, its parts, and the accuracy.

        `model` is the algorithm, or the engine around it; `number` of steps are done.
        """
        labels = batch[1].to(self.ranks.device)
        task_loss, logits = model(self.inputs(batch), labels, number)
        loss, div_loss = task_loss, torch.zeros_like(task_loss)
        for layer in self.layers.values():
            auxiliary = layer.auxiliary_loss()
            loss, div_loss = loss + layer.auxiliary_weight * auxiliary, div_loss + auxiliary
        hits = (logits.argmax(-1) == labels).float().mean()
        return {"loss": loss, "task_loss": task_loss, "div_loss": div_loss, "accuracy": hits}

    def inputs(self, batch: Batch) -> dict[str, Tensor]:
        """What the model takes of a batch."""
        return to_device(batch[0], self.ranks.device, self.dtype)

    def warm_up(self, sample: Callable[[], Batch]) -> None:
        """Make the kernels ready for micro-batches like `sample()`, where there are any to make; collective."""
        if takes_triton(self.ranks.device):
            model, inputs = self.algorithm.model, self.inputs(sample())
            warm_up(self.algorithm, *tokens_reaching(model, lambda: model(**inputs)))

    def after_step(self, batch: Batch, number: int) -> None:
        """Let the layers change what their methods change between steps, of which `number` are done."""

        @torch.no_grad()
        def task_loss() -> float:
            with unnoticed(self.algorithm.model, self.ranks.device):
                loss = self.losses(self.algorithm, batch, number)["task_loss"]
            return float(self.ranks.all_sum(loss)) / self.ranks.world_size

        step = AppliedStep(number, self.ranks.all_sum, task_loss, self.epoch_steps)
        for layer in self.layers.values():
            deepspeed.take_over(self.engine, layer.after_step(step))
