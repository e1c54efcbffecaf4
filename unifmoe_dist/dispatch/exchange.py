"""Tensors under way between ranks, as autograd sees them: a launch, room for other work, a landing.

Launch and landing are autograd nodes, so the gradients' way back is a launch and a landing too, with room for other
work between them. A rank must never wait for a collective that another does not start. In a backward pass the engine
takes, of the nodes that are ready, the one made last; ranks that made the same nodes therefore start the same
collectives in the same order. They make the same nodes when they agree on `differentiable`, whatever requires a
gradient on each of them.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Crossing(Protocol):
    """A collective that has been started."""

    def land(self) -> tuple[Tensor, ...]:
        """Wait for it and return what arrived, one tensor for each that was sent."""
        ...


class Route(Protocol):
    """Where rows go."""

    def send(self, tensors: tuple[Tensor, ...]) -> Crossing:
        """Start sending; does not wait."""
        ...

    def reversed(self) -> Route:
        """The way back."""
        ...


class Flight:
    """One use of a route.

    Args:
        route: Where the tensors go.
        differentiable: Whether gradients come back. Must be the same on all ranks of the route, and true where any of
            the tensors requires a gradient on any rank.
    """

    def __init__(self, route: Route, differentiable: bool) -> None:
        self._air = _Air(route)
        self._differentiable = differentiable

    def launch(self, *tensors: Tensor) -> Flight:
        """Start the crossing."""
        anchor = torch.zeros((), device=tensors[0].device, requires_grad=self._differentiable)
        self._ticket = _Launch.apply(self._air, anchor, *tensors)
        return self

    def land(self) -> tuple[Tensor, ...]:
        """Wait for the tensors that the other ranks sent here."""
        return _Land.apply(self._air, self._ticket)


class _Air:
    """What the two nodes of a flight share. Holds no tensor of the graph, so that no cycle keeps the graph alive."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self.forward: Crossing | None = None
        self.backward: Crossing | None = None


class _Launch(torch.autograd.Function):
    """Forward starts the crossing and returns a scalar that ties the landing to it; backward lands the gradients."""

    @staticmethod
    def forward(ctx: Any, air: _Air, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.air = air
        ctx.floating = [t.is_floating_point() for t in tensors]
        air.forward = air.route.send(tensors)
        return torch.zeros_like(anchor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        crossing, ctx.air.backward = ctx.air.backward, None
        landed = iter(crossing.land())
        return (None, None, *(next(landed) if floating else None for floating in ctx.floating))


class _Land(torch.autograd.Function):
    """Forward waits for the crossing; backward starts the gradients' crossing the other way."""

    @staticmethod
    def forward(ctx: Any, air: _Air, ticket: Tensor) -> tuple[Tensor, ...]:
        ctx.air = air
        crossing, air.forward = air.forward, None
        assert crossing is not None
        outputs = crossing.land()
        ctx.floating = [o.is_floating_point() for o in outputs]
        ctx.mark_non_differentiable(*(o for o in outputs if not o.is_floating_point()))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept = tuple(g for g, floating in zip(grads, ctx.floating, strict=True) if floating)
        ctx.air.backward = ctx.air.route.reversed().send(kept)
        return None, torch.zeros((), device=grads[0].device)
