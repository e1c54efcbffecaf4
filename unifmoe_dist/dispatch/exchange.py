"""Asynchronous exchanges between ranks, as autograd sees them: a start, room for other work, a wait.

Start and wait are autograd nodes, so the gradients' way back is a start and a wait too, with room for other work
between them. A rank must never wait for a collective that another does not start. In a backward pass the engine
takes, of the nodes that are ready, the one made last; ranks that made the same nodes therefore start the same
collectives in the same order. They make the same nodes when they agree on `differentiable`, whatever requires a
gradient on each of them.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Pending(Protocol):
    """A collective that has been started."""

    def wait(self) -> tuple[Tensor, ...]:
        """What arrived, one tensor for each that was sent, once it is all here."""
        ...


class Collective(Protocol):
    """Which rows go to which rank."""

    def start(self, tensors: tuple[Tensor, ...]) -> Pending:
        """Start sending; does not wait."""
        ...

    def reversed(self) -> Collective:
        """The way back."""
        ...


class AsyncExchange:
    """One use of a collective.

    Args:
        collective: Where the tensors go.
        differentiable: Whether gradients come back. Must be the same on all ranks, and true where any of the tensors
            requires a gradient on any rank.
    """

    def __init__(self, collective: Collective, differentiable: bool) -> None:
        self._state = _State(collective)
        self._differentiable = differentiable

    def start(self, *tensors: Tensor) -> AsyncExchange:
        """Start sending; the exchange itself, for a wait."""
        anchor = torch.empty(0, device=tensors[0].device, requires_grad=self._differentiable)
        self._started = _Start.apply(self._state, anchor, *tensors)
        return self

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors that the other ranks sent here."""
        return _Wait.apply(self._state, self._started)


class _State:
    """What the two nodes of an exchange share. Holds no tensor of the graph, so no cycle keeps the graph alive."""

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        self.forward: Pending | None = None
        self.backward: Pending | None = None


class _Start(torch.autograd.Function):
    """Forward starts the collective and returns what ties the wait to it; backward waits for the gradients.

    That is a tensor without elements, on the device whose thread of autograd's engine is to run the node: it costs no
    launch.
    """

    @staticmethod
    def forward(ctx: Any, state: _State, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.state = state
        ctx.floating = [t.is_floating_point() for t in tensors]
        state.forward = state.collective.start(tensors)
        return torch.empty_like(anchor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        pending, ctx.state.backward = ctx.state.backward, None
        arrived = iter(pending.wait())
        return (None, None, *(next(arrived) if floating else None for floating in ctx.floating))


class _Wait(torch.autograd.Function):
    """Forward waits for the collective; backward starts that of the gradients, the other way."""

    @staticmethod
    def forward(ctx: Any, state: _State, started: Tensor) -> tuple[Tensor, ...]:
        ctx.state = state
        pending, state.forward = state.forward, None
        assert pending is not None
        outputs = pending.wait()
        ctx.set_materialize_grads(False)  # of masks too, each a launch
        ctx.device = started.device
        ctx.kinds = [(o.shape, o.dtype) if o.is_floating_point() else None for o in outputs]
        ctx.mark_non_differentiable(*(o for o in outputs if not o.is_floating_point()))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = tuple(
            torch.zeros(kind[0], dtype=kind[1], device=ctx.device) if grad is None else grad
            for grad, kind in zip(grads, ctx.kinds, strict=True)
            if kind is not None
        )
        ctx.state.backward = ctx.state.collective.reversed().start(kept)
        return None, torch.empty(0, device=ctx.device)
