"""Options of a whole training run."""

from __future__ import annotations

from dataclasses import field
from math import gcd
from typing import Literal, Self

from pydantic import model_validator

from unifmoe_dist.config.algorithms import AlgorithmConfig
from unifmoe_dist.config.checked import Count, CountOrNull, Seed, checked, checked_again
from unifmoe_dist.config.model import ModelConfig
from unifmoe_dist.config.parts import DataConfig, OptimConfig, ParallelConfig
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.registry import method_of


@checked()
class TrainConfig:
    """A whole training run.

    Args:
        output: Folder of the run, made if missing; null makes a new one under runs/.
        steps: Optimiser steps.
        epochs: Passes over the training data, in place of steps; evaluation then comes after each, in place of
            eval_every.
        patience: Evaluations in a row without improvement after which training stops; null never stops early.
        seed: Seed of Python, NumPy and torch on every rank.
        eval_every: Steps between evaluations; the best validation score selects the checkpoint.
        eval_at_start: Score the validation and test data before the first step too, as step 0 of metrics.jsonl.
        log_every: Steps between lines in metrics.jsonl and TensorBoard.
        keep_checkpoints: Newest checkpoints to keep, besides the best.
        resume: Continue from the last checkpoint in output, with that run's options unless others are given here. auto
            starts the run if there is none yet, so that one command line serves a job that is restarted.
        baseline: Also fit the linear classifier (digits) and report its accuracy beside the run's.
        progress: Show a progress bar on rank 0.
        model: What is trained.
        data: Which task is learned.
        algorithm: What is minimised besides the layers' own losses.
        optim: Optimiser, schedule and loss.
        parallel: How the job is spread over ranks.
    """

    output: str | None = None
    steps: Count = 800
    epochs: CountOrNull = None
    patience: CountOrNull = None
    seed: Seed = 0
    eval_every: Count = 100
    eval_at_start: bool = False
    log_every: Count = 10
    keep_checkpoints: Count = 2
    resume: bool | Literal["auto"] = False
    baseline: bool = True
    progress: bool = True
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        for name in ("steps", "eval_every"):  # a run in epochs leaves them at their defaults
            value = getattr(self, name)
            if self.epochs is not None and value != getattr(TrainConfig, name):
                raise UserError(
                    f"epochs {self.epochs} sets {name} by passes over the data, so {name} {value} contradicts it; "
                    f"leave {name} out, or set epochs null."
                )
        if self.output == "":  # as of a variable that is not set; it would be the folder in which the command runs
            raise UserError("output is empty; name a folder, or leave it out for a new one in runs.")
        if "\0" in (self.output or ""):  # a file of options may hold it
            raise UserError(f"output {self.output!r} holds a null character, which no folder's name can; leave it out.")
        if self.resume and self.output is None:
            raise UserError("--resume needs --output, the folder of the run to continue.")
        method, weight = method_of(self.model.moe), self.optim.auxiliary_weight
        if method.shared and weight is not None:
            raise UserError(
                f"optim.auxiliary_weight {weight} belongs to the other MoE layers; the loss of model.moe {method.name} "
                "is weighted by optim.lambda_div."
            )
        if self.parallel.cuda_graphs and not method.shared:
            raise UserError(
                f"parallel.cuda_graphs is of model.moe unif, not {method.name}, whose layers run eagerly; leave it out."
            )
        for option in find_task(self.data.task).ignored:
            group, name = option.split(".")
            options = getattr(self, group)
            if getattr(options, name) != getattr(type(options)(), name):
                raise UserError(
                    f"{option} would change nothing in data.task {self.data.task}; leave it out, or choose another "
                    "task."
                )
        return self

    def validate(self, world_size: int) -> None:
        """Refuse, with one sentence, what cannot work on `world_size` ranks. Cheap: touches no process group."""
        checked_again(self)
        size, micro = self.expert_parallel_size(world_size), world_size * self.parallel.gradient_accumulation
        if self.data.batch_size % micro:
            raise UserError(
                f"data.batch_size {self.data.batch_size} does not divide evenly over {world_size} ranks x "
                f"{self.parallel.gradient_accumulation} micro-batches; use a multiple of {micro}."
            )
        if world_size % size:
            raise UserError(
                f"parallel.expert_parallel_size {size} does not divide the world size {world_size}; "
                "choose one of its divisors."
            )
        name, slots = self._expert_slots()
        if method_of(self.model.moe).layer and slots % size:
            raise UserError(
                f"model.{name} {slots} is not divisible by parallel.expert_parallel_size {size}; change one of them."
            )
        if self.parallel.expert_placement == "balanced" and method_of(self.model.moe).layer and size in (1, slots):
            held, other = ("all", "larger") if size == 1 else ("one", "smaller")
            raise UserError(
                "parallel.expert_placement balanced moves experts between ranks that share them, but with "
                f"parallel.expert_parallel_size {size} each rank holds {held}; choose a {other} one, or near."
            )
        self.group_ranks_per_node(world_size)

    def expert_parallel_size(self, world_size: int) -> int:
        """Ranks that share one set of residual experts: what was asked for, or what auto means on so many ranks."""
        if self.parallel.expert_parallel_size != "auto":
            return self.parallel.expert_parallel_size
        return gcd(world_size, self._expert_slots()[1]) if method_of(self.model.moe).layer else 1

    def group_ranks_per_node(self, world_size: int) -> int | None:
        """Ranks of an expert-parallel group on each node by parallel.ranks_per_node; None where that is not given.

        Raises:
            UserError: nodes of so many ranks do not divide the job, or not its groups alike.
        """
        width, size = self.parallel.ranks_per_node, self.expert_parallel_size(world_size)
        if width is None:
            return None
        if world_size % width:
            raise UserError(
                f"parallel.ranks_per_node {width} does not divide the world size {world_size}; give the number of "
                "ranks that each node has."
            )
        if self.parallel.expert_placement != "far":
            inside = min(size, width)
            fits = size % inside == 0 and width % inside == 0
        else:
            stride = world_size // size  # of a group's ranks in the job
            inside = max(1, width // stride)
            fits = max(width, stride) % min(width, stride) == 0
        if not fits:
            raise UserError(
                f"parallel.ranks_per_node {width} leaves groups of parallel.expert_parallel_size {size} with different "
                "numbers of ranks on their nodes; choose a size that divides it, or a multiple of it."
            )
        return inside

    def _expert_slots(self) -> tuple[str, int]:
        """Experts that a layer has room for, and the option that says so."""
        if method_of(self.model.moe).grows:
            return "max_experts", self.model.most_experts()
        return "num_experts", self.model.num_experts
