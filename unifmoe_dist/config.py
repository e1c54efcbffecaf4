"""Typed configuration of one UniF-MoE layer and of a training run, in one place.

Every field is validated when the object is made, so a bad value is refused before any process group exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import Any, Literal, Self, TypeAlias

from unifmoe_dist.algorithms.registry import REGISTRY as ALGORITHMS
from unifmoe_dist.data.registry import TASKS, find_task
from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.options import check_options
from unifmoe_dist.methods.registry import REGISTRY, method_of

ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared", "silu", "tanh", "identity")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def _check_capacity_factor(name: str, value: float | None) -> None:
    _check(
        value is None or isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf"),
        f"{name} must be a number above 0, such as 1.25, or null to drop nothing, not {value!r}.",
    )


def _check_rate(name: str, rate: float) -> None:
    _check(
        isinstance(rate, (int, float)) and not isinstance(rate, bool) and 0 <= rate < 1,
        f"{name} must be at least 0 and below 1, not {rate!r}.",
    )


def _check_policies(
    prefix: str, num_experts: int, shared_demand: float | None, fixed_experts: int | None, block_choice: str
) -> None:
    """Refuse what the router's policies cannot be."""
    _check(
        shared_demand is None or type(shared_demand) in (int, float) and 0 < shared_demand < 1,
        f"{prefix}shared_demand must be a number between 0 and 1, such as 0.4, or null to adapt it to the token, not "
        f"{shared_demand!r}.",
    )
    _check(
        fixed_experts is None or type(fixed_experts) is int and 1 <= fixed_experts <= num_experts,
        f"{prefix}fixed_experts must be a whole number from 1 to num_experts {num_experts}, or null to adapt it to the "
        f"token, not {fixed_experts!r}.",
    )
    _check(
        block_choice in ("prototype", "prefix"),
        f"{prefix}block_choice must be prototype or prefix, not {block_choice!r}.",
    )


@dataclass(frozen=True)
class ExpertLayerConfig:
    """Shape of a layer of experts that takes the place of a dense FFN.

    Args:
        model_dim: Token width d.
        hidden_dim: Hidden width H of the dense FFN.
        num_experts: Number K of (residual) experts.
        num_blocks: Number B of equal parts of a dense FFN in which the cost of a token is counted.
        activation: Activation between the two projections, by name.
        bias: Whether the projections have biases.
        hidden_dropout: Rate at which activated channels of executed experts are dropped in training, before the second
            projection.
    """

    model_dim: int
    hidden_dim: int
    num_experts: int = 6
    num_blocks: int = 8
    activation: str = "gelu"
    bias: bool = True
    hidden_dropout: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("model_dim", "hidden_dim", "num_experts", "num_blocks"):
            value = getattr(self, name)
            _check(
                isinstance(value, int) and not isinstance(value, bool) and value >= 1,
                f"{name} must be a whole number of at least 1, not {value!r}.",
            )
        _check(
            self.activation in ACTIVATIONS,
            f"activation {self.activation!r} is not known; choose one of {', '.join(ACTIVATIONS)}.",
        )
        _check_rate("hidden_dropout", self.hidden_dropout)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """From the shape of a dense FFN and the options of a method, by the names of `ModelConfig`; None is not given.

        The same names here unless a subclass says otherwise.
        """
        return cls(**options)

    @classmethod
    def run_options(cls, steps: int, recipe: Any) -> Mapping[str, Any]:
        """Options that follow from a run's steps and the training recipe of its task, where the user sets none."""
        return {}

    @classmethod
    def former_options(cls, expansion_steps: int | None) -> Mapping[str, Any]:
        """What layers of earlier versions did where an option that they did not know has another default by now.

        Args:
            expansion_steps: Of mass; None where it is not known.
        """
        return {}


