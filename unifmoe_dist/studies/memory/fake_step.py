"""The memory of a training step, rank by rank and kind by kind, without taking it.

The step itself is run, forward and backward, on fake tensors: the real model, at the real batch size, in the real
number format, with gradient checkpointing where it is on; every storage counts from its first tensor to its last. Two
parts are stood for: what depends on values in layers of experts (`stand_ins.py`), and the engine
(`deepspeed_memory.py`). So the peak is the peak of a timeline, and its parts are what was held at that moment.
"""

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from unifmoe_dist.algorithms import Algorithm
from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.data.skeleton import without_storage
from unifmoe_dist.data.task import Batch, TaskData
from unifmoe_dist.engines import divide_groups, mark
from unifmoe_dist.kernels.scratch import Scratch, lending
from unifmoe_dist.layer import UniFMoELayer
from unifmoe_dist.studies.memory.deepspeed_memory import EngineMemory, Group
from unifmoe_dist.studies.memory.stand_ins import Load, standing_in
from unifmoe_dist.studies.meters import Ledger, LiveBytes
from unifmoe_dist.train import build, deepspeed
from unifmoe_dist.upcycling import moe_layers

KINDS = ("weights", "master weights", "optimiser states", "gradients", "activations", "buffers")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ITEMS = 1024  # of every environment; as many as a batch may need


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak memory of one rank, in bytes by kind."""

    config: TrainConfig  # what was estimated
    ranks: int  # world size
    device: Counter[str]  # on the rank's device at its peak
    most: Counter[str]  # every kind when there is most of it, which need not be at the peak
    host: Counter[str]  # in CPU memory at its peak; nothing without offloading
    parameters: int  # trained parameters that a rank holds
    items: int  # of one micro-batch on a rank

    @property
    def peak(self) -> int:
        """Bytes on the device."""
        return self.device.total()


def estimate(config: TrainConfig, ranks: int = 1, gpu: bool = True, load: Load | None = None) -> MemoryEstimate:
    """Estimate a run's peak, without its data set and weights, or a network.

    Args:
        config: The run.
        ranks: World size.
        gpu: Whether ranks are GPUs with Triton kernels, or CPU processes, which keep offloaded states beside the rest.
        load: What routing is taken to decide; None: what routers start with. Of GPUs, it only matters between ranks.

    Raises:
        UserError: the configuration cannot work on so many ranks, or names an architecture that cannot be had offline.
    """
    config.validate(ranks)
    parallel, size = config.parallel, config.expert_parallel_size(ranks)
    task = task_of_sizes(config)
    items = config.data.batch_size * len(task.train) // ranks // parallel.gradient_accumulation
    device, elsewhere = Ledger(), Ledger()
    host = (elsewhere if gpu else device) if parallel.offload_optimizer else None
    gc.collect()  # what lingers would leave the ledger in the middle of the step
    algorithm = sizes_of_algorithm(config, task, size)
    with FakeTensorMode():
        fake_storage(algorithm)
        for layer in moe_layers(algorithm).values() if size > 1 else ():
            mark(layer.experts.parameters())
        made = build.parameter_groups(algorithm, config.optim)
        divide_groups(made)
        groups = [
            Group(g["params"], moe := bool(g.get("moe")), ranks // size if moe else ranks, g["weight_decay"] > 0)
            for g in made
        ]
        live = LiveBytes(device)
        engine = EngineMemory(groups, config, live, host, foreach=gpu, bucket_size=deepspeed.reduce_bucket(algorithm))
        engine.hold()
        trained = {p for group in groups for p in group.parameters}
        tensors = (*algorithm.parameters(), *algorithm.buffers())
        device.add("weights", sum(t.nbytes for t in tensors if t not in trained))
        for tensor in tensors:
            live.ignore(tensor)
        micro_batches = min(2, parallel.gradient_accumulation)  # further ones repeat the second
        graphs = parallel.cuda_graphs and gpu and size == 1
        with (
            standing_in(algorithm, load, gpu, size),
            _in_graphs(algorithm, task.collate([*range(items)]), device, live) if graphs else nullcontext(),
        ):
            for number in range(micro_batches):
                with live:
                    batch, *_ahead = (task.collate([*range(items)]) for _ in range(2 if gpu else 1))
                    _forward_and_backward(algorithm, batch)
                engine.reduce(boundary=number == micro_batches - 1)
        engine.update()
    parameters = sum(group.size for group in groups)
    return MemoryEstimate(config, ranks, device.peak, device.most, elsewhere.peak, parameters, items)


@contextmanager
def _in_graphs(algorithm: Algorithm, batch: Batch, device: Ledger, live: LiveBytes) -> Iterator[None]:
    """With what CUDA graphs hold all the time: tokens in and out and their gradients, those of weights, and scratch."""
    layers = [layer for layer in moe_layers(algorithm).values() if isinstance(layer, UniFMoELayer)]
    held: dict[str, Tensor] = {}
    scratch, tokens = Scratch(held), list[int]()
    watches = [layer.register_forward_hook(lambda _, args, y: tokens.append(y.nbytes)) for layer in layers]
    with lending(scratch):
        _forward_and_backward(algorithm, batch)  # tells how much
    for watch in watches:
        watch.remove()
    for parameter in algorithm.parameters():
        parameter.grad = None
    scratch.hold(torch.device("cpu"))
    for buffer in held.values():
        live.ignore(buffer)
    weights = sum(p.nbytes for layer in layers for p in layer.parameters() if p.requires_grad)
    device.add("buffers", weights + 3 * sum(tokens) + sum(buffer.nbytes for buffer in held.values()))
    with lending(scratch):
        yield


def _forward_and_backward(algorithm: Algorithm, batch: Batch) -> None:
    """As `Trainer.train_step`, without the layers' auxiliary losses, which are as small as routers."""
    inputs, labels = batch
    dtype = next(p.dtype for p in algorithm.parameters() if p.is_floating_point())
    loss, _ = algorithm({k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}, labels, 0)
    loss.backward()


