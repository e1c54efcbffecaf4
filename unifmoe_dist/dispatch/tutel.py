"""Expert-parallel exchange by Microsoft's Tutel: `fast_encode`, its all-to-all, `fast_decode`.

Tutel lays tokens out as (K, capacity, D), one padded buffer per expert, so a token crosses once for each of its
experts. Nothing is dropped: the capacity is the largest number of tokens that any rank of the group has for any
expert. A token has one slot per expert up to the largest k on its rank; a slot that it does not use points at place
`capacity`, which Tutel's kernels skip. The block mask travels beside the token as numbers below 256, which every
float format holds exactly. Experts run with gate 1 on the rows that are real; the gates weigh them in `fast_decode`,
at home.

Tutel is imported when a dispatcher is made. Its functions are always given float32, because on CUDA it keeps one set
of kernels per process, compiled for whichever type comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unifmoe_dist.dispatch.exchange import AsyncExchange
from unifmoe_dist.dispatch.protocol import Arrivals, SinglePart, gradient_needs
from unifmoe_dist.eager import not_compiled
from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_share import NOT_PICKLABLE
from unifmoe_dist.kernels.bits import pack_bits, unpack_bits

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TutelDispatcher:
    """Exchanges tokens within `group`, whose ranks hold the residual experts contiguously in rank order.

    Takes float32, bfloat16 and float16 tokens, on the CPU and on CUDA (there Tutel must be built with CUDA).

    Args:
        group: The expert-parallel process group; None encodes and decodes without an exchange.

    Raises:
        UserError: Tutel cannot be imported, or SKIP_A2A is set, with which Tutel leaves tokens where they are.
    """

    local = False  # without a group too: encoding and decoding are Tutel's

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        _tutel()

    def __deepcopy__(self, memo: dict[int, Any]) -> TutelDispatcher:
        return self  # a process group cannot be copied, and the dispatcher holds nothing else

    def __reduce__(self) -> Any:
        if self.group is not None:
            raise UserError(NOT_PICKLABLE)
        return type(self), (None,)

    @not_compiled
    def dispatch(self, x: Tensor, gates: Tensor, blocks: Tensor, trained: bool = True) -> _TutelExchange:
        if x.dtype not in _DTYPES:
            raise UserError(
                f"dispatcher 'tutel' carries float32, bfloat16 or float16 tokens, not {str(x.dtype).split('.')[-1]}; "
                "use dispatcher 'alltoall'."
            )
        return _TutelExchange(self, x, gates, blocks, gradient_needs(x, gates, trained))


class _TutelExchange(SinglePart):
    def __init__(self, dispatcher: TutelDispatcher, x: Tensor, gates: Tensor, blocks: Tensor, needs: list[int]) -> None:
        group, size = dispatcher.group, dispatcher.size
        self.num_experts, self.local, self.num_blocks = gates.shape[1], gates.shape[1] // size, blocks.shape[1]
        payload = torch.cat([x.float(), pack_bits(blocks).float()], dim=1)
        active = gates.detach() != 0  # true for NaN
        plan = _agree(group, size, active, needs)
        if self.num_experts * plan.capacity * payload.shape[1] >= 2**31:
            raise UserError(
                f"dispatcher 'tutel' needs {self.num_experts} experts x {plan.capacity} places x {payload.shape[1]} "
                "numbers, beyond the 2**31 that Tutel's kernels can address; use dispatcher 'alltoall'."
            )
        self.critical = _critical_data(active, gates, plan)
        first = dispatcher.rank * self.local
        self.rows, self.expert = _occupied(plan, first, first + self.local)
        self.collective = _TutelAllToAll(group, size)
        self.home_needs = plan.tokens_need or plan.experts_need
        encoded = _tutel().encode(payload, self.critical).to(x.dtype)
        self.sent = AsyncExchange(self.collective, plan.tokens_need).start(encoded)

    @not_compiled
    def arrivals(self) -> Arrivals:
        (arrived,) = self.sent.wait()  # (K, capacity, D + mask), where K counts (source rank, local expert)
        rows = arrived.flatten(0, 1).index_select(0, self.rows)
        width = (self.num_blocks + 7) // 8
        bits = rows[:, -width:].detach().to(torch.uint8)
        gates = rows.new_zeros((rows.shape[0], self.local), dtype=torch.float32)
        gates.scatter_(1, self.expert[:, None], 1.0)
        return Arrivals(rows[:, :-width], gates, unpack_bits(bits, self.num_blocks))

    @not_compiled
    def send_home(self, rows: Tensor) -> None:
        capacity = self.critical[4]
        padded = rows.new_zeros((self.num_experts * capacity, rows.shape[1])).index_copy(0, self.rows, rows)
        outputs = padded.view(self.num_experts, capacity, rows.shape[1])
        self.home = AsyncExchange(self.collective, self.home_needs).start(outputs)

    @not_compiled
    def total(self) -> Tensor:
        (back,) = self.home.wait()
        return _tutel().decode(back.float(), self.critical).to(back.dtype)


@dataclass(frozen=True)
class _Plan:
    """What the ranks of a group know about one exchange.

    Args:
        loads: (ranks, K) int64, tokens that each rank has for each expert.
        host_loads: The same numbers on the host.
        capacity: Places per rank and expert, at least 1.
        slots: Largest k on this rank, at least 1.
        tokens_need: Whether any rank wants gradients at its tokens.
        experts_need: Whether any rank wants gradients at its experts.
    """

    loads: Tensor
    host_loads: list[list[int]]
    capacity: int
    slots: int
    tokens_need: bool
    experts_need: bool


def _agree(group: dist.ProcessGroup | None, size: int, active: Tensor, needs: list[int]) -> _Plan:
    """Tell all ranks the loads and needs of each, in one small exchange."""
    experts = active.shape[1]
    slots = torch.nn.functional.pad(active.sum(1), (0, 1)).max()  # the padding makes 0 of no tokens
    own_counts = torch.cat([active.sum(0), slots[None], slots.new_tensor(needs)])
    counts = (own_counts if size == 1 else _tutel().all_gather(own_counts, group)).view(size, -1)
    host = counts.tolist()
    loads = [row[:experts] for row in host]
    own = host[0 if size == 1 else dist.get_rank(group)]
    return _Plan(
        counts[:, :experts],
        loads,
        max(1, *(max(row) for row in loads)),
        max(1, own[experts]),
        any(row[-2] for row in host),
        any(row[-1] for row in host),
    )


def _critical_data(active: Tensor, gates: Tensor, plan: _Plan) -> tuple:
    """Tutel's (K, indices, locations, gates, capacity, counts): per slot, the expert, place and gate of N tokens."""
    order = active.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, : plan.slots]  # active ones first
    place = (active.cumsum(0) - 1).gather(1, order)
    location = torch.where(active.gather(1, order), place, plan.capacity)
    slots = [t.T.contiguous().unbind(0) for t in (order.int(), location.int(), gates.float().gather(1, order))]
    return (active.shape[1], *slots, plan.capacity, active.sum(0))


