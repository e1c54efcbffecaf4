"""Expert-parallel exchange over torch.distributed, on gloo and NCCL.

A token crosses to a rank once, whatever the number of its experts there: its row, bits for its blocks and for its
active experts there, and one float32 gate for each of those experts. The rank returns one summed row. All that one
rank sends another is a single run of bytes, and split sizes carry the variable counts, so nothing is padded and
nothing dropped. Each crossing is a launch and a landing; both are autograd functions, so that other work can run in
between, in the backward pass as well.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from unifmoe_dist.dispatch.base import Arrivals


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
    def dispatch(self, x: Tensor, gates: Tensor, blocks: Tensor) -> _AllToAllExchange:
        return _AllToAllExchange(self.group, self.size, x, gates, blocks)


class _AllToAllExchange:
    def __init__(self, group: dist.ProcessGroup, size: int, x: Tensor, gates: Tensor, blocks: Tensor) -> None:
        self.num_tokens, self.num_blocks, self.num_local = x.shape[0], blocks.shape[1], gates.shape[1] // size
        gates_RNE = gates.reshape(x.shape[0], size, self.num_local).transpose(0, 1)  # E: experts of one rank
        active_RNE = gates_RNE.detach() != 0  # true for NaN, so that a NaN token stays NaN
        goes_RN = active_RNE.any(-1)
        rank, self.token = goes_RN.nonzero(as_tuple=True)
        sent = torch.stack([goes_RN.sum(1), active_RNE.sum((1, 2))], dim=1)  # (ranks, 2): rows and gates
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        rows, values = (_Route(group, *counts) for counts in zip(sent.T.tolist(), received.T.tolist(), strict=True))
        self.back = rows.reversed()
        self.flight = _Flight((rows, rows, values))
        bits = _pack_bits(torch.cat([blocks[self.token], active_RNE[rank, self.token]], dim=1))
        self.launched = _Launch.apply(self.flight, x[self.token], bits, gates_RNE.masked_select(active_RNE))

    @torch.compiler.disable
    def arrivals(self) -> Arrivals:
        x, bits, values = _Land.apply(self.flight, *self.launched)
        blocks, active = _unpack_bits(bits, self.num_blocks + self.num_local).split(
            [self.num_blocks, self.num_local], dim=1
        )
        gates = values.new_zeros(active.shape).masked_scatter(active, values)
        return Arrivals(x, gates, blocks)

    @torch.compiler.disable
    def combine(self, rows: Tensor) -> Tensor:
        flight = _Flight((self.back,))
        (home,) = _Land.apply(flight, *_Launch.apply(flight, rows))
        total = home.new_zeros((self.num_tokens, home.shape[1]), dtype=torch.promote_types(home.dtype, torch.float32))
        return total.index_add(0, self.token, home.to(total.dtype)).to(home.dtype)


class _Route:
    """Row counts of one tensor to and from every rank of a group."""

    def __init__(self, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> None:
        self.group, self.sent, self.received = group, sent, received

    def reversed(self) -> _Route:
        return _Route(self.group, self.received, self.sent)


class _Crossing:
    """Several tensors on their way, each along its route. What one rank is sent of them all is one run of bytes."""

    def __init__(self, routes: tuple[_Route, ...], tensors: tuple[Tensor, ...]) -> None:
        self.routes = routes
        self.kinds = [(t.dtype, t.shape[1:]) for t in tensors]
        widths = [t.dtype.itemsize * t.shape[1:].numel() for t in tensors]
        self.sent_bytes = _bytes_by_rank([r.sent for r in routes], widths)
        self.received_bytes = _bytes_by_rank([r.received for r in routes], widths)
        flat = [t.contiguous().view(-1).view(torch.uint8) for t in tensors]
        self.sent = flat[0]  # kept until landed
        if len(flat) > 1:
            parts = [t.split([row[i] for row in self.sent_bytes]) for i, t in enumerate(flat)]
            self.sent = torch.cat([part for of_rank in zip(*parts, strict=True) for part in of_rank])
        received, sent = ([sum(row) for row in table] for table in (self.received_bytes, self.sent_bytes))
        self.buffer = self.sent.new_empty(sum(received))
        self.work = dist.all_to_all_single(
            self.buffer, self.sent, received, sent, group=routes[0].group, async_op=True
        )

    def land(self) -> list[Tensor]:
        assert self.work is not None  # None only for a rank outside the group
        self.work.wait()
        flat = [self.buffer]
        if len(self.kinds) > 1:
            parts = self.buffer.split([size for row in self.received_bytes for size in row])
            flat = [torch.cat(parts[i :: len(self.kinds)]) for i in range(len(self.kinds))]
        return [t.view(dtype).view(-1, *shape) for t, (dtype, shape) in zip(flat, self.kinds, strict=True)]

    def placeholders(self) -> tuple[Tensor, ...]:
        return tuple(
            torch.zeros((), dtype=dtype, device=self.buffer.device).expand(sum(route.received), *shape)
            for route, (dtype, shape) in zip(self.routes, self.kinds, strict=True)
        )


class _Flight:
    """State that a launch and its landing share: the routes, and what is in the air in each direction."""

    def __init__(self, routes: tuple[_Route, ...]) -> None:
        self.routes = routes
        self.forward: _Crossing | None = None
        self.backward: _Crossing | None = None


class _Launch(torch.autograd.Function):
    """Forward starts the crossing and returns placeholders; backward lands the gradients."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.flight = flight
        flight.forward = _Crossing(flight.routes, tensors)
        ctx.floating = [t.is_floating_point() for t in tensors]
        outputs = flight.forward.placeholders()
        ctx.mark_non_differentiable(*(o for o in outputs if not o.is_floating_point()))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        crossing, ctx.flight.backward = ctx.flight.backward, None
        landed = iter(crossing.land())
        return (None, *(next(landed) if floating else None for floating in ctx.floating))


class _Land(torch.autograd.Function):
    """Forward waits for the crossing; backward starts the gradients' crossing the other way."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, *placeholders: Tensor) -> tuple[Tensor, ...]:
        ctx.flight = flight
        crossing, flight.forward = flight.forward, None
        assert crossing is not None
        outputs = tuple(crossing.land())
        ctx.floating = [o.is_floating_point() for o in outputs]
        ctx.mark_non_differentiable(*(o for o in outputs if not o.is_floating_point()))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        routes = [r.reversed() for r, floating in zip(ctx.flight.routes, ctx.floating, strict=True) if floating]
        kept = [g for g, floating in zip(grads, ctx.floating, strict=True) if floating]
        ctx.flight.backward = _Crossing(tuple(routes), tuple(kept))
        return (None, *(g.new_zeros(()).expand_as(g) if f else None
                        for g, f in zip(grads, ctx.floating, strict=True)))  # fmt: skip


def _bytes_by_rank(counts: list[list[int]], widths: list[int]) -> list[list[int]]:
    """Row counts (tensors, ranks) and bytes per row of every tensor -> bytes (ranks, tensors)."""
    return [[n * width for n, width in zip(of_rank, widths, strict=True)] for of_rank in zip(*counts, strict=True)]


def _pack_bits(mask: Tensor) -> Tensor:
    """(N, B) bool -> (N, ceil(B / 8)) uint8, lowest bit first."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % 8)).view(mask.shape[0], (mask.shape[1] + 7) // 8, 8)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (padded * weights).sum(-1, dtype=torch.uint8)


def _unpack_bits(bits: Tensor, num_blocks: int) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :num_blocks]
