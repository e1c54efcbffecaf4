"""Expert-parallel exchange over torch.distributed, on gloo and NCCL.

A token crosses to a rank once, whatever the number of its experts there, as one packed row of bytes: the token, its
float32 gates for that rank's experts and its block mask as bits. The rank returns one summed row. Split sizes carry
the variable counts, so nothing is padded and nothing dropped. Each crossing is a launch and a landing; both are
autograd functions, so that other work can run in between, in the backward pass as well.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from unifmoe_dist.dispatch.base import Arrivals
from unifmoe_dist.errors import UserError


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

    def __reduce__(self) -> Any:
        raise UserError(
            "a model whose experts are spread over ranks cannot be pickled: this rank holds only a part; save a "
            "state_dict() on every rank, or train with launch/train.py and run launch/consolidate.py on the result."
        )

    @torch.compiler.disable
    def dispatch(self, x: Tensor, gates: Tensor, blocks: Tensor) -> _AllToAllExchange:
        return _AllToAllExchange(self.group, self.size, x, gates, blocks)


class _AllToAllExchange:
    def __init__(self, group: dist.ProcessGroup, size: int, x: Tensor, gates: Tensor, blocks: Tensor) -> None:
        self.num_tokens, self.num_blocks = x.shape[0], blocks.shape[1]
        gates_per_rank = gates.reshape(x.shape[0], size, gates.shape[1] // size)
        goes = (gates_per_rank.detach() != 0).any(-1).T  # (ranks, N)
        rank, self.token = goes.nonzero(as_tuple=True)
        sent = goes.sum(-1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        there = _Route(group, sent.tolist(), received.tolist())
        self.back = there.reversed()
        self.flight = _Flight(there)
        self.launched = _Launch.apply(
            self.flight, x[self.token], gates_per_rank[self.token, rank], _pack_bits(blocks[self.token])
        )

    @torch.compiler.disable
    def arrivals(self) -> Arrivals:
        x, gates, bits = _Land.apply(self.flight, *self.launched)
        return Arrivals(x, gates, _unpack_bits(bits, self.num_blocks))

    @torch.compiler.disable
    def combine(self, rows: Tensor) -> Tensor:
        flight = _Flight(self.back)
        (home,) = _Land.apply(flight, *_Launch.apply(flight, rows))
        total = home.new_zeros((self.num_tokens, home.shape[1]), dtype=torch.promote_types(home.dtype, torch.float32))
        return total.index_add(0, self.token, home.to(total.dtype)).to(home.dtype)


class _Route:
    """Row counts to and from every rank of a group."""

    def __init__(self, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> None:
        self.group, self.sent, self.received = group, sent, received

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

    def land(self) -> list[Tensor]:
        assert self.work is not None  # None only for a rank outside the group
        self.work.wait()
        widths = [width * dtype.itemsize for dtype, width in self.kinds]
        parts = self.buffer.split(widths, dim=1)
        rows = self.buffer.shape[0]
        return [
            part.contiguous().view(-1).view(dtype).view(rows, width)
            for part, (dtype, width) in zip(parts, self.kinds, strict=True)
        ]

    def placeholders(self) -> tuple[Tensor, ...]:
        rows = self.buffer.shape[0]
        return tuple(
            torch.zeros((), dtype=dtype, device=self.buffer.device).expand(rows, width) for dtype, width in self.kinds
        )


class _Flight:
    """State that a launch and its landing share: the route, and what is in the air in each direction."""

    def __init__(self, route: _Route) -> None:
        self.route = route
        self.forward: _Crossing | None = None
        self.backward: _Crossing | None = None


class _Launch(torch.autograd.Function):
    """Forward starts the crossing and returns placeholders; backward lands the gradients."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.flight = flight
        flight.forward = _Crossing(flight.route, tensors)
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
        kept = tuple(g for g, floating in zip(grads, ctx.floating, strict=True) if floating)
        crossing = _Crossing(ctx.flight.route.reversed(), kept)
        ctx.flight.backward = crossing
        rows = grads[0].shape[0]
        return (None, *(g.new_zeros(()).expand(rows, g.shape[1]) if f else None
                        for g, f in zip(grads, ctx.floating, strict=True)))  # fmt: skip


def _bytes(rows: Tensor) -> Tensor:
    flat = rows.contiguous().view(-1).view(torch.uint8)
    return flat.view(rows.shape[0], rows.shape[1] * rows.element_size())


def _pack_bits(mask: Tensor) -> Tensor:
    """(N, B) bool -> (N, ceil(B / 8)) uint8, lowest bit first."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % 8)).view(mask.shape[0], (mask.shape[1] + 7) // 8, 8)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (padded * weights).sum(-1, dtype=torch.uint8)


def _unpack_bits(bits: Tensor, num_blocks: int) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :num_blocks]
