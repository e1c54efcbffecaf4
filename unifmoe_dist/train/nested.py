"""Tensors in what batches are made of: tuples, lists and mappings, one in the other."""

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with every tensor in it changed; tuples, lists and mappings keep their kinds, anything else stays.

    A BatchEncoding of Transformers is a mapping.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, MutableMapping):
        changed = copy.copy(value)  # with what else it knows, such as the encodings of a BatchEncoding
        changed.update({name: map_tensors(part, change) for name, part in value.items()})
        return changed
    if isinstance(value, Mapping):
        return {name: map_tensors(part, change) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named one
        return type(value)(*(map_tensors(part, change) for part in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(part, change) for part in value)
    return value


def pinned(tensor: Tensor) -> Tensor:
    """A tensor of the CPU in memory that a device reads by itself; another one as it is."""
    return tensor.pin_memory() if tensor.device.type == "cpu" and not tensor.is_pinned() else tensor


def to_device(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """`value` with its tensors on the device; floating-point ones take `dtype`."""
    return map_tensors(value, lambda t: t.to(device, dtype if t.is_floating_point() else None))
