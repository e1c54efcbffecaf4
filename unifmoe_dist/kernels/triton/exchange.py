"""What travels between ranks, packed and unpacked in Triton: `kernels.exchange.Packing` in few launches.

Forward, three launches at home and one beside the experts: counts per (span of tokens, rank); their sums over spans,
which give every row and gate its place, and the counts to announce; one writes all bytes; one reads them. A fourth
at home sums what returns. Backward, one launch spreads the gradients of those sums, one packs the gradients of rows and
gates, and one sums them per token. Nothing is sorted, there are no atomics, and sums run over ranks in their order, so
results repeat bit for bit, and equal those of `TorchPacking`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from unifmoe_dist.kernels.exchange import CHUNK, Packing, Run
from unifmoe_dist.kernels.triton.exchange_kernels import (
    count_kernel,
    pack_gradients_kernel,
    pack_kernel,
    scan_kernel,
    spread_kernel,
    sum_kernel,
    unpack_kernel,
)
from unifmoe_dist.kernels.triton.math import DTYPES, power_of_two

_TILE = 4096  # numbers of a tile of gates or masks
_SPANS = 256  # summed at once
_WIDEST = 1024


def unsupported(x: Tensor, gates: Tensor, blocks: Tensor, size: int) -> str | None:
    """Why the kernels cannot carry x (N, D) with (N, K) gates and (N, B) blocks to `size` ranks; None if they can."""
    if x.dtype not in DTYPES:
        return f"they send float32, bfloat16 and float16, not {x.dtype}"
    if max(gates.shape[1] // size, blocks.shape[1], size) > _WIDEST:
        return f"they send to at most {_WIDEST} ranks, with at most {_WIDEST} experts on each and {_WIDEST} blocks"
    if x.shape[0] * gates.shape[1] >= 2**31:
        return f"{x.shape[0]} tokens over {gates.shape[1]} experts are too many for 32-bit counts"
    return None


class TritonPacking(Packing):
    """By the kernels."""

    def _count(self, gates: Tensor, needs: list[int]) -> None:
        self.gates = gates if gates.stride(1) == 1 else gates.contiguous()
        self.span = self._rows_of_tile(self.num_local, 64)
        spans = triton.cdiv(self.num_tokens, self.span)
        counts = self.table.new_empty((2, spans, self.size, 2))
        self.earlier = counts[1]
        with torch.cuda.device_of(gates):  # Triton launches on the current device, which need not be that of the tokens
            if spans:
                count_kernel[(spans, self.size)](
                    self.gates, counts[0], *self._extent(), R=self.size, **self._experts(), SPAN=self.span, num_warps=4
                )
            scan_kernel[(self.size,)](
                counts[0], self.earlier, self.table[0], spans, *needs, R=self.size, STEP=_SPANS, num_warps=4
            )

    def _pack(self, x: Tensor, gates: Tensor, blocks: Tensor) -> Tensor:
        buffer = self._buffer(x, self.to, self.mask_bytes)
        self.row_of, self.gate_of = self.table.new_empty((2, self.num_tokens, self.size))
        if self.num_tokens:
            block_d = self._slice(x, self.span)
            with torch.cuda.device_of(x):
                pack_kernel[(*self._grid(self.span, self.size), triton.cdiv(self.dim, block_d))](
                    x.contiguous(),
                    self.gates,
                    blocks.contiguous().view(torch.uint8),
                    self.earlier,
                    self.table[0],
                    *_views(buffer, x.dtype),
                    self.row_of,
                    self.gate_of,
                    *self._extent(),
                    B=self.num_blocks,
                    MASK_BYTES=self.mask_bytes,
                    SPAN=self.span,
                    **self._common(x.dtype, block_d),
                )
        del self.earlier
        return buffer

    def unpack(self, arrived: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        x = arrived.new_empty((self.rows_in, self.dim), dtype=dtype)
        gates = arrived.new_empty((self.rows_in, self.num_local), dtype=torch.float32)
        blocks = arrived.new_empty((self.rows_in, self.num_blocks), dtype=torch.bool)
        self.arrived_gate_of = self.table.new_empty((self.rows_in,))
        self.arrived_gates = gates.detach()  # `gates` itself will know this exchange, and must not be known by it
        if self.rows_in:
            copied = self._copied(x)
            with torch.cuda.device_of(x):
                unpack_kernel[self._chunks(copied["BLOCK_D"])](
                    *_views(arrived, dtype),
                    self.table[1],
                    x,
                    gates,
                    blocks.view(torch.uint8),
                    self.arrived_gate_of,
                    B=self.num_blocks,
                    BP=power_of_two(self.num_blocks),
                    MASK_BYTES=self.mask_bytes,
                    STEP=self._rows_of_tile(max(self.num_local, self.num_blocks), CHUNK),
                    COPY=copied["COPY"],
                    **self._common(dtype, copied["BLOCK_D"]),
                )
        return x, gates, blocks

    def _pack_gradients(self, grad_x: Tensor, grad_gates: Tensor) -> Tensor:
        buffer = self._buffer(grad_x, self.of, 0)
        if self.rows_in:
            copied = self._copied(grad_x)
            rows_out, gates_out, *_ = _views(buffer, grad_x.dtype)
            with torch.cuda.device_of(grad_x):
                pack_gradients_kernel[self._chunks(copied["BLOCK_D"])](
                    grad_x.contiguous(),
                    grad_gates.contiguous(),
                    self.arrived_gates,
                    self.arrived_gate_of,
                    self.table[1],
                    rows_out,
                    gates_out,
                    STEP=self._rows_of_tile(self.num_local, CHUNK),
                    COPY=copied["COPY"],
                    **self._common(grad_x.dtype, copied["BLOCK_D"]),
                )
        return buffer

    def unpack_gradients(self, arrived: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        grad_x = arrived.new_empty((self.num_tokens, self.dim), dtype=dtype)
        grad_gates = arrived.new_empty((self.num_tokens, self.size * self.num_local), dtype=torch.float32)
        rows, gates, *_ = _views(arrived, dtype)
        self._sum(rows, grad_x, gates, grad_gates)
        return grad_x, grad_gates

    def _sum_rows(self, rows: Tensor) -> Tensor:
        total = rows.new_empty((self.num_tokens, self.dim))
        self._sum(rows, total)
        return total

    def _spread(self, grad: Tensor) -> Tensor:
        rows = grad.new_empty((self.rows_out, self.dim))
        if self.rows_out:
            tokens = 32
            block_d = self._slice(grad, tokens)
            with torch.cuda.device_of(grad):
                spread_kernel[(*self._grid(tokens, self.size), triton.cdiv(self.dim, block_d))](
                    grad.contiguous(),
                    self.row_of,
                    rows,
                    self.num_tokens,
                    R=self.size,
                    D=self.dim,
                    TOKENS=tokens,
                    BLOCK_D=block_d,
                    num_warps=4,
                )
        return rows

    def _sum(self, rows: Tensor, total: Tensor, gates: Tensor | None = None, grad_gates: Tensor | None = None) -> None:
        if not self.num_tokens:
            return
        tokens = self._rows_of_tile(self.num_local, 32)
        block_d = self._slice(total, tokens)
        arguments = self._common(total.dtype, block_d)
        del arguments["RP"]
        with torch.cuda.device_of(total):
            sum_kernel[self._grid(tokens, triton.cdiv(self.dim, block_d))](
                rows,
                gates,
                self.gates,
                self.row_of,
                self.gate_of,
                self.table[0],
                total,
                grad_gates,
                *self._extent(),
                HAS_GATES=gates is not None,
                TOKENS=tokens,
                **arguments,
            )

    # -- what launches share ------------------------------------------------------------------------------------------

    def _buffer(self, like: Tensor, to: list[Run], mask_bytes: int) -> Tensor:
        width = self.dim * like.element_size()
        return like.new_empty((sum(sum(run.sections(width, mask_bytes)) for run in to),), dtype=torch.uint8)

    def _extent(self) -> tuple[int, int]:
        """Tokens, and numbers from the gates of one to those of the next."""
        return self.num_tokens, self.gates.stride(0)

    def _experts(self) -> dict[str, int]:
        return dict(E=self.num_local, EP=power_of_two(self.num_local))

    def _common(self, dtype: torch.dtype, block_d: int) -> dict[str, Any]:
        ranks = dict(R=self.size, RP=power_of_two(self.size))
        width = dict(D=self.dim, ROW_BYTES=self.dim * dtype.itemsize, BLOCK_D=block_d)
        return dict(**ranks, **self._experts(), **width, num_warps=4)

    def _grid(self, tokens: int, beside: int) -> tuple[int, int]:
        return triton.cdiv(self.num_tokens, tokens), beside

    def _chunks(self, block_d: int) -> tuple[int, int]:
        return sum(triton.cdiv(run.rows, CHUNK) for run in self.of), triton.cdiv(self.dim, block_d)

    def _copied(self, rows: Tensor) -> dict[str, int]:
        """Tiles in which a chunk's rows are copied."""
        return dict(COPY=32, BLOCK_D=self._slice(rows, 32))

    @staticmethod
    def _rows_of_tile(columns: int, most: int) -> int:
        return max(1, min(most, _TILE // power_of_two(columns)))

    @staticmethod
    def _slice(rows: Tensor, tile_rows: int) -> int:
        """Slice of the width that is copied at once: 16 KiB in a tile of so many rows."""
        return min(power_of_two(rows.shape[-1]), max(16, 16384 // (tile_rows * rows.element_size())))


def _views(buffer: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The same bytes as rows, gates, starts and bits; a buffer's length is a multiple of 16."""
    return buffer.view(dtype), buffer.view(torch.float32), buffer.view(torch.int32), buffer
