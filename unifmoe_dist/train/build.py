"""From a configuration to the task, the model, the training algorithm and the optimiser."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import nn

from unifmoe_dist.algorithms import ALGORITHMS, Algorithm
from unifmoe_dist.config import GlueName, TrainConfig
from unifmoe_dist.data.benchmarks import BENCHMARKS
from unifmoe_dist.data.encoders import GLUE_BACKBONE, Encoder
from unifmoe_dist.data.task import TaskData
from unifmoe_dist.errors import UserError
from unifmoe_dist.methods import LayerOptions, upcycle_baseline
from unifmoe_dist.methods.mass_schedule import LANGUAGE, SHORT, VISION, MASSRecipe, mass_schedule
from unifmoe_dist.runtime.ranks import Ranks
from unifmoe_dist.train import deepspeed
from unifmoe_dist.upcycling import moe_layers, upcycle


def build_task(config: TrainConfig) -> TaskData:
    """The data and the dense backbone that the configuration names."""
    seed = config.seed if config.data.split_seed is None else config.data.split_seed
    if config.data.task == "digits":
        from unifmoe_dist.data.digits import digits_task

        return digits_task(config.data.held_out, seed)
    if config.data.task in BENCHMARKS:
        from unifmoe_dist.data.domainbed import domainbed_task

        return domainbed_task(
            config.data.task,
            config.data.held_out,
            config.data.root,
            seed,
            image_size=config.data.image_size,
            backbone=config.model.backbone,
            pretrained=config.model.pretrained,
            dropout=config.model.dropout,
            drop_path=config.model.drop_path,
        )
    if config.data.task in get_args(GlueName):
        from unifmoe_dist.data.glue import glue_task

        return glue_task(config.data.task, config.data.root, glue_encoder(config), config.model.dropout)
    from unifmoe_dist.data.acceptability import acceptability_task

    return acceptability_task(seed, config.model.pretrained)


def held_out(config: TrainConfig) -> str | None:
    """Name of the environment that the configuration holds out, however it was written; None for language tasks.

    Raises:
        UserError: there is no such environment.
    """
    if config.data.task == "digits":
        from unifmoe_dist.data.digits import ENVIRONMENTS, environment_index

        return ENVIRONMENTS[environment_index(config.data.held_out)]
    if config.data.task in BENCHMARKS:
        benchmark = BENCHMARKS[config.data.task]
        return benchmark.environments[benchmark.environment_index(config.data.held_out)].name
    return None


def glue_encoder(config: TrainConfig) -> Encoder:
    """Where GLUE's backbone and tokenizer come from."""
    return Encoder(config.model.backbone or GLUE_BACKBONE, config.model.pretrained)


def build_tokenizer(config: TrainConfig) -> Any:
    """The tokenizer of a language task."""
    if config.data.task in get_args(GlueName):
        return glue_encoder(config).tokenizer()
    from unifmoe_dist.data.acceptability import encoder_path, load_tokenizer

    return load_tokenizer(str(encoder_path(config.model.pretrained)))


def is_language(config: TrainConfig) -> bool:
    """Whether the task reads text."""
    return config.data.task == "acceptability" or config.data.task in get_args(GlueName)


def num_classes(config: TrainConfig) -> int:
    """Width of the logits."""
    task = config.data.task
    if task == "digits":
        from unifmoe_dist.data.digits import NUM_CLASSES

        return NUM_CLASSES
    if task in BENCHMARKS:
        return BENCHMARKS[task].num_classes
    if task in get_args(GlueName):
        from unifmoe_dist.data.glue_files import FORMATS

        return len(FORMATS[task].classes)
    return 2


def untrained_backbone(config: TrainConfig) -> nn.Module:
    """The dense backbone with random weights: what the task builds, without its data and pretrained weights.

    Raises:
        UserError: the backbone's sizes are neither known nor in a folder, and the hub cannot be reached.
    """
    task, classes = config.data.task, num_classes(config)
    if task == "digits":
        from unifmoe_dist.data.digits import build_digits_vit

        return build_digits_vit()
    if task in BENCHMARKS:
        from unifmoe_dist.data.vision_backbone import DEFAULT_BACKBONE, build_backbone

        return build_backbone(
            config.model.backbone or DEFAULT_BACKBONE,
            classes,
            config.data.image_size,
            "none",
            dropout=config.model.dropout,
            drop_path=config.model.drop_path,
        )
    if task in get_args(GlueName):
        return glue_encoder(config).untrained(classes, config.model.dropout)
    from unifmoe_dist.data.acceptability import untrained_encoder

    return untrained_encoder(config.model.pretrained)


def build_model(config: TrainConfig, task: TaskData, ranks: Ranks | None = None) -> nn.Module:
    """The dense backbone, upcycled if the configuration asks for it: what is deployed. Seed torch first.

    Without ranks all experts are here and nothing travels, so no dispatcher's library is needed.
    """
    return convert(config, task.build_model(), ranks)


def convert(config: TrainConfig, model: nn.Module, ranks: Ranks | None = None) -> nn.Module:
    """A dense backbone with what the configuration puts into it, as `build_model` has it; in place where possible."""
    model = install_layers(config, model, ranks)
    model = ALGORITHMS[config.algorithm.name].adapt(model, config.algorithm)
    if config.parallel.gradient_checkpointing:
        checkpoint_activations(model)
    return model


