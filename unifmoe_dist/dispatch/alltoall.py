"""Expert-parallel exchange over torch.distributed, on gloo and NCCL.

A token crosses to a rank once, whatever the number of its experts there, as one packed row of bytes: the token, its
float32 gates for that rank's experts and its block mask as bits. The rank returns one summed row. Split sizes carry
the variable counts, so nothing is padded and nothing dropped.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unifmoe_dist.dispatch.base import Arrivals, gradient_needs
from unifmoe_dist.dispatch.bits import pack_bits, unpack_bits
from unifmoe_dist.dispatch.flight import Flight


class AllToAllDispatcher:
    """Exchanges tokens within `group`, whose ranks hold the residual experts contiguously in rank order.

    Args:
        group: The expert-parallel process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> AllToAllDispatcher:
        return self  # a process group cannot be copied, and the dispatcher holds nothing else

    @torch.compiler.disable
    def dispatch(self, x: Tensor, gates: Tensor, blocks: Tensor, trained: bool = True) -> _AllToAllExchange:
        return _AllToAllExchange(self.group, self.size, x, gates, blocks, gradient_needs(x, gates, trained))


class _AllToAllExchange:
    def __init__(
        self, group: dist.ProcessGroup, size: int, x: Tensor, gates: Tensor, blocks: Tensor, needs: list[int]
    ) -> None:
        self.num_tokens, self.num_blocks = x.shape[0], blocks.shape[1]
        gates_per_rank = gates.reshape(x.shape[0], size, gates.shape[1] // size)
        goes = (gates_per_rank.detach() != 0).any(-1).T  # (ranks, N); true for NaN
        rank, token = goes.nonzero(as_tuple=True)
        self.token = token
        sent = goes.sum(-1, keepdim=True)
        told = torch.cat([sent, sent.new_tensor(needs).expand(size, -1)], dim=1)
        heard = torch.empty_like(told)
        dist.all_to_all_single(heard, told, group=group)
        rows_out, rows_in, tokens_need, experts_need = torch.cat([sent, heard], dim=1).T.tolist()
        there = _Route(group, rows_out, rows_in)
        self.back, self.comes_back = there.reversed(), any(tokens_need) or any(experts_need)
        self.flight = Flight(there, any(tokens_need)).launch(
            x[token], gates_per_rank[token, rank], pack_bits(blocks[token])
        )

    @torch.compiler.disable
    def arrivals(self) -> Arrivals:
        x, gates, bits = self.flight.land()
        return Arrivals(x, gates, unpack_bits(bits, self.num_blocks))

    @torch.compiler.disable
    def combine(self, rows: Tensor) -> Tensor:
        (home,) = Flight(self.back, self.comes_back).launch(rows).land()
        total = home.new_zeros((self.num_tokens, home.shape[1]), dtype=torch.promote_types(home.dtype, torch.float32))
        return total.index_add(0, self.token, home.to(total.dtype)).to(home.dtype)


class _Route:
    """Row counts to and from every rank of a group."""

    def __init__(self, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> None:
        self.group, self.sent, self.received = group, sent, received

    def send(self, tensors: tuple[Tensor, ...]) -> _Crossing:
        return _Crossing(self, tensors)

    def reversed(self) -> _Route:
        return _Route(self.group, self.received, self.sent)


class _Crossing:
    """Rows of several tensors, packed side by side as bytes, on their way along a route."""

    def __init__(self, route: _Route, tensors: tuple[Tensor, ...]) -> None:
        packed = torch.cat([_bytes(t) for t in tensors], dim=1)
        self.kinds = [(t.dtype, t.shape[1]) for t in tensors]
        self.buffer = packed.new_empty((sum(route.received), packed.shape[1]))
        self.sent = packed  # kept alive until the work is done
        self.work = dist.all_to_all_single(
            self.buffer, packed, route.received, route.sent, group=route.group, async_op=True
        )

    def land(self) -> tuple[Tensor, ...]:
        assert self.work is not None  # None only for a rank outside the group
        self.work.wait()
        if len(self.kinds) == 1:
            return (_typed(self.buffer, self.kinds[0]),)
        parts = self.buffer.split([width * dtype.itemsize for dtype, width in self.kinds], dim=1)
        # clone, not contiguous: a single row counts as contiguous wherever it starts, and may start at any byte.
        copies = [part.clone(memory_format=torch.contiguous_format) for part in parts]
        return tuple(_typed(copy, kind) for copy, kind in zip(copies, self.kinds, strict=True))


def _bytes(rows: Tensor) -> Tensor:
    flat = rows.contiguous().view(-1).view(torch.uint8)
    return flat.view(rows.shape[0], rows.shape[1] * rows.element_size())


def _typed(rows: Tensor, kind: tuple[torch.dtype, int]) -> Tensor:
    dtype, width = kind
    return rows.view(-1).view(dtype).view(rows.shape[0], width)
