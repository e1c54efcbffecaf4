"""Activations by name, each with its derivative, for kernels with a hand-written backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "tanh": torch.tanh,
    "identity": lambda x: x,
}


def activation_and_gradient(name: str, pre: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Return act(pre) and upstream * act'(pre), both shaped and typed like `pre`."""
    if name == "gelu":
        return F.gelu(pre), torch.ops.aten.gelu_backward(upstream, pre, approximate="none")
    if name == "gelu_tanh":
        return F.gelu(pre, approximate="tanh"), torch.ops.aten.gelu_backward(upstream, pre, approximate="tanh")
    if name == "silu":
        return F.silu(pre), torch.ops.aten.silu_backward(upstream, pre)
    with torch.enable_grad():
        leaf = pre.detach().requires_grad_()
        value = FUNCTIONS[name](leaf)
        (gradient,) = torch.autograd.grad(value, leaf, upstream)
    return value.detach(), gradient