def install_layers(config: TrainConfig, model: nn.Module, ranks: Ranks | None = None) -> nn.Module:
    """Put the MoE layers that the configuration asks for into a dense backbone.

    Raises:
        UserError: the backbone has no such layers, or its FFNs cannot be divided so.
    """
    if config.model.moe == "unif":
        model = upcycle(
            model,
            layers=config.model.layers,
            num_experts=config.model.num_experts,
            num_blocks=config.model.num_blocks,
            expert_group=None if ranks is None else ranks.expert_group,
            dispatcher="auto" if ranks is None else config.model.dispatcher,
            capacity_factor=config.model.capacity_factor,
            shared_demand=config.model.shared_demand,
            fixed_experts=config.model.fixed_experts,
            block_choice=config.model.block_choice,
            hidden_dropout=config.model.hidden_dropout,
        )
        for layer in moe_layers(model).values():
            layer.auxiliary_weight = config.optim.lambda_div
    elif config.model.moe != "none":
        model = upcycle_baseline(
            model,
            config.model.moe,
            config.model.layers,
            layer_options(config),
            expert_group=None if ranks is None else ranks.expert_group,
            dispatcher="auto" if ranks is None else config.model.dispatcher,
        )
        for layer in moe_layers(model).values():
            if config.optim.auxiliary_weight is not None:
                layer.auxiliary_weight = config.optim.auxiliary_weight
    return model


def checkpoint_activations(model: Any) -> None:
    """Recompute activations in the backward pass, in a way that losses computed inside the layers survive."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.set_grad_checkpointing()


def layer_options(config: TrainConfig) -> LayerOptions:
    """What a configuration tells the builders of the other MoE layers."""
    model, recipe = config.model, mass_recipe(config)
    mass = mass_schedule(config.steps, recipe)
    return LayerOptions(
        num_experts=model.num_experts,
        num_blocks=model.num_blocks,
        top_k=model.top_k,
        load_loss=model.load_loss,
        max_experts=model.most_experts(),
        adapt_every=model.adapt_every,
        gate_temperature=model.gate_temperature,
        mass_threshold=model.mass_threshold,
        expansion_steps=mass.expansion_steps,
        mass_window=mass.window if model.mass_window is None else model.mass_window,
        mass_warmup=mass.warmup if model.mass_warmup is None else model.mass_warmup,
        mass_untried=recipe.untried,
        hidden_dropout=model.hidden_dropout,
    )


def mass_recipe(config: TrainConfig) -> MASSRecipe:
    """Which of MASS's scripts a task follows; the project's own small tasks are too short for either's floors."""
    if config.data.task in get_args(GlueName):
        return LANGUAGE
    return VISION if config.data.task in BENCHMARKS else SHORT


def build_algorithm(config: TrainConfig, task: TaskData, ranks: Ranks | None = None) -> Algorithm:
    """The training algorithm that the configuration names, around a new model. Seed torch first.

    Raises:
        UserError: the algorithm compares environments and the task has one, or it does not fit the model.
    """
    kind, environments = ALGORITHMS[config.algorithm.name], len(task.train)
    if kind.needs_environments and environments < 2:
        raise UserError(
            f"algorithm.name {config.algorithm.name} needs at least two training environments, and the task "
            f"{task.name} has {environments}; use algorithm.name erm."
        )

    def make_model() -> nn.Module:
        return build_model(config, task, ranks)

    return kind(make_model(), environments, task.num_classes, config.algorithm, make_model)


def parameter_groups(
    model: nn.Module, weight_decay: float, expert_group_name: str | None = None, decay: str = "matrices"
) -> list[dict[str, Any]]:
    """An optimiser's groups; sharded experts form groups of their own.

    Of "matrices", biases, norms and routers are not decayed; otherwise everything is.
    """
    kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            plain = ".router." in f".{name}" or name.endswith("bias") or parameter.ndim < 2
            kind = decay == "all" or not plain, deepspeed.is_sharded(parameter)
            kinds.setdefault(kind, []).append(parameter)
    groups = []
    for (decayed, sharded), parameters in kinds.items():
        group: dict[str, Any] = {"params": parameters, "weight_decay": weight_decay if decayed else 0.0}
        if sharded:
            group.update(moe=True, name=expert_group_name)
        groups.append(group)
    return groups


def build_optimizer(config: TrainConfig, model: nn.Module, ranks: Ranks) -> torch.optim.Optimizer:
    """The optimiser over `parameter_groups`."""
    groups = parameter_groups(model, config.optim.weight_decay, ranks.expert_group_name, config.optim.decay)
    optim = config.optim
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum)
    if config.parallel.offload_optimizer:
        return deepspeed.cpu_adam(groups, optim)
    kind = torch.optim.AdamW if optim.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=optim.lr, betas=optim.betas)


def build_schedule(config: TrainConfig) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    """A function from the optimiser to its learning-rate schedule, one step per optimiser step."""
    from transformers import get_scheduler

    name = "constant_with_warmup" if config.optim.schedule == "constant" else config.optim.schedule
    return lambda optimizer: get_scheduler(
        name, optimizer, num_warmup_steps=config.optim.warmup_steps, num_training_steps=config.steps
    )
