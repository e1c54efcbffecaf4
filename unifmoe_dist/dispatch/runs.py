"""A run of bytes from every rank to every other one.

gloo's own all-to-all posts the send to a peer before the receive. The note that a rank is ready to receive then waits
behind its own bytes on the pair's one connection, and the two directions of a link take turns. Here every receive is
posted before any send.
"""

from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor


class Work(Protocol):
    """What has been started."""

    def wait(self) -> Any:
        """Until all bytes are here."""


def start_runs(
    arrived: Tensor, sent: Tensor, output_splits: list[int], input_splits: list[int], group: dist.ProcessGroup
) -> Work | Any:
    """Start sending; as `torch.distributed.all_to_all_single` with the same arguments, which does it but on gloo."""
    if sent.device.type == "cpu" and group._get_backend(torch.device("cpu")).name() == "gloo":
        return _PeerToPeer(arrived, sent, output_splits, input_splits, group)
    return dist.all_to_all_single(arrived, sent, output_splits, input_splits, group=group, async_op=True)


_dropped: WeakKeyDictionary[dist.ProcessGroup, list[Any]] = WeakKeyDictionary()
"""What nobody waits for, by group: a recomputation may stop between a start and its wait. A receive that goes before
its message has come would have the pair of ranks stand still."""


class _PeerToPeer:
    """Receives, then sends; peers from the next rank on, so that no rank is everyone's first.

    Of two ranks, gloo hands the messages over in the order in which they were sent.
    """

    def __init__(
        self, arrived: Tensor, sent: Tensor, output_splits: list[int], input_splits: list[int], group: dist.ProcessGroup
    ) -> None:
        for work in _dropped.pop(group, ()):
            work.wait()
        ranks, own = dist.get_process_group_ranks(group), dist.get_rank(group)
        into, of = arrived.split(output_splits), sent.split(input_splits)
        peers = [*range(own + 1, len(ranks)), *range(own)]
        works = [dist.irecv(into[peer], ranks[peer], group) for peer in reversed(peers) if output_splits[peer]]
        works += [dist.isend(of[peer], ranks[peer], group) for peer in peers if input_splits[peer]]
        self.works: list[Any] = works
        self.group = group
        into[own].copy_(of[own])

    def wait(self) -> None:
        works, self.works = self.works, []
        for work in works:
            work.wait()

    def __del__(self) -> None:
        if getattr(self, "works", None):
            _dropped.setdefault(self.group, []).extend(self.works)
