"""Dispatchers: how tokens reach residual experts on other ranks."""

from __future__ import annotations

import torch.distributed as dist

from unifmoe_dist.dispatch.alltoall import AllToAllDispatcher
from unifmoe_dist.dispatch.capacity import limit_load
from unifmoe_dist.dispatch.local import LocalDispatcher
from unifmoe_dist.dispatch.protocol import Arrivals, Dispatcher, Exchange
from unifmoe_dist.dispatch.tutel import TutelDispatcher
from unifmoe_dist.errors import UserError

DISPATCHERS = ("auto", "local", "alltoall", "tutel")


def make_dispatcher(name: str, group: dist.ProcessGroup | None) -> Dispatcher:
    """The dispatcher called `name` for the ranks of `group` (None: all experts on this rank).

    Raises:
        UserError: the name is unknown, `local` was asked for while the experts are spread over several ranks, or
            `tutel` where Tutel is not installed.
    """
    if name not in DISPATCHERS:
        raise UserError(f"dispatcher {name!r} is not known; choose one of {', '.join(DISPATCHERS)}.")
    size = 1 if group is None else dist.get_world_size(group)
    if name == "local" and size > 1:
        raise UserError(
            f"dispatcher 'local' needs all experts on one rank, but expert_group has {size}; use 'alltoall' or 'auto'."
        )
    if name == "tutel":
        return TutelDispatcher(group)
    if group is None or (name != "alltoall" and size == 1):
        return LocalDispatcher()
    return AllToAllDispatcher(group)


__all__ = ["DISPATCHERS", "Arrivals", "Dispatcher", "Exchange", "LocalDispatcher", "limit_load", "make_dispatcher"]
