"""The model of a configuration without its data, weights or memory: fake tensors, which have sizes only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from unifmoe_dist.algorithms import Algorithm
from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.data.task import Batch, TaskData
from unifmoe_dist.studies.memory.stand_ins import ExpertsStandIn, Load
from unifmoe_dist.train import build
from unifmoe_dist.upcycling import moe_layers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ITEMS = 1024  # of every environment; as many as a batch may need
_VOCABULARY = 1000  # the smallest of the backbones have more


def task_of_sizes(config: TrainConfig) -> TaskData:
    """The task with made-up items, of which `collate` knows the number only, and random weights.

    Sentences have the longest length that the language tasks have, without padding.

    Raises:
        UserError: the backbone's architecture cannot be had without a network.
    """
    task = find_task(config.data.task)
    size, classes = task.input_size(config), task.num_classes
    collate = partial(_sentences if task.language else _images, size, classes)
    items: Any = [range(_ITEMS)] * max(1, len(task.environments) - 1)
    names, make = tuple(map(str, range(len(items)))), partial(task.untrained, config)
    return TaskData(task.name, classes, items, items, items, names, collate, make)


def _images(size: tuple[int, ...], classes: int, items: Sequence[Any]) -> Batch:
    return {"x": torch.randn(len(items), *size)}, torch.randint(0, classes, (len(items),))


def _sentences(size: tuple[int, ...], classes: int, items: Sequence[Any]) -> Batch:
    tokens = torch.randint(0, _VOCABULARY, (len(items), *size))
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "token_type_ids": tokens * 0}
    return inputs, torch.randint(0, classes, (len(items),))


def sizes_of_algorithm(config: TrainConfig, task: TaskData, ranks: int) -> Algorithm:
    """The training algorithm and its models on the meta device, where only sizes exist, with one rank's experts.

    Args:
        config: Configuration.
        task: From `task_of_sizes`.
        ranks: Ranks that share one set of experts.
    """
    single = replace(config, model=replace(config.model, dispatcher="auto"))
    with torch.device("meta"):
        algorithm = build.build_algorithm(single, task)
    algorithm.to(DTYPES[config.parallel.precision])
    for layer in moe_layers(algorithm).values() if ranks > 1 else ():
        for name, parameter in list(layer.experts.named_parameters()):
            share = nn.Parameter(parameter.detach()[: len(parameter) // ranks], parameter.requires_grad)
            share.allreduce = False  # type: ignore[attr-defined]
            setattr(layer.experts, name, share)
    return algorithm.train()


def fake_storage(model: nn.Module) -> None:
    """Give a model of the meta device fake storage on the CPU, inside a `FakeTensorMode`; in place.

    Meta tensors do not do for running it, as parts of it make tensors on the CPU.
    """

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    for owner in model.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owner._parameters[name] = nn.Parameter(fake(parameter), parameter.requires_grad)
                owner._parameters[name].__dict__.update(parameter.__dict__)
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = fake(buffer)


def stand_in_for_experts(model: nn.Module, gpu: bool, load: Load | None, ranks: int) -> None:
    """Put a stand-in in the place of every layer of experts; in place. Arguments as for `ExpertsStandIn`.

    A load of None takes each layer's load at the start.
    """
    for name, layer in moe_layers(model).items():
        model.set_submodule(name, ExpertsStandIn(layer, load or Load.at_start(layer), gpu, ranks))
