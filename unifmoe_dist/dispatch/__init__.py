"""Dispatchers: how tokens reach residual experts on other ranks."""

import torch.distributed as dist

from unifmoe_dist.dispatch.alltoall import AllToAllDispatcher
from unifmoe_dist.dispatch.capacity import limit_load
from unifmoe_dist.dispatch.chunks import ChunkedDispatcher
from unifmoe_dist.dispatch.local import LocalDispatcher
from unifmoe_dist.dispatch.nodes import find_ranks_per_node, nodes_of
from unifmoe_dist.dispatch.protocol import Arrivals, Dispatcher, Exchange, Experts
from unifmoe_dist.dispatch.tutel import TutelDispatcher
from unifmoe_dist.dispatch.two_level import TwoLevelDispatcher
from unifmoe_dist.errors import UserError

DISPATCHERS = ("auto", "local", "alltoall", "tutel", "two_level")


def make_dispatcher(
    name: str, group: dist.ProcessGroup | None, ranks_per_node: int | None = None, chunks: int = 1
) -> Dispatcher:
    """The dispatcher called `name` for the ranks of `group` (None: all experts on this rank); collective over it.

    Args:
        name: "auto" takes `two_level` where the group spans nodes with equally many ranks, more than one, on each.
        group: The expert-parallel group.
        ranks_per_node: Ranks of the group on each node; None finds out from the names of hosts.
        chunks: Parts in which a rank's tokens travel.

    Raises:
        UserError: the name is unknown, `local` was asked for while the experts are spread over several ranks, `tutel`
            where Tutel is not installed, or `two_level` where nodes differ in their number of ranks.
    """
    if name not in DISPATCHERS:
        raise UserError(f"dispatcher {name!r} is not known; choose one of {', '.join(DISPATCHERS)}.")
    if chunks < 1:
        raise UserError(f"dispatch_chunks {chunks} must be 1 or more.")
    size = 1 if group is None else dist.get_world_size(group)
    if name == "local" and size > 1:
        raise UserError(
            f"dispatcher 'local' needs all experts on one rank, but expert_group has {size}; use 'alltoall' or 'auto'."
        )
    made = TutelDispatcher(group) if name == "tutel" else _exchange(name, group, size, ranks_per_node)
    return made if made.local or chunks == 1 else ChunkedDispatcher(made, chunks)


def _exchange(name: str, group: dist.ProcessGroup | None, size: int, ranks_per_node: int | None) -> Dispatcher:
    if group is None or (name != "alltoall" and size == 1):
        return LocalDispatcher()
    if name == "alltoall" or (name == "auto" and size < 4 and ranks_per_node is None):
        return AllToAllDispatcher(group)
    try:
        width = find_ranks_per_node(group, ranks_per_node)
    except UserError:
        if name == "auto" and ranks_per_node is None:
            return AllToAllDispatcher(group)
        raise
    if width in (1, size):  # one level alone
        return AllToAllDispatcher(group)
    return TwoLevelDispatcher(nodes_of(group, width))


__all__ = [
    "DISPATCHERS",
    "Arrivals",
    "Dispatcher",
    "Exchange",
    "Experts",
    "LocalDispatcher",
    "limit_load",
    "make_dispatcher",
]
