"""On which nodes the ranks of an expert-parallel group are, and its groups inside and between nodes.

node 0:  rank 0   rank 1   rank 2   rank 3      a node's ranks are its inner group;
node 1:  rank 4   rank 5   rank 6   rank 7      ranks with one place in their nodes (0 and 4) are a rail
"""

import os
import socket
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any
from weakref import WeakValueDictionary

import torch.distributed as dist

from unifmoe_dist.errors import UserError

ADVICE = "start equally many ranks on each node, in the order of the nodes, or use dispatcher 'alltoall'"


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes of a group.

    Args:
        group: The expert-parallel group; its ranks are numbered node by node.
        inner: The ranks of this rank's node.
        rail: The ranks that have this rank's place in their nodes.
    """

    group: dist.ProcessGroup
    inner: dist.ProcessGroup
    rail: dist.ProcessGroup
    number: int = field(init=False)
    """Nodes."""
    width: int = field(init=False)
    """Ranks on each."""
    own: int = field(init=False)
    """Number of this rank's node."""

    def __post_init__(self) -> None:
        width = dist.get_world_size(self.inner)
        object.__setattr__(self, "width", width)
        object.__setattr__(self, "number", dist.get_world_size(self.rail))
        object.__setattr__(self, "own", dist.get_rank(self.group) // width)


def ranks_on_each(places: Sequence[Hashable]) -> int:
    """Ranks on each node, where rank r is on node places[r].

    Raises:
        UserError: a node's ranks do not stand together, or nodes have different numbers of ranks.
    """
    runs = [(place, len(list(ranks))) for place, ranks in groupby(places)]
    if len({place for place, _ in runs}) < len(runs):
        listed = ", ".join(f"rank {rank} on {place}" for rank, place in enumerate(places))
        raise UserError(f"the ranks of a node must stand together in expert_group, but it has {listed}; {ADVICE}.")
    if len({ranks for _, ranks in runs}) > 1:
        listed = ", ".join(f"{ranks} on {place}" for place, ranks in runs)
        raise UserError(f"nodes must have equally many ranks of expert_group, but it has {listed}; {ADVICE}.")
    return runs[0][1]


def find_ranks_per_node(group: dist.ProcessGroup, given: int | None) -> int:
    """Ranks of `group` on each node; collective.

    Raises:
        UserError: as `ranks_on_each`; `given` does not divide the group or differs between ranks.
    """
    size = dist.get_world_size(group)
    if given is not None and (given < 1 or size % given):
        raise UserError(f"ranks_per_node {given} must divide the {size} ranks of expert_group; choose a divisor.")
    if given is None and os.environ.get("LOCAL_WORLD_SIZE") == str(dist.get_world_size()):
        return size  # the launcher says that the whole job is on one node
    told: list[Any] = [None] * size
    dist.all_gather_object(told, (given, socket.gethostname()), group=group)
    if len({number for number, _ in told}) > 1:
        listed = ", ".join(str(number) for number, _ in told)
        raise UserError(f"ranks_per_node must be the same on all ranks of expert_group, but it is {listed} by rank.")
    return given or ranks_on_each([host for _, host in told])


_known: WeakValueDictionary[tuple[dist.ProcessGroup, int], Nodes] = WeakValueDictionary()


def nodes_of(group: dist.ProcessGroup, width: int) -> Nodes:
    """The nodes of `group`, of `width` ranks each, shared by all layers; collective over it at the first use."""
    if nodes := _known.get((group, width)):
        return nodes
    ranks = dist.get_process_group_ranks(group)
    own = dist.get_rank(group)
    timeout = group._get_backend(group._device_types[0]).options._timeout
    first = own // width * width

    def made(members: list[int]) -> Any:
        return dist.new_group(members, timeout=timeout, use_local_synchronization=True)

    nodes = _known[group, width] = Nodes(group, made(ranks[first : first + width]), made(ranks[own % width :: width]))
    return nodes