@dataclass(frozen=True)
class UniFMoEConfig(ExpertLayerConfig):
    """Shape of one UniF-MoE layer; hidden_dim is the hidden width of every expert.

    Args:
        num_experts: Number K of residual experts; the shared expert comes on top.
        num_blocks: Number B of aligned blocks per expert; must divide hidden_dim and be at least 2.
        capacity_factor: Largest load of an expert, as a multiple of the mean load of a rank's tokens; the weakest
            assignments beyond it are dropped. None drops nothing.
        shared_demand: Fixed alpha, an ablation; b is round(B alpha). None adapts it to the token.
        fixed_experts: Fixed number k of residual experts per token, an ablation. None adapts it to the token.
        block_choice: How shared blocks are chosen: by prototype, or the first ones (prefix, an ablation).
    """

    capacity_factor: float | None = None
    shared_demand: float | None = None
    fixed_experts: int | None = None
    block_choice: Literal["prototype", "prefix"] = "prototype"

    def __post_init__(self) -> None:
        _check(
            isinstance(self.num_blocks, int) and self.num_blocks >= 2,
            f"num_blocks must be a whole number of at least 2, not {self.num_blocks!r}: with fewer, "
            "no block is left to share or to route.",
        )
        super().__post_init__()
        _check(
            self.hidden_dim % self.num_blocks == 0,
            f"hidden_dim {self.hidden_dim} is not divisible by num_blocks {self.num_blocks}; "
            f"choose a num_blocks that divides {self.hidden_dim}.",
        )
        _check(
            self.num_experts + 1 <= self.model_dim,
            f"num_experts {self.num_experts} needs num_experts + 1 orthonormal router columns of width model_dim "
            f"{self.model_dim}; use at most {self.model_dim - 1} experts.",
        )
        _check_capacity_factor("capacity_factor", self.capacity_factor)
        _check_policies("", self.num_experts, self.shared_demand, self.fixed_experts, self.block_choice)

    @property
    def block_dim(self) -> int:
        """Hidden channels M = H / B in one block."""
        return self.hidden_dim // self.num_blocks


MoEName: TypeAlias = Literal[tuple(REGISTRY)]  # type: ignore[valid-type]
AlgorithmName: TypeAlias = Literal[tuple(ALGORITHMS)]  # type: ignore[valid-type]


@dataclass
class ModelConfig:
    """What is trained.

    Args:
        backbone: Name of the dense model, in timm or on the Hugging Face hub; null takes the task's own.
        pretrained: Folder or file of the backbone's weights, or none for random ones; null takes those that the task
            names.
        dropout: Dropout throughout the backbone: of embeddings and of the outputs of attention and FFNs.
        hidden_dropout: Dropout of the hidden channels of the MoE layers' experts, after the activation.
        drop_path: Stochastic-depth rate of a vision backbone.
        moe: Which layer replaces the chosen FFNs; none trains the dense model.
        layers: Zero-based indices of the transformer layers to upcycle.
        num_experts: Number K of (residual) experts; dynmoe and mass start with so many.
        num_blocks: Number B of blocks per expert.
        top_k: Experts per token of the layers that route to a fixed number (topk, gmoe, emoe, emoe_learn).
        max_experts: Most experts of the layers that add some in training (dynmoe, mass); null takes num_experts + 2.
        load_loss: What the load loss of gmoe, emoe and emoe_learn compares with the weakest chosen logit: probabilities
            as in the authors' code (tutel), or logits as in the paper that it comes from (shazeer).
        adapt_every: Steps between decisions of dynmoe to add and remove experts; 0 makes none, epoch one each epoch.
        gate_temperature: Whether dynmoe's gate learns a temperature.
        mass_threshold: Routing mass that the experts of a token reach together in mass.
        mass_window: Steps over which mass watches gradients; null takes the authors' share of the run.
        mass_warmup: Steps before mass judges an expert's gradient; null takes the authors' share of the run.
        shared_demand: Fixed alpha of UniF-MoE, an ablation; null adapts it to the token.
        fixed_experts: Fixed number k of residual experts of UniF-MoE, an ablation; null adapts it to the token.
        block_choice: How UniF-MoE chooses shared blocks: by prototype, or the first ones (prefix, an ablation).
        dispatcher: How tokens reach experts on other ranks.
        capacity_factor: Largest load of an expert, as a multiple of the mean load of a rank's tokens; the weakest
            assignments beyond it are dropped. null drops nothing.
    """

    backbone: str | None = None
    pretrained: str | None = None
    dropout: float = 0.0
    hidden_dropout: float = 0.0
    drop_path: float = 0.0
    moe: MoEName = "unif"
    layers: list[int] = field(default_factory=lambda: [3, 5])
    num_experts: int = 6
    num_blocks: int = 8
    top_k: int = 2
    max_experts: int | None = None
    load_loss: Literal["tutel", "shazeer"] = "tutel"
    adapt_every: int | Literal["epoch"] = 1
    gate_temperature: bool = False
    mass_threshold: float = 0.3
    mass_window: int | None = None
    mass_warmup: int | None = None
    shared_demand: float | None = None
    fixed_experts: int | None = None
    block_choice: Literal["prototype", "prefix"] = "prototype"
    dispatcher: Literal["auto", "local", "alltoall", "tutel"] = "auto"
    capacity_factor: float | None = None

    def most_experts(self) -> int:
        """max_experts, or what null stands for."""
        return self.num_experts + 2 if self.max_experts is None else self.max_experts


