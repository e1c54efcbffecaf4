"""A combination that torch refuses in words of its own.

Reentrant activation checkpointing runs a backward pass of its own for each part, and another follows for what the loss
takes straight from a parameter. DistributedDataParallel expects each parameter's gradient once; with a
static graph it takes both, but the first step's gradients came out wrong on two ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from unifmoe_dist.eager import called_by, not_compiled
from unifmoe_dist.errors import UserError
from unifmoe_dist.usage import recomputing


@not_compiled
def note_first_pass(layer: Any) -> None:
    """Remember whether this is the first, gradient-free pass of reentrant checkpointing under DDP."""
    if not recomputing():
        under_ddp = DistributedDataParallel._active_ddp_module is not None
        gradient_free = under_ddp and layer.training and not torch.is_grad_enabled()
        layer.reentrant_under_ddp = gradient_free and _inside_function()


def _inside_function() -> bool:
    """Whether the forward of some `torch.autograd.Function` has called us, as reentrant checkpointing does."""
    return called_by(lambda code: code.co_name == "forward" and code.co_varnames[:1] == ("ctx",))


def refuse_second_gradient(layer: Any, parameter: torch.Tensor) -> None:
    """Raise UserError where a loss taken from `parameter` itself would give it a second gradient."""
    if layer.reentrant_under_ddp and torch.is_grad_enabled() and parameter.requires_grad:
        raise UserError(
            "the Gram loss cannot be trained under DistributedDataParallel with reentrant activation checkpointing, "
            "which would give the router two gradients; checkpoint with use_reentrant=False "
            '(gradient_checkpointing_kwargs={"use_reentrant": False}).'
        )
