"""From a configuration to the task, the model, the training algorithm and the optimiser."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from unifmoe_dist.algorithms import ALGORITHMS, Algorithm
from unifmoe_dist.config import TrainConfig
from unifmoe_dist.config.parts import OptimConfig
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.data.skeleton import without_storage
from unifmoe_dist.data.task import TaskData, split_seed
from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.registry import method_of
from unifmoe_dist.optimizers import in_router, param_groups
from unifmoe_dist.runtime.ranks import Ranks
from unifmoe_dist.train import deepspeed
from unifmoe_dist.upcycling import moe_layers, upcycle
from unifmoe_dist.upcycling.convert import layer_class
from unifmoe_dist.upcycling.families import find_adapter


def build_task(config: TrainConfig) -> TaskData:
    """The data, of `train` the share that is learned from, and the dense backbone that the configuration names."""
    task, share, seed = find_task(config.data.task).read(config), config.data.train_share, split_seed(config)
    if share == 1:
        return task
    return replace(task, train=[_part(each, share, (seed, number)) for number, each in enumerate(task.train)])


def _part(items: Dataset, share: float, seeds: tuple[int, ...]) -> Dataset:
    """So much of a data set, at least one item: the first ones of an order that the seeds draw."""
    count = len(items)  # type: ignore[arg-type]
    order = np.random.default_rng(seeds).permutation(count)
    return Subset(items, order[: math.ceil(share * count)].tolist())


def build_model(config: TrainConfig, task: TaskData, ranks: Ranks | None = None) -> nn.Module:
    """The dense backbone, upcycled if the configuration asks for it: what is deployed. Seed torch first.

    Without ranks all experts are here and nothing travels, so no dispatcher's library is needed.
    """
    return convert(config, task.build_model(), ranks)


def convert(config: TrainConfig, model: nn.Module, ranks: Ranks | None = None) -> nn.Module:
    """A dense backbone with what the configuration puts into it, as `build_model` has it; in place where possible."""
    if config.model.train_from is not None:
        freeze_before(model, config.model.train_from)
    model = install_layers(config, model, ranks)
    algorithm = ALGORITHMS[config.algorithm.name]
    model = algorithm.adapt(model, algorithm.deployed(config.algorithm))
    if config.parallel.gradient_checkpointing:
        checkpoint_activations(model)
    return model


def freeze_before(model: nn.Module, layer: int) -> None:
    """Train nothing of what comes before a transformer layer: embeddings (and a head tied to them) and lower layers.

    What comes before is what the model lists before, as libraries make modules in the order in which they run.

    Raises:
        UserError: there is no such layer.
    """
    blocks = find_adapter(model).blocks(model)
    if layer >= len(blocks):
        raise UserError(f"model.train_from {layer} is no layer of the backbone, which has 0 to {len(blocks) - 1}.")
    place = next(name for name, module in model.named_modules() if module is blocks[layer])
    numbered = re.match(r"(.*\b\d+)(\.|$)", place)  # the layer, where the block that is known is the FFN in it
    prefix = f"{numbered[1] if numbered else place}."
    for name, parameter in model.named_parameters():
        if name.startswith(prefix):
            return
        parameter.requires_grad_(False)


def install_layers(config: TrainConfig, model: nn.Module, ranks: Ranks | None = None) -> nn.Module:
    """Put the MoE layers that the configuration asks for into a dense backbone.

    Raises:
        UserError: the backbone has no such layers, or its FFNs cannot be divided so.
    """
    method = method_of(config.model.moe)
    if not method.layer:
        return model
    model = upcycle(
        model,
        config.model.layers,
        method=method.name,
        expert_group=None if ranks is None else ranks.expert_group,
        dispatcher="auto" if ranks is None else config.model.dispatcher,
        ranks_per_node=None if ranks is None else config.group_ranks_per_node(ranks.world_size),
        dispatch_chunks=config.parallel.dispatch_chunks,
        cuda_graphs=config.parallel.cuda_graphs,
        **layer_options(config),
    )
    weight = config.optim.lambda_div if method.shared else config.optim.auxiliary_weight
    for layer in moe_layers(model).values():
        if weight is not None:
            layer.auxiliary_weight = weight
    return model


def check_layers(config: TrainConfig) -> None:
    """Refuse layers that the task's backbone cannot have, before a large data set is read: on a model without storage.

    Raises:
        UserError: as building the model would.
    """
    if not method_of(config.model.moe).layer:
        return
    with without_storage():
        try:
            backbone = find_task(config.data.task).untrained(config)
        except UserError:
            return  # a backbone that cannot be had is refused when its weights are read
        install_layers(config, backbone)


def checkpoint_activations(model: Any) -> None:
    """Recompute activations in the backward pass, in a way that losses computed inside the layers survive."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.set_grad_checkpointing()


def layer_options(config: TrainConfig) -> dict[str, Any]:
    """What a configuration tells the layers of its method, and what its run sets where it is null."""
    method = method_of(config.model.moe)
    chosen = method.taken({**vars(config.model), "max_experts": config.model.most_experts()})
    if method.layer:
        run = layer_class(method.name).config_type.run_options(config.steps, find_task(config.data.task).family)
        chosen.update((name, value) for name, value in run.items() if chosen.get(name) is None)
    return chosen


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

    make_model = partial(build_model, config, task, ranks)
    return kind(make_model(), environments, task.num_classes, config.algorithm, make_model)


def parameter_groups(model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """An optimiser's groups, as `param_groups` makes them or, with `decay` all, one; routers apart by `router_lr`."""
    groups: list[dict[str, Any]]
    if optim.decay == "all":
        groups = [{"params": [p for p in model.parameters() if p.requires_grad], "weight_decay": optim.weight_decay}]
    else:
        groups = param_groups(model, optim.weight_decay)
    if optim.router_lr is None:
        return groups
    routers = {parameter for name, parameter in model.named_parameters() if in_router(name)}
    for group in [*groups]:
        own = [p for p in group["params"] if p in routers]
        group["params"] = [p for p in group["params"] if p not in routers]
        groups.append({**group, "params": own, "lr": optim.router_lr})
    return [group for group in groups if group["params"]]


def build_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser over `parameter_groups`."""
    groups, optim = parameter_groups(model, config.optim), config.optim
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum)
    if config.parallel.offload_optimizer:
        return deepspeed.cpu_adam(groups, optim)
    kind = torch.optim.AdamW if optim.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=optim.lr, betas=optim.betas)


def build_schedule(config: TrainConfig) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    """A function from the optimiser to its learning-rate schedule, one step per optimiser step.

    Transformers' schedules of the same names, without its import, which takes a fifth of a start.
    """
    kind, warmup, steps = config.optim.schedule, config.optim.warmup_steps, config.steps

    def share_of_peak(step: int) -> float:
        if step < warmup:
            return step / warmup
        if kind == "cosine":
            return max(0.0, 0.5 * (1 + math.cos(math.pi * ((step - warmup) / max(1, steps - warmup)))))
        return max(0.0, (steps - step) / max(1, steps - warmup)) if kind == "linear" else 1.0

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_peak)