@dataclass
class DataConfig:
    """Which task is learned.

    Args:
        task: digits is rotated handwritten digits with one rotation held out; acceptability is sentence judgement;
            the others are DomainBed's and GLUE's data sets. GLUE reports the best epoch on the validation split, as
            its test labels are not published.
        root: Folder of the data set's official files; null looks for DomainBed's in data/TASK and data/
            and takes GLUE's from the hub.
        held_out: Environment that is held out for testing (digits and DomainBed), for example rot75.
        split_seed: Seed of the 80/20 in/out splits; null takes the run's seed.
        batch_size: Items per training environment and step, over all ranks together.
        eval_batch_size: Items per rank and evaluation step.
        sampling: How training items are drawn: in epochs, each item once before any comes again; or with replacement,
            as DomainBed does.
        workers: Processes per rank that read and transform images ahead of time; 0 does it between steps.
        image_size: Side of DomainBed's images after cropping or resizing, in pixels.
    """

    task: Literal[*TASKS] = "digits"  # type: ignore[valid-type]  # of the registry, when a parser is made
    root: str | None = None
    held_out: str = "rot75"
    split_seed: int | None = None
    batch_size: int = 16
    eval_batch_size: int = 64
    sampling: Literal["epochs", "replacement"] = "epochs"
    workers: int = 0
    image_size: int = 224


@dataclass
class LFMEConfig:
    """Learning from multiple experts.

    Args:
        guidance_weight: Weight of the squared distance of the model's logits from the experts' probabilities.
    """

    guidance_weight: float = 1.0


@dataclass
class DMDAConfig:
    """Discriminative microscopic distribution alignment.

    Args:
        channel_ratio: Fraction of the feature channels that selective channel pruning keeps.
        scorer_weight: Weight of the loss of the classifier whose weights choose the channels.
        temperature: Temperature of the class expert's probabilities, which are the latent semantics.
        expert_dim: Width of the class expert's first hidden layer; the second has a quarter of it.
        approximator_dim: Width of the hidden layers that tell environments apart.
        warmup_steps: Scale, in steps, on which the reversed gradient of the alignment grows to its full strength.
    """

    channel_ratio: float = 0.5
    scorer_weight: float = 5.0
    temperature: float = 4.0
    expert_dim: int = 512
    approximator_dim: int = 256
    warmup_steps: int = 1000


@dataclass
class PCMoEConfig:
    """Mixture of environment experts with consistent predictions.

    Args:
        expert_weight: Weight of the loss of each environment's expert on its own items.
        consistency_weight: Weight of the divergence of the model's prediction from that of the other environments'
            experts.
    """

    expert_weight: float = 1.0
    consistency_weight: float = 1.0


@dataclass
class AlgorithmConfig:
    """What is minimised besides the layers' own losses.

    Args:
        name: erm is the plain task loss; lfme, dmda and pcmoe are training algorithms for domain generalisation.
        lfme: Options of lfme.
        dmda: Options of dmda.
        pcmoe: Options of pcmoe.
    """

    name: AlgorithmName = "erm"
    lfme: LFMEConfig = field(default_factory=LFMEConfig)
    dmda: DMDAConfig = field(default_factory=DMDAConfig)
    pcmoe: PCMoEConfig = field(default_factory=PCMoEConfig)

    def validate(self) -> None:
        """Refuse values out of range, with one sentence."""
        weights = {
            "lfme.guidance_weight": self.lfme.guidance_weight,
            "dmda.scorer_weight": self.dmda.scorer_weight,
            "dmda.warmup_steps": self.dmda.warmup_steps,
            "pcmoe.expert_weight": self.pcmoe.expert_weight,
            "pcmoe.consistency_weight": self.pcmoe.consistency_weight,
        }
        for name, value in weights.items():
            _check(0 <= value < float("inf"), f"algorithm.{name} must be at least 0, not {value}.")
        ratio, temperature = self.dmda.channel_ratio, self.dmda.temperature
        _check(0 < ratio <= 1, f"algorithm.dmda.channel_ratio must be above 0 and at most 1, not {ratio}.")
        _check(0 < temperature < float("inf"), f"algorithm.dmda.temperature must be above 0, not {temperature}.")
        for name, width in (("expert_dim", self.dmda.expert_dim), ("approximator_dim", self.dmda.approximator_dim)):
            _check(width >= 4, f"algorithm.dmda.{name} must be at least 4, not {width}.")


