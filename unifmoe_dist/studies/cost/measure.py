"""Seconds and memory of training and inference steps on the device at hand: T-TPS, I-TPS, T-RTM, I-RTM.

On CUDA, memory is the allocator's peak. A CPU has no such counter, and a process's resident memory also holds the
libraries and what earlier measurements left: there it is the peak of the bytes that live tensors hold, parameters,
gradients and optimiser states included, temporaries inside one operation not. `MeasuredCost.memory_kind` says which.
"""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

MEMORY_UNIT = 2**30


@dataclass(frozen=True)
class MeasuredCost:
    """Medians over the repeats.

    Args:
        train_seconds: T-TPS, forward, loss, backward and update.
        eval_seconds: I-TPS.
        train_memory: T-RTM, bytes.
        eval_memory: I-RTM, bytes.
        memory_kind: "CUDA allocator" or "live tensors".
        device: Name of the device.
    """

    train_seconds: float
    eval_seconds: float
    train_memory: int
    eval_memory: int
    memory_kind: str
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
    held_out = _move(eval_inputs, device)
    eval_seconds, eval_memory = _inference(deploy().to(device).eval(), held_out, device, repeats, warmup)
    inputs, labels = _move(train_batch[0], device), train_batch[1].to(device)
    trained = prepare().to(device).train()
    optimizer = torch.optim.Adam(trained.parameters(), lr=1e-5)

    def train() -> None:
        optimizer.zero_grad()
        loss_of(trained, inputs, labels).backward()
        optimizer.step()

    given = [*_tensors(trained), *inputs.values(), labels]
    train_seconds, train_memory = _measure(train, given, device, repeats, warmup)
    cuda = device.type == "cuda"
    return MeasuredCost(
        train_seconds,
        eval_seconds,
        train_memory,
        eval_memory,
        "CUDA allocator" if cuda else "live tensors",
        torch.cuda.get_device_name(device) if cuda else "CPU",
    )


def _inference(
    model: nn.Module, inputs: dict[str, Tensor], device: torch.device, repeats: int, warmup: int
) -> tuple[float, int]:
    """A function of its own: the model is gone when it returns."""

    def infer() -> None:
        with torch.no_grad():
            model(**inputs)

    return _measure(infer, [*_tensors(model), *inputs.values()], device, repeats, warmup)


def _measure(
    step: Callable[[], None], given: list[Tensor], device: torch.device, repeats: int, warmup: int
) -> tuple[float, int]:
    """Median seconds of a step, and peak bytes of one; `given` tensors exist before."""
    memory = _peak_memory(step, given, device)  # of the first steps: optimiser states are born inside them
    for _ in range(warmup):
        step()
    seconds = []
    for _ in range(repeats):
        _wait(device)
        started = time.perf_counter()
        step()
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), memory


def _peak_memory(step: Callable[[], None], given: list[Tensor], device: torch.device) -> int:
    """Peak bytes over two steps: the states and gradients that the first leaves are there in the second."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        step()
        _wait(device)
        return torch.cuda.max_memory_allocated(device)
    with LiveTensors(given) as live:
        step()
        step()
    return live.peak


class LiveTensors(TorchDispatchMode):
    """Bytes of all storages that operations inside the context make and that still live, and their peak.

    Args:
        given: Tensors made before that count from the start.
    """

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()
        for tensor in given:
            self._note(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return tree_map_only(Tensor, self._note, func(*args, **(kwargs or {})))

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in self._known:  # a storage keeps one Python object as long as it lives
            self._known.add(id(storage))
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, id(storage), storage.nbytes())
        return tensor

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _move(inputs: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
