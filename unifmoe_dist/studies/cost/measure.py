"""Seconds and memory of training and inference steps on the device at hand: T-TPS, I-TPS, T-RTM, I-RTM.

On CUDA, memory is the allocator's peak. A CPU has no such counter, and a process's resident memory also holds the
libraries and what earlier measurements left: there it is the peak of the bytes that live tensors hold, parameters,
gradients and optimiser states included, temporaries inside one operation not. `MeasuredCost.memory_kind` says which.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unifmoe_dist.studies.meters import peak_bytes
from unifmoe_dist.studies.timing import seconds

MEMORY_UNIT = 2**30


@dataclass(frozen=True)
class MeasuredCost:
    """Medians over the repeats, in seconds and bytes."""

    train_seconds: float  # T-TPS: forward, loss, backward and update
    eval_seconds: float  # I-TPS
    train_memory: int  # T-RTM
    eval_memory: int  # I-RTM
    memory_kind: str  # "CUDA allocator" or "live tensors"
    device: str


def measure_cost(
    deploy: Callable[[], nn.Module],
    prepare: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, Mapping[str, Tensor], Tensor], Tensor],
    train_batch: tuple[Mapping[str, Tensor], Tensor],
    eval_inputs: Mapping[str, Tensor],
    device: torch.device,
    repeats: int = 10,
    warmup: int = 2,
) -> MeasuredCost:
    """Measure a method, built anew for inference and for training, so that neither holds the other's memory.

    Args:
        deploy: Makes the model that is deployed, on the CPU.
        prepare: Makes what is trained, on the CPU: the model with all that only training needs.
        loss_of: `loss_of(trained, inputs, labels)`, auxiliary losses included.
        train_batch: Inputs and labels of a training step (the paper: 32 images of each training environment).
        eval_inputs: Inputs of an inference step (the paper: 64 images).
        device: Where.
        repeats: Timed steps.
        warmup: Steps before.
    """

    def medians(model: nn.Module, step: Callable[[], object], *given: Tensor) -> tuple[float, int]:
        # The peak is that of the first two steps: the states and gradients that the first leaves are there in the next.
        held = [*model.parameters(), *model.buffers(), *given]
        memory = peak_bytes(lambda: (step(), step()), device, held)
        times = [seconds(step, device) for _ in range(warmup + repeats)]
        return statistics.median(times[warmup:]), memory

    def inference() -> tuple[float, int]:
        model, inputs = deploy().to(device).eval(), {name: tensor.to(device) for name, tensor in eval_inputs.items()}
        return medians(model, torch.no_grad()(lambda: model(**inputs)), *inputs.values())

    def training() -> tuple[float, int]:
        model, inputs = prepare().to(device).train(), {n: tensor.to(device) for n, tensor in train_batch[0].items()}
        labels, optimizer = train_batch[1].to(device), torch.optim.Adam(model.parameters(), lr=1e-5)

        def step() -> None:
            optimizer.zero_grad()
            loss_of(model, inputs, labels).backward()
            optimizer.step()

        return medians(model, step, *inputs.values(), labels)

    (eval_seconds, eval_memory), (train_seconds, train_memory) = inference(), training()
    cuda = device.type == "cuda"
    kind, name = ("CUDA allocator", torch.cuda.get_device_name(device)) if cuda else ("live tensors", "CPU")
    return MeasuredCost(train_seconds, eval_seconds, train_memory, eval_memory, kind, name)