@dataclass
class OptimConfig:
    """Optimiser, schedule and loss.

    Args:
        name: Optimiser.
        lr: Peak learning rate.
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
    lr: float = 2e-3
    weight_decay: float = 0.05
    decay: Literal["matrices", "all"] = "matrices"
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.0
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 60
    grad_clip: float = 1.0
    lambda_div: float = 0.01
    auxiliary_weight: float | None = None
    on_nonfinite: Literal["stop", "skip"] = "stop"


NO_ZERO_3 = (
    "parallel.zero_stage 3 gathers a module's weights when its forward is called, but residual experts are stacked "
    "weights that expert parallelism shards already; use zero_stage 2 and a larger parallel.expert_parallel_size, "
    "which leaves only the dense weights replicated."
)


@dataclass
class ParallelConfig:
    """How the job is spread over ranks.

    Args:
        expert_parallel_size: Ranks that share one set of residual experts; 1 replicates them, and it must divide both
            the world size and num_experts. auto takes the largest number that does.
        expert_placement: near puts consecutive ranks into one expert-parallel group, so that the all-to-all stays
            inside a node; far strides the groups, so that the all-reduce of expert gradients does instead.
        zero_stage: DeepSpeed ZeRO stage; optimiser states of sharded experts are partitioned over their replicas.
        offload_optimizer: Keep optimiser states and master weights in CPU memory and update there (ZeRO 1 and 2).
        precision: Number format of weights and activations.
        gradient_accumulation: Micro-batches per optimiser step.
        gradient_checkpointing: Recompute activations in the backward pass.
        timeout_s: Seconds that a rank waits for others to join the job, and in a collective, before it gives up.
        host_timeout_s: Seconds without an answer after which a host counts as lost, and the job ends.
    """

    expert_parallel_size: int | Literal["auto"] = 1
    expert_placement: Literal["near", "far"] = "near"
    zero_stage: Literal[0, 1, 2] = 1
    offload_optimizer: bool = False
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    gradient_accumulation: int = 1
    gradient_checkpointing: bool = False
    timeout_s: int = 600
    host_timeout_s: int = 25


@dataclass
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
    steps: int = 800
    epochs: int | None = None
    patience: int | None = None
    seed: int = 0
    eval_every: int = 100
    log_every: int = 10
    keep_checkpoints: int = 2
    resume: bool | Literal["auto"] = False
    baseline: bool = True
    progress: bool = True
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def validate(self, world_size: int) -> None:
        """Refuse, with one sentence, what cannot work on `world_size` ranks. Cheap: touches no process group."""
        positive = {
            "steps": self.steps,
            "eval_every": self.eval_every,
            "log_every": self.log_every,
            "keep_checkpoints": self.keep_checkpoints,
            "model.num_experts": self.model.num_experts,
            "model.num_blocks": self.model.num_blocks,
            "data.batch_size": self.data.batch_size,
            "data.eval_batch_size": self.data.eval_batch_size,
            "data.image_size": self.data.image_size,
            "parallel.expert_parallel_size": self.expert_parallel_size(world_size),
            "parallel.gradient_accumulation": self.parallel.gradient_accumulation,
        }
        positive.update((n, v) for n, v in (("epochs", self.epochs), ("patience", self.patience)) if v is not None)
        for name, value in positive.items():
            _check(value >= 1, f"{name} must be at least 1, not {value}.")
        for name in ("steps", "eval_every"):  # a run in epochs leaves them at their defaults
            value = getattr(self, name)
            _check(
                self.epochs is None or value == getattr(TrainConfig, name),
                f"epochs {self.epochs} sets {name} by passes over the data, so {name} {value} contradicts it; leave "
                f"{name} out, or set epochs null.",
            )
        _check(self.data.workers >= 0, f"data.workers must be at least 0, not {self.data.workers}.")
        _check_task(self)
        for name in ("dropout", "hidden_dropout", "drop_path"):
            _check_rate(f"model.{name}", getattr(self.model, name))
        _check(self.parallel.zero_stage in (0, 1, 2), NO_ZERO_3)
        _check(
            not self.parallel.offload_optimizer or self.parallel.zero_stage > 0,
            "parallel.offload_optimizer needs parallel.zero_stage 1 or 2, not 0.",
        )
        _check(0 < self.optim.lr < float("inf"), f"optim.lr must be above 0, not {self.optim.lr}.")
        for name in ("weight_decay", "momentum", "warmup_steps", "grad_clip", "lambda_div"):
            value = getattr(self.optim, name)
            _check(0 <= value < float("inf"), f"optim.{name} must be at least 0, not {value}.")
        _check(
            all(0 <= beta < 1 for beta in self.optim.betas),
            f"optim.betas must both be at least 0 and below 1, not {list(self.optim.betas)}.",
        )
        self.algorithm.validate()
        for name, seed in (("seed", self.seed), ("data.split_seed", self.data.split_seed or 0)):
            _check(0 <= seed < 2**32, f"{name} must be a whole number from 0 to {2**32 - 1}, not {seed}.")
        _check(
            self.parallel.precision == "fp32" or self.parallel.zero_stage > 0,
            f"parallel.precision {self.parallel.precision} needs float32 master weights, which parallel.zero_stage 0 "
            "does not keep; use zero_stage 1 or 2.",
        )
        _check(not (self.resume and self.output is None), "--resume needs --output, the folder of the run to continue.")
        micro = world_size * self.parallel.gradient_accumulation
        _check(
            self.data.batch_size % micro == 0,
            f"data.batch_size {self.data.batch_size} does not divide evenly over {world_size} ranks x "
            f"{self.parallel.gradient_accumulation} micro-batches; use a multiple of {micro}.",
        )
        for name, most in (("timeout_s", 10_000_000), ("host_timeout_s", 30_000)):  # Linux counts up to 32,767
            value = getattr(self.parallel, name)
            _check(value <= most, f"parallel.{name} must be at most {most}, not {value}.")
        _check(
            5 <= self.parallel.host_timeout_s <= self.parallel.timeout_s,
            f"parallel.host_timeout_s {self.parallel.host_timeout_s} must be from 5 to parallel.timeout_s "
            f"{self.parallel.timeout_s}.",
        )
        size = self.expert_parallel_size(world_size)
        _check(
            world_size % size == 0,
            f"parallel.expert_parallel_size {size} does not divide the world size {world_size}; "
            "choose one of its divisors.",
        )
        method = method_of(self.model.moe)
        if method.layer:
            check_options(method, self.model, self.optim.auxiliary_weight)
            name, slots = self._expert_slots()
            _check(
                slots % size == 0,
                f"model.{name} {slots} is not divisible by parallel.expert_parallel_size {size}; change one of them.",
            )
            _check_capacity_factor("model.capacity_factor", self.model.capacity_factor)
            model = self.model
            _check_policies("model.", model.num_experts, model.shared_demand, model.fixed_experts, model.block_choice)
            _check(bool(self.model.layers), "model.layers is empty; name at least one layer or set model.moe none.")

    def expert_parallel_size(self, world_size: int) -> int:
        """Ranks that share one set of residual experts: what was asked for, or what auto means on so many ranks."""
        if self.parallel.expert_parallel_size != "auto":
            return self.parallel.expert_parallel_size
        return gcd(world_size, self._expert_slots()[1]) if method_of(self.model.moe).layer else 1

    def _expert_slots(self) -> tuple[str, int]:
        """Experts that a layer has room for, and the option that says so."""
        if method_of(self.model.moe).grows:
            return "max_experts", self.model.most_experts()
        return "num_experts", self.model.num_experts


def _check_task(config: TrainConfig) -> None:
    """Refuse options that the task would ignore."""

    def value(of: Any, option: str) -> Any:
        group, name = option.split(".")
        return getattr(getattr(of, group), name)

    default = TrainConfig()
    for option in find_task(config.data.task).ignored:
        _check(
            value(config, option) == value(default, option),
            f"{option} would change nothing in data.task {config.data.task}; leave it out, or choose another task.",
        )
