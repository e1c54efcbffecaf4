"""Expert-parallel exchange over torch.distributed, on gloo and NCCL.

A token crosses to a rank once, whatever the number of its experts there: its row, bits for its blocks and for its
active experts there, and one float32 gate for each of those experts. The rank returns one summed row. All that one
rank sends another is a single run of bytes, and split sizes carry the variable counts, so nothing is padded and
nothing dropped.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unifmoe_dist.dispatch.bits import pack_bits, unpack_bits
from unifmoe_dist.dispatch.exchange import AsyncExchange
from unifmoe_dist.dispatch.protocol import Arrivals, gradient_needs
from unifmoe_dist.eager import not_compiled
from unifmoe_dist.errors import UserError
from unifmoe_dist.expert_share import NOT_PICKLABLE


class AllToAllDispatcher:
    """Exchanges tokens within `group`, whose ranks hold the residual experts contiguously in rank order.

    Args:
        group: The expert-parallel process group.
    """

    local = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> AllToAllDispatcher:
        return self  # a process group cannot be copied, and the dispatcher holds nothing else

    def __reduce__(self) -> Any:
        raise UserError(NOT_PICKLABLE)

    @not_compiled
    def dispatch(self, x: Tensor, gates: Tensor, blocks: Tensor, trained: bool = True) -> _AllToAllExchange:
        return _AllToAllExchange(self.group, self.size, x, gates, blocks, gradient_needs(x, gates, trained))


class _AllToAllExchange:
    def __init__(
        self, group: dist.ProcessGroup, size: int, x: Tensor, gates: Tensor, blocks: Tensor, needs: list[int]
    ) -> None:
        self.num_tokens, self.num_blocks, self.num_local = x.shape[0], blocks.shape[1], gates.shape[1] // size
        gates_RNE = gates.reshape(x.shape[0], size, self.num_local).transpose(0, 1)  # R ranks, E experts of each
        active_RNE = gates_RNE.detach() != 0  # true for NaN, so that a NaN token stays NaN
        goes_RN = active_RNE.any(-1)
        rank, token = goes_RN.nonzero(as_tuple=True)
        self.token = token

        send_counts = torch.stack([goes_RN.sum(1), active_RNE.sum((1, 2))], dim=1)  # rows and gates for each rank
        send_counts = torch.cat([send_counts, send_counts.new_tensor(needs).expand(size, -1)], dim=1)
        recv_counts = torch.empty_like(send_counts)
        dist.all_to_all_single(recv_counts, send_counts, group=group)
        counts = torch.cat([send_counts, recv_counts], dim=1).T.tolist()
        rows_out, gates_out, *_, rows_in, gates_in, tokens_need, experts_need = counts
        self.home = _AllToAll(group, [rows_in], [rows_out])
        self.home_needs = any(tokens_need) or any(experts_need)

        there = _AllToAll(group, [rows_out, gates_out, rows_out], [rows_in, gates_in, rows_in])
        bits = pack_bits(torch.cat([blocks[token], active_RNE[rank, token]], dim=1))
        self.sent = AsyncExchange(there, any(tokens_need)).start(x[token], gates_RNE.masked_select(active_RNE), bits)

    @not_compiled
    def arrivals(self) -> Arrivals:
        x, gates, bits = self.sent.wait()
        flags = unpack_bits(bits, self.num_blocks + self.num_local)
        blocks, active = flags.split([self.num_blocks, self.num_local], dim=1)
        return Arrivals(x, gates.new_zeros(active.shape).masked_scatter(active, gates), blocks)

    @not_compiled
    def combine(self, rows: Tensor) -> Tensor:
        (back,) = AsyncExchange(self.home, self.home_needs).start(rows).wait()
        total = back.new_zeros((self.num_tokens, back.shape[1]), dtype=torch.promote_types(back.dtype, torch.float32))
        return total.index_add(0, self.token, back.to(total.dtype)).to(back.dtype)


class _AllToAll:
    """Row counts to and from every rank of a group, for each of the tensors that travel together.

    The tensors that carry gradients come first: on the way back there are no others.
    """

    def __init__(self, group: dist.ProcessGroup, input_splits: list[list[int]], output_splits: list[list[int]]) -> None:
        self.group, self.input_splits, self.output_splits = group, input_splits, output_splits

    def start(self, tensors: tuple[Tensor, ...]) -> _Pending:
        return _Pending(self, tensors)

    def reversed(self) -> _AllToAll:
        return _AllToAll(self.group, self.output_splits, self.input_splits)


class _Pending:
    """Several tensors on their way. What one rank is sent of them all is one run of bytes."""

    def __init__(self, collective: _AllToAll, tensors: tuple[Tensor, ...]) -> None:
        self.kinds = [(t.dtype, t.shape[1:]) for t in tensors]
        widths = [t.dtype.itemsize * t.shape[1:].numel() for t in tensors]
        self.bytes_in = _bytes_by_rank(collective.output_splits, widths)
        bytes_out = _bytes_by_rank(collective.input_splits, widths)
        flat = [t.contiguous().view(-1).view(torch.uint8) for t in tensors]
        self.sent = flat[0]  # kept until all is here; a tensor that travels alone needs no packing
        if len(flat) > 1:
            parts = [t.split([of_rank[i] for of_rank in bytes_out]) for i, t in enumerate(flat)]
            self.sent = torch.cat([part for of_rank in zip(*parts, strict=True) for part in of_rank])
        sizes_in, sizes_out = ([sum(of_rank) for of_rank in table] for table in (self.bytes_in, bytes_out))
        self.buffer = self.sent.new_empty(sum(sizes_in))
        self.work = dist.all_to_all_single(
            self.buffer, self.sent, sizes_in, sizes_out, group=collective.group, async_op=True
        )

    def wait(self) -> tuple[Tensor, ...]:
        assert self.work is not None  # None only for a rank outside the group
        self.work.wait()
        flat = [self.buffer]
        if len(self.kinds) > 1:
            parts = self.buffer.split([size for of_rank in self.bytes_in for size in of_rank])
            flat = [torch.cat(parts[i :: len(self.kinds)]) for i in range(len(self.kinds))]  # copies, so aligned
        return tuple(t.view(dtype).view(-1, *shape) for t, (dtype, shape) in zip(flat, self.kinds, strict=True))


def _bytes_by_rank(counts: list[list[int]], widths: list[int]) -> list[list[int]]:
    """Row counts (tensors, ranks) of the first tensors, and bytes per row of each -> bytes (ranks, tensors)."""
    chosen = counts[: len(widths)]
    return [[n * width for n, width in zip(of_rank, widths, strict=True)] for of_rank in zip(*chosen, strict=True)]
