"""The memory of a training step, rank by rank and kind by kind, without taking it.

The step itself is run, forward and backward, on fake tensors: the real model, at the real batch size, in the real
number format, with gradient checkpointing where it is on; every storage counts from its first tensor to its last. Two
parts are stood for: layers of experts (`stand_ins.py`) and the engine (`engine.py`). So the peak is the peak of a
timeline, and its parts are what was held at that moment.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from unifmoe_dist.algorithms import Algorithm
from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.task import Batch
from unifmoe_dist.studies.memory.engine import EngineMemory, Group
from unifmoe_dist.studies.memory.models import fake_storage, sizes_of_algorithm, stand_in_for_experts, task_of_sizes
from unifmoe_dist.studies.memory.operators import gpu_operators
from unifmoe_dist.studies.memory.stand_ins import Load
from unifmoe_dist.studies.meters import Ledger, LiveBytes
from unifmoe_dist.train import build, deepspeed

KINDS = ("weights", "master weights", "optimiser states", "gradients", "activations", "buffers")


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
        return sum(self.device.values())


def estimate(config: TrainConfig, ranks: int = 1, gpu: bool = True, load: Load | None = None) -> MemoryEstimate:
    """Estimate a run's peak.

    Args:
        config: Configuration; needs neither data set, weights nor a network.
        ranks: World size.
        gpu: Whether ranks are GPUs with Triton kernels, or CPU processes, which keep offloaded states beside the rest.
        load: What routing is taken to decide; None takes what routers start with (`Load.at_start`). On GPUs it matters
            between ranks only: the buffers of the kernels there do not depend on it.

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
        stand_in_for_experts(algorithm, gpu, load, size)
        groups = [
            Group(g["params"], moe := bool(g.get("moe")), ranks // size if moe else ranks, g["weight_decay"] > 0)
            for g in build.parameter_groups(algorithm, config.optim.weight_decay, decay=config.optim.decay)
        ]
        live = LiveBytes(device)
        engine = EngineMemory(groups, config, live, host, foreach=gpu, bucket=deepspeed.reduce_bucket(algorithm))
        engine.hold()
        trained = {p for group in groups for p in group.parameters}
        tensors = (*algorithm.parameters(), *algorithm.buffers())
        device.add("weights", sum(t.nbytes for t in tensors if t not in trained))
        for tensor in tensors:
            live.ignore(tensor)
        micro_batches = min(2, parallel.gradient_accumulation)  # further ones repeat the second
        for number in range(micro_batches):
            with gpu_operators() if gpu else nullcontext(), live:
                _forward_and_backward(algorithm, task.collate([*range(items)]))
            engine.reduce(boundary=number == micro_batches - 1)
        engine.update()
    parameters = sum(group.size for group in groups)
    return MemoryEstimate(config, ranks, device.peak, device.most, elsewhere.peak, parameters, items)


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
            yield replace(config, parallel=replace(config.parallel, **chosen))
