"""What ranks send each other: the format of the bytes, and plain torch that packs and unpacks them.

R ranks hold E experts each. Where a token has an active expert on a rank, it crosses to it as one row. What a rank
sends another of all its rows is one run of bytes:

    rows     (n, D) in the tokens' type, in ascending order of the tokens; up to a multiple of 4 bytes
    gates    float32, those of the row's active experts there, one row after the other
    starts   int32, the gates before every `CHUNK`-th row, so that many programs can read a run at once
    bits     (n, ceil((B + E) / 8)) uint8, the blocks to compute and the active experts

and up to a multiple of 16 bytes, so that every run starts where wide loads may. Gradients come back as rows and gates
alone. The rows that experts return, and the gradients of those, travel as (n, D) rows without anything else.

A packing knows one rank's side of one exchange. Its counts are made first; once the ranks have told each other, and the
host knows, everything else has a known size. All that runs here leaves autograd out: `dispatch.exchange` ties the ways
there and back together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unifmoe_dist.kernels.bits import pack_bits, unpack_bits

CHUNK = 128
COUNTS = 4
"""What a rank announces to each other one: its rows, its gates, and whether it wants gradients at its tokens, and at
its experts."""


@dataclass(frozen=True)
class Run:
    """Sizes of what goes to or comes from one rank.

    Args:
        rows: Rows.
        gates: Gates of all rows.
    """

    rows: int
    gates: int

    def sections(self, row_bytes: int, mask_bytes: int) -> list[int]:
        """Bytes of rows, what fills them up, gates, starts, bits and what fills up all; `mask_bytes` 0: gradients."""
        rows = self.rows * row_bytes
        starts = 4 * -(-self.rows // CHUNK) if mask_bytes else 0
        parts = [rows, -rows % 4, 4 * self.gates, starts, self.rows * mask_bytes]
        return [*parts, -sum(parts) % 16]


@dataclass(frozen=True)
class Packed:
    """Bytes that are ready to travel.

    Args:
        buffer: (bytes,) uint8, what goes to every rank, one after the other.
        input_splits: Bytes to every rank.
        output_splits: Bytes from every rank.
        dtype: Type of the rows.
    """

    buffer: Tensor
    input_splits: list[int]
    output_splits: list[int]
    dtype: torch.dtype


class Packing:
    """One rank's side of one exchange; how bytes are moved is a subclass's.

    Args:
        gates: (N, K) float32 of this rank's tokens, for the experts of all ranks.
        blocks: (N, B) bool.
        size: Ranks R.
        needs: Whether this rank wants gradients at its tokens, and at its experts: 0 or 1.

    Attributes:
        table: (2, R, COUNTS) int32 on the device: what this rank announces, and room for what it is told.
        to: What goes to every rank.
        of: What comes from every rank.
        tokens_need: Whether any rank wants gradients at its tokens.
        experts_need: Whether any rank wants gradients at its experts.
    """

    def __init__(self, gates: Tensor, blocks: Tensor, size: int, needs: list[int]) -> None:
        self.size, self.num_blocks, self.num_tokens = size, blocks.shape[1], gates.shape[0]
        self.num_local = gates.shape[1] // size
        self.mask_bytes = (self.num_blocks + self.num_local + 7) // 8
        self.table = gates.new_empty((2, size, COUNTS), dtype=torch.int32)
        self._count(gates.detach(), needs)

    def agree(self, table: list[list[list[int]]]) -> None:
        """Take the numbers of `table`, once the ranks have exchanged them, as the host has read them."""
        self.to, self.of = ([Run(rows, gates) for rows, gates, *_ in side] for side in table)
        self.tokens_need, self.experts_need = (any(told[i] for side in table for told in side) for i in (2, 3))
        self.rows_out, self.rows_in = (sum(run.rows for run in runs) for runs in (self.to, self.of))
        self.gates_out, self.gates_in = (sum(run.gates for run in runs) for runs in (self.to, self.of))

    # -- there: tokens, gates and blocks at home -> rows, gates and blocks beside the experts --------------------------

    def pack(self, x: Tensor, gates: Tensor, blocks: Tensor) -> Packed:
        """(N, D), (N, K) and (N, B) -> bytes for the experts' ranks."""
        self.dim = x.shape[1]
        return self._packed(self._pack(x, gates, blocks), x, self.to, self.of, self.mask_bytes)

    def unpack(self, arrived: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Bytes of all ranks -> (rows_in, D) tokens, (rows_in, E) float32 gates or 0, and (rows_in, B) blocks."""
        raise NotImplementedError

    def pack_gradients(self, grad_x: Tensor, grad_gates: Tensor) -> Packed:
        """Of `unpack`: gradients of its rows and gates -> bytes for the tokens' ranks."""
        return self._packed(self._pack_gradients(grad_x, grad_gates), grad_x, self.of, self.to, 0)

    def unpack_gradients(self, arrived: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Of `pack`: bytes of all ranks -> (N, D), every token's sum over ranks as `combine` makes it, and (N, K)."""
        raise NotImplementedError

    # -- home: rows beside the experts -> one sum per token ------------------------------------------------------------

    def return_rows(self, rows: Tensor) -> Packed:
        """(rows_in, D) -> bytes for the tokens' ranks; nothing moves."""
        return self._bare(rows, self.of, self.to)

    def combine(self, arrived: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Bytes of all ranks -> (N, D), every token's sum over ranks, in their order and in float32 at least."""
        return (self._sum_rows(arrived.view(dtype).view(self.rows_out, self.dim)),)

    def spread(self, grad: Tensor) -> Packed:
        """Of `combine`: (N, D) -> bytes for the experts' ranks, the token's gradient for every row."""
        return self._bare(self._spread(grad), self.to, self.of)

    def returned_gradients(self, arrived: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Of `return_rows`: bytes of all ranks -> (rows_in, D); nothing moves."""
        return (arrived.view(dtype).view(self.rows_in, self.dim),)

    # -- shared by the above -------------------------------------------------------------------------------------------

    def _packed(self, buffer: Tensor, like: Tensor, to: list[Run], of: list[Run], mask_bytes: int) -> Packed:
        width = self.dim * like.element_size()
        given, taken = ([sum(run.sections(width, mask_bytes)) for run in runs] for runs in (to, of))
        return Packed(buffer, given, taken, like.dtype)

    def _bare(self, rows: Tensor, to: list[Run], of: list[Run]) -> Packed:
        width = self.dim * rows.element_size()
        given, taken = ([run.rows * width for run in runs] for runs in (to, of))
        return Packed(rows.contiguous().view(-1).view(torch.uint8), given, taken, rows.dtype)

    # -- a subclass's part ---------------------------------------------------------------------------------------------

    def _count(self, gates: Tensor, needs: list[int]) -> None:
        """Fill `table[0]`, and keep of the gates what the rest takes."""
        raise NotImplementedError

    def _pack(self, x: Tensor, gates: Tensor, blocks: Tensor) -> Tensor:
        raise NotImplementedError

    def _pack_gradients(self, grad_x: Tensor, grad_gates: Tensor) -> Tensor:
        raise NotImplementedError

    def _sum_rows(self, rows: Tensor) -> Tensor:
        raise NotImplementedError

    def _spread(self, grad: Tensor) -> Tensor:
        raise NotImplementedError


class TorchPacking(Packing):
    """In plain torch, for every device and type. Nothing waits for the device: sizes are known once the counts are."""

    def _count(self, gates: Tensor, needs: list[int]) -> None:
        self.active_RNE = self._by_rank(gates) != 0  # true for NaN, so that a NaN token stays NaN
        self.goes_RN = self.active_RNE.any(-1)
        own = torch.stack([self.goes_RN.sum(1), self.active_RNE.sum((1, 2))], dim=1)
        self.table[0, :, :2] = own
        for place, need in enumerate(needs, start=2):
            self.table[0, :, place] = need

    def _by_rank(self, gates: Tensor) -> Tensor:
        return gates.reshape(self.num_tokens, self.size, self.num_local).transpose(0, 1)

    def _pack(self, x: Tensor, gates: Tensor, blocks: Tensor) -> Tensor:
        row = self._places(self.goes_RN, self.rows_out)  # rank * N + token
        self.gate = self._places(self.active_RNE, self.gates_out)  # (rank * N + token) * E + expert
        active = self.active_RNE.reshape(-1, self.num_local).index_select(0, row)
        self.token = row.remainder_(max(1, self.num_tokens))
        bits = pack_bits(torch.cat([blocks.index_select(0, self.token), active], dim=1))
        compact = self._by_rank(gates).reshape(-1).index_select(0, self.gate)
        return _join(self.to, [x.index_select(0, self.token), compact, self._starts(active), bits])

    def unpack(self, arrived: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        rows, compact, _, bits = _part(arrived, self.of, self.dim * dtype.itemsize, self.mask_bytes)
        flags = unpack_bits(bits.view(self.rows_in, self.mask_bytes), self.num_blocks + self.num_local)
        blocks, active = flags.split([self.num_blocks, self.num_local], dim=1)
        self.arrived_gate = self._places(active, self.gates_in)
        gates = _scattered(self.arrived_gate, compact.view(torch.float32), active.numel()).view(active.shape)
        return rows.view(dtype).view(self.rows_in, self.dim), gates, blocks

    def _pack_gradients(self, grad_x: Tensor, grad_gates: Tensor) -> Tensor:
        return _join(self.of, [grad_x, grad_gates.reshape(-1).index_select(0, self.arrived_gate)])

    def unpack_gradients(self, arrived: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        rows, compact, *_ = _part(arrived, self.to, self.dim * dtype.itemsize, 0)
        grad_x = self._sum_rows(rows.view(dtype).view(self.rows_out, self.dim))
        grad_gates = _scattered(self.gate, compact.view(torch.float32), self.active_RNE.numel())
        return grad_x, grad_gates.view(self.active_RNE.shape).transpose(0, 1).flatten(1)

    def _sum_rows(self, rows: Tensor) -> Tensor:
        wide = torch.promote_types(rows.dtype, torch.float32)
        total = rows.new_zeros((self.num_tokens, self.dim), dtype=wide)
        counts = [run.rows for run in self.to]
        for token, of_rank in zip(self.token.split(counts), rows.split(counts), strict=True):
            total.index_add_(0, token, of_rank.to(wide))  # every token once, so that sums have one order everywhere
        return total.to(rows.dtype)

    def _spread(self, grad: Tensor) -> Tensor:
        return grad.index_select(0, self.token)

    def _places(self, mask: Tensor, count: int) -> Tensor:
        """(count,) int64, where the flattened mask is true. `nonzero` is faster, but on CUDA the host waits for it."""
        flat = mask.reshape(-1)
        if not count:  # on CUDA torch 2.9 fails where the mask is empty
            return flat.new_empty(0, dtype=torch.int64)
        return (torch.nonzero_static(flat, size=count) if flat.is_cuda else flat.nonzero()).view(count)

    def _starts(self, active: Tensor) -> Tensor:
        """int32, in the run of its rank, the gates before every CHUNK-th of (rows_out, E) rows."""
        counts = [run.rows for run in self.to]
        per_row = active.sum(1)
        before = (per_row.cumsum(0) - per_row).split(counts)
        return torch.cat([of_rank[::CHUNK] - of_rank[:1] for of_rank in before]).int()


def _scattered(places: Tensor, values: Tensor, size: int) -> Tensor:
    return values.new_zeros(size).index_copy_(0, places, values)


def _join(runs: list[Run], parts: list[Tensor]) -> Tensor:
    """Rows, gates and perhaps starts and bits of all ranks, one after the other -> bytes, a run for every rank."""
    flat = [part.reshape(-1).view(torch.uint8) for part in parts]
    row_bytes, mask_bytes = (parts[i].shape[1] * parts[i].element_size() if i < len(parts) else 0 for i in (0, 3))
    sections = [run.sections(row_bytes, mask_bytes) for run in runs]
    pieces = [part.split(list(sizes)) for part, sizes in zip(flat, _contents(sections), strict=False)]
    zeros = flat[0].new_zeros(16)
    joined = []
    for sizes, rows, gates, *more in zip(sections, *pieces, strict=True):
        joined += [rows, zeros[: sizes[1]], gates, *more, zeros[: sizes[-1]]]
    return torch.cat(joined)


def _part(arrived: Tensor, runs: list[Run], row_bytes: int, mask_bytes: int) -> list[Tensor]:
    """Bytes of all ranks -> rows, gates, starts and bits of all, as bytes in tensors of their own, so aligned."""
    sections = [run.sections(row_bytes, mask_bytes) for run in runs]
    pieces = arrived.split([size for of_rank in sections for size in of_rank])
    return [torch.cat(pieces[i :: len(sections[0])]) for i in (0, 2, 3, 4)]


def _contents(sections: list[list[int]]) -> list[tuple[int, ...]]:
    """Sizes by rank of rows, gates, starts and bits, without what fills up."""
    rows, _, gates, starts, bits, _ = zip(*sections, strict=True)
    return [rows, gates, starts, bits]