def _occupied(plan: _Plan, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Rows of the received (ranks, experts, capacity) buffer that hold a token, and the local expert of each."""
    loads = plan.loads[:, first:last].flatten()
    total = sum(sum(row[first:last]) for row in plan.host_loads)
    buffers = torch.arange(loads.shape[0], device=loads.device)
    buffer = buffers.repeat_interleave(loads, output_size=total)
    start = (loads.cumsum(0) - loads).repeat_interleave(loads, output_size=total)
    place = torch.arange(total, device=loads.device) - start
    return buffer * plan.capacity + place, buffer % (last - first)


class _TutelAllToAll:
    """Equal parts of the first dimension to and from every rank: the way there is also the way back."""

    def __init__(self, group: dist.ProcessGroup | None, size: int) -> None:
        self.group, self.size = group, size

    def start(self, tensors: tuple[Tensor, ...]) -> _TutelPending:
        return _TutelPending(self, tensors)

    def reversed(self) -> _TutelAllToAll:
        return self


class _TutelPending:
    def __init__(self, collective: _TutelAllToAll, tensors: tuple[Tensor, ...]) -> None:
        self.sent = tuple(t.contiguous() for t in tensors)  # kept alive until the work is done
        if collective.size == 1:
            self.received = [(t.clone(), _nothing) for t in self.sent]
        else:
            self.received = [_tutel().all_to_all(t, collective.group, background=True) for t in self.sent]

    def wait(self) -> tuple[Tensor, ...]:
        for _, wait in self.received:
            wait()
        return tuple(tensor for tensor, _ in self.received)


def _nothing() -> None:
    """Waits for no one."""


@dataclass(frozen=True)
class _Tutel:
    """The functions of Tutel that are used."""

    encode: Callable[..., Tensor]
    decode: Callable[..., Tensor]
    all_to_all: Callable[..., tuple[Tensor, Callable[[], Any]]]
    all_gather: Callable[..., Tensor]


@cache
def _tutel() -> _Tutel:
    try:
        from tutel.impls import communicate
        from tutel.moe import fast_decode, fast_encode
    except ImportError as error:
        raise UserError(
            f"dispatcher 'tutel' needs Tutel, which cannot be imported ({error}): "
            "pip install --no-build-isolation 'unifmoe-dist[tutel]'."
        ) from error
    if communicate.TUTEL_SKIP_A2A:
        raise UserError("SKIP_A2A is set, with which Tutel leaves tokens where they are; unset it.")
    # The differentiable all_to_all() forgets the group in its backward pass; this is the one that it is made of.
    return _Tutel(fast_encode, fast_decode, communicate.simple_all_to_all, communicate.simple_all_gather)
