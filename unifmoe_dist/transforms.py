"""Transforms of torch.func: grad, vmap, jvp and what is made of them."""

from __future__ import annotations

import torch


def in_transform() -> bool:
    """Whether tensors are wrapped by one now: they must not outlive it, and functions with a backward pass written by
    hand do not take them."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None
