"""Expert-parallel exchange over torch.distributed, on gloo and NCCL.

A token crosses to a rank once, whatever the number of its experts there: its row, bits for its blocks and for its
active experts there, and one float32 gate for each of those experts. The rank returns one summed row. All that one
rank sends another is a single run of bytes, and split sizes carry the variable counts, so nothing is padded but for
alignment, and nothing dropped. `kernels.exchange` has the format, and what makes and reads it.

The host waits for the device once in a forward pass, to learn how much will arrive, and never in a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unifmoe_dist.dispatch.exchange import AsyncExchange
from unifmoe_dist.dispatch.protocol import Arrivals, SinglePart, gradient_needs
from unifmoe_dist.dispatch.runs import start_runs
from unifmoe_dist.eager import not_compiled
from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_share import NOT_PICKLABLE
from unifmoe_dist.kernels import pack_tokens
from unifmoe_dist.kernels.exchange import Packed, Packing


class AllToAllDispatcher:
    """Exchanges tokens within `group`, whose ranks hold the residual experts contiguously in rank order.

    Args:
        group: The expert-parallel process group.
    """

    local = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)

    @property
    def packings(self) -> list[tuple[int, int]]:
        """Among how many ranks what share (1 / n) of all experts is packed, as (n, ranks)."""
        return [(1, self.size)]

    def __deepcopy__(self, memo: dict[int, Any]) -> AllToAllDispatcher:
        return self  # a process group cannot be copied, and the dispatcher holds nothing else

    def __reduce__(self) -> Any:
        raise UserError(NOT_PICKLABLE)

    @not_compiled
    def dispatch(self, x: Tensor, gates: Tensor, blocks: Tensor, trained: bool = True) -> AllToAllExchange:
        gates = gates.float()
        packing = pack_tokens(x, gates, blocks, self.size, gradient_needs(x, gates, trained))
        announced, told = packing.table
        dist.all_to_all_single(told, announced, group=self.group)
        packing.agree(on_host(packing.table))
        return AllToAllExchange(self.group, packing, x, gates, blocks)


class AllToAllExchange(SinglePart):
    """One journey, once the ranks know what everyone sends.

    Args:
        group: The expert-parallel process group.
        packing: What has been agreed on.
        x: (N, D) tokens.
        gates: (N, K) float32.
        blocks: (N, B) bool.
    """

    def __init__(self, group: dist.ProcessGroup, packing: Packing, x: Tensor, gates: Tensor, blocks: Tensor) -> None:
        there = (packing.pack, packing.unpack), (packing.pack_gradients, packing.unpack_gradients)
        home = (packing.return_rows, packing.combine), (packing.spread, packing.returned_gradients)
        self.home = AsyncExchange(_Leg(group, *home), packing.tokens_need or packing.experts_need)
        self.sent = AsyncExchange(_Leg(group, *there), packing.tokens_need).start(x, gates, blocks)

    @not_compiled
    def arrivals(self) -> Arrivals:
        x, gates, blocks = self.sent.wait()
        return Arrivals(x, gates, blocks)

    @not_compiled
    def send_home(self, rows: Tensor) -> None:
        self.home.start(rows)

    @not_compiled
    def total(self) -> Tensor:
        (total,) = self.home.wait()
        return total


def on_host(counts: Tensor) -> Any:
    """The numbers of a small tensor, as `tolist` gives them; the host waits for this copy alone."""
    if counts.device.type != "cuda":
        return counts.tolist()
    pinned = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=True)
    pinned.copy_(counts, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(counts.device))
    copied.synchronize()
    return pinned.tolist()


_Pack = Callable[..., Packed]
_Unpack = Callable[[Tensor, torch.dtype], tuple[Tensor, ...]]


class _Leg:
    """One way: pack, send, unpack; and the same for the way back."""

    def __init__(self, group: dist.ProcessGroup, forth: tuple[_Pack, _Unpack], back: tuple[_Pack, _Unpack]) -> None:
        self.group, self.forth, self.back = group, forth, back

    def start(self, tensors: tuple[Tensor, ...]) -> _Pending:
        pack, unpack = self.forth
        return _Pending(self.group, pack(*tensors), unpack)

    def reversed(self) -> _Leg:
        return _Leg(self.group, self.back, self.forth)


class _Pending:
    """A run of bytes for every rank, on its way."""

    def __init__(self, group: dist.ProcessGroup, packed: Packed, unpack: _Unpack) -> None:
        self.packed, self.unpack = packed, unpack  # kept until all is here
        self.arrived = packed.buffer.new_empty((sum(packed.output_splits),))
        self.work = start_runs(self.arrived, packed.buffer, packed.output_splits, packed.input_splits, group)

    def wait(self) -> tuple[Tensor, ...]:
        self.work.wait()
        return self.unpack(self.arrived, self.packed.dtype)