def variants(config: TrainConfig) -> Iterator[TrainConfig]:
    """The configuration under every ZeRO stage that it can have, with and without offloading and checkpointing."""
    stages: tuple[Any, ...] = (0, 1, 2) if config.parallel.precision == "fp32" else (1, 2)
    for checkpointing, stage, offload in product((False, True), stages, (False, True)):
        if stage or not offload:
            chosen = dict(zero_stage=stage, offload_optimizer=offload, gradient_checkpointing=checkpointing)
            chosen |= dict(cuda_graphs=config.parallel.cuda_graphs and not checkpointing)  # which goes without
            yield replace(config, parallel=replace(config.parallel, **chosen))


# -- the model without data, weights or memory ------------------------------------------------------------------------


def task_of_sizes(config: TrainConfig) -> TaskData:
    """The task with made-up items, of which `collate` knows the number only, and random weights.

    Raises UserError where the backbone's architecture cannot be had without a network.
    """
    task = find_task(config.data.task)

    def collate(items: Sequence[Any]) -> Batch:
        return task.made_up(config, len(items))

    items: Any = [range(_ITEMS)] * task.training_sets()
    names, make = tuple(map(str, range(len(items)))), partial(task.untrained, config)
    return TaskData(task.name, task.num_classes, items, items, items, names, collate, make)


def sizes_of_algorithm(config: TrainConfig, task: TaskData, ranks: int) -> Algorithm:
    """The training algorithm and its models on the meta device, where only sizes exist, with one rank's experts.

    `task` is of `task_of_sizes`; `ranks` share one set of experts.
    """
    single = replace(config, model=replace(config.model, dispatcher="auto"))
    with without_storage():
        algorithm = build.build_algorithm(single, task)
    algorithm.to(_DTYPES[config.parallel.precision])
    for layer in moe_layers(algorithm).values() if ranks > 1 else ():
        for name, parameter in list(layer.experts.named_parameters()):
            setattr(layer.experts, name, nn.Parameter(parameter[: len(parameter) // ranks], parameter.requires_grad))
    return algorithm.train()


def fake_storage(model: nn.Module) -> None:
    """Give a model of the meta device fake storage on the CPU, inside a `FakeTensorMode`; in place.

    Meta tensors do not do for running it, as parts of it make tensors on the CPU. Tied weights stay one tensor.
    """
    places: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
    for first, *others in places.values():
        for module, _, own in (name.rpartition(".") for name in others):
            setattr(model.get_submodule(module), own, model.get_parameter(first))
