"""Memory of a training pass: what autograd keeps for the backward pass, and on a GPU the peak."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def kept_for_backward(forward: Callable[[], Tensor], parameters: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages that a forward pass keeps for its backward pass, parameters left out.

    Counts tensors that autograd saves, the input included, and those that functions written in Python hold as
    attributes of their own.
    """
    kept: dict[int, Tensor] = {}  # held until counted, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward()
    for tensor in _attributes(output):
        keep(tensor)
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in own)


def _attributes(output: Tensor) -> Iterator[Tensor]:
    """Tensors among the attributes of every Python function in the graph behind `output`."""
    ahead, seen = [output.grad_fn], set()
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        ahead += [following for following, _ in node.next_functions]
        yield from _tensors(list(getattr(node, "__dict__", {}).values()))


def _tensors(value: object) -> Iterator[Tensor]:
    """Tensors in a value: itself, the items of a list or tuple, the fields of a dataclass."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        yield from _tensors(list(vars(value).values()))


def peak(train: Callable[[], object], device: torch.device) -> int | None:
    """Largest memory of a training pass beyond what was held before, in bytes; None on the CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    train()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
