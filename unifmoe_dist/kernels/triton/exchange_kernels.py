"""Device code of the exchange between ranks; `triton.exchange` says what its launches are for.

A run of bytes is read and written through views of one buffer: `rows` in the type of tokens, `gates` as float32,
`starts` as int32 and `bits` as uint8. Runs start at multiples of 16 bytes, so views and wide loads are aligned. Counts
come from the table that the ranks have exchanged, (R, 4) int32: rows and gates of every rank's run first.

Gather form throughout: every program writes what is its own, and sums over ranks run in their order.
"""

# Arguments of device functions have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from unifmoe_dist.kernels import exchange

_COUNTS, _CHUNK = tl.constexpr(exchange.COUNTS), tl.constexpr(exchange.CHUNK)


@triton.jit
def _gates_at(rows, ROW_BYTES: tl.constexpr):
    """Byte in a run at which the gates start."""
    return (rows.to(tl.int64) * ROW_BYTES + 3) // 4 * 4


@triton.jit
def _first_number(start, ITEM: tl.constexpr):
    """Number, of `ITEM` bytes each, at which the run that starts at byte `start` begins: wide loads fit there."""
    return tl.multiple_of(start // ITEM, 16 // ITEM)


@triton.jit
def _run_bytes(rows, gates, ROW_BYTES: tl.constexpr, MASK_BYTES: tl.constexpr, ROWS_ONLY: tl.constexpr):
    """Bytes of a run: of rows with gates and perhaps masks, or of rows alone."""
    if ROWS_ONLY:
        return rows.to(tl.int64) * ROW_BYTES
    else:
        size = _gates_at(rows, ROW_BYTES) + gates.to(tl.int64) * 4
        if MASK_BYTES > 0:
            size += (rows + _CHUNK - 1) // _CHUNK * 4 + rows.to(tl.int64) * MASK_BYTES
        return (size + 15) // 16 * 16


@triton.jit
def _runs(table, R: tl.constexpr, RP: tl.constexpr):
    """(RP,) rows and gates of every rank's run, 0 beyond the last."""
    rank = tl.arange(0, RP)
    rows = tl.load(table + rank * _COUNTS, mask=rank < R, other=0)
    return rank, rows, tl.load(table + rank * _COUNTS + 1, mask=rank < R, other=0)


@triton.jit
def _active_gates(gates, token, rank, n, stride, E: tl.constexpr, EP: tl.constexpr):
    """(tokens, EP) float32 gates for the experts of `rank`, and int32 1 where active; NaN is."""
    expert = tl.arange(0, EP)[None, :]
    at = gates + token.to(tl.int64)[:, None] * stride + rank * E + expert
    values = tl.load(at, mask=(token < n)[:, None] & (expert < E), other=0.0)
    return values, (values != 0).to(tl.int32)


@triton.jit(do_not_specialize=["n", "stride"])
def count_kernel(gates, counts, n, stride, R: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, SPAN: tl.constexpr):
    """counts[span, rank]: rows and gates of the span's tokens."""
    span, rank = tl.program_id(0), tl.program_id(1)
    _, active = _active_gates(gates, span * SPAN + tl.arange(0, SPAN), rank, n, stride, E, EP)
    at = counts + (span * R + rank) * 2
    tl.store(at, tl.sum(tl.max(active, 1), 0))
    tl.store(at + 1, tl.sum(tl.sum(active, 1), 0))


@triton.jit(do_not_specialize=["spans", "tokens_need", "experts_need"])
def scan_kernel(counts, earlier, table, spans, tokens_need, experts_need, R: tl.constexpr, STEP: tl.constexpr):
    """Per rank: sums over the spans before each, and the line of the table that announces all of them."""
    rank, which = tl.program_id(0), tl.arange(0, 2)
    before = tl.zeros((2,), tl.int32)
    for first in range(0, spans, STEP):
        span = first + tl.arange(0, STEP)
        at = (span[:, None] * R + rank) * 2 + which[None, :]
        inside = (span < spans)[:, None] & (which >= 0)[None, :]
        here = tl.load(counts + at, mask=inside, other=0)
        tl.store(earlier + at, before[None, :] + tl.cumsum(here, 0) - here, mask=inside)
        before += tl.sum(here, 0)
    tl.store(table + rank * _COUNTS + which, before)
    tl.store(table + rank * _COUNTS + 2, tokens_need)
    tl.store(table + rank * _COUNTS + 3, experts_need)


@triton.jit(do_not_specialize=["n", "stride"])
def pack_kernel(
    x,
    gates,
    blocks,
    earlier,
    table,
    rows_out,
    gates_out,
    starts_out,
    bits_out,
    row_of,
    gate_of,
    n,
    stride,
    R: tl.constexpr,
    RP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    MASK_BYTES: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program per span of tokens, rank and slice of the width; those of the first slice write all but rows."""
    span, rank, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = span * SPAN + tl.arange(0, SPAN)
    valid, wide = token < n, token.to(tl.int64)
    values, active = _active_gates(gates, token, rank, n, stride, E, EP)
    goes = tl.max(active, 1)
    row = tl.load(earlier + (span * R + rank) * 2) + tl.cumsum(goes, 0) - goes  # in its run
    other, run_rows, run_gates = _runs(table, R, RP)
    sizes = _run_bytes(run_rows, run_gates, ROW_BYTES, MASK_BYTES, False)
    start = tl.sum(tl.where(other < rank, sizes, 0), 0)

    d = part * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    inside = (goes != 0)[:, None] & (d < D)
    ITEM: tl.constexpr = ROW_BYTES // D
    copied = tl.load(x + wide[:, None] * D + d, mask=inside)
    tl.store(rows_out + _first_number(start, ITEM) + row.to(tl.int64)[:, None] * D + d, copied, mask=inside)

    if part == 0:
        first_row = tl.sum(tl.where(other < rank, run_rows, 0), 0)
        own_rows = tl.sum(tl.where(other == rank, run_rows, 0), 0)
        own_gates = tl.sum(tl.where(other == rank, run_gates, 0), 0)
        count = tl.sum(active, 1)
        gate = tl.load(earlier + (span * R + rank) * 2 + 1) + tl.cumsum(count, 0) - count  # in its run
        gates_at = start + _gates_at(own_rows, ROW_BYTES)
        each = gate[:, None] + tl.cumsum(active, 1) - active
        tl.store(gates_out + gates_at // 4 + each, values, mask=active != 0)
        starts_at = gates_at + own_gates.to(tl.int64) * 4
        tl.store(starts_out + starts_at // 4 + row // _CHUNK, gate, mask=(goes != 0) & (row % _CHUNK == 0))
        bits_at = starts_at + (own_rows + _CHUNK - 1) // _CHUNK * 4
        bit = tl.arange(0, 8)[None, :]
        for byte in range(0, MASK_BYTES):
            flag = byte * 8 + bit
            is_block = valid[:, None] & (flag < B)
            chosen = tl.load(blocks + wide[:, None] * B + flag, mask=is_block, other=0) != 0
            is_expert = valid[:, None] & (flag >= B) & (flag < B + E)
            given = tl.load(gates + wide[:, None] * stride + rank * E + flag - B, mask=is_expert, other=0.0) != 0
            packed = tl.sum((chosen | given).to(tl.int32) << bit, 1)
            at = bits_out + bits_at + row.to(tl.int64) * MASK_BYTES + byte
            tl.store(at, packed.to(tl.uint8), mask=goes != 0)
        tl.store(row_of + wide * R + rank, tl.where(goes != 0, first_row + row, -1), mask=valid)
        tl.store(gate_of + wide * R + rank, gate, mask=valid)


@triton.jit
def _chunk(table, R: tl.constexpr, RP: tl.constexpr, ROW_BYTES: tl.constexpr, MASK_BYTES: tl.constexpr):
    """Of this program's `_CHUNK` rows of one run: where the run starts, its rows and gates, the rows of earlier runs,
    and which chunk of it this is."""
    rank, rows, gates = _runs(table, R, RP)
    chunks = (rows + _CHUNK - 1) // _CHUNK
    mine = tl.sum((tl.cumsum(chunks, 0) <= tl.program_id(0)).to(tl.int32), 0)
    sizes = _run_bytes(rows, gates, ROW_BYTES, MASK_BYTES, False)
    start = tl.sum(tl.where(rank < mine, sizes, 0), 0)
    own_rows = tl.sum(tl.where(rank == mine, rows, 0), 0)
    own_gates = tl.sum(tl.where(rank == mine, gates, 0), 0)
    index = tl.program_id(0) - tl.sum(tl.where(rank < mine, chunks, 0), 0)
    return start, own_rows, own_gates, tl.sum(tl.where(rank < mine, rows, 0), 0), index


@triton.jit
def unpack_kernel(
    rows_in,
    gates_in,
    starts_in,
    bits_in,
    table,
    x,
    gates,
    blocks,
    gate_of,
    R: tl.constexpr,
    RP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    B: tl.constexpr,
    BP: tl.constexpr,
    D: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    MASK_BYTES: tl.constexpr,
    STEP: tl.constexpr,
    COPY: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program per chunk of a run and slice of the width; those of the first slice read all but rows."""
    start, run_rows, run_gates, first_row, chunk = _chunk(table, R, RP, ROW_BYTES, MASK_BYTES)
    ITEM: tl.constexpr = ROW_BYTES // D
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    for first in range(0, _CHUNK, COPY):
        row = (chunk * _CHUNK + first + tl.arange(0, COPY)).to(tl.int64)[:, None]
        inside = (row < run_rows) & (d < D)
        values = tl.load(rows_in + _first_number(start, ITEM) + row * D + d, mask=inside)
        tl.store(x + (first_row + row) * D + d, values, mask=inside)

    if tl.program_id(1) == 0:
        gates_at = start + _gates_at(run_rows, ROW_BYTES)
        starts_at = gates_at + run_gates.to(tl.int64) * 4
        bits_at = starts_at + (run_rows + _CHUNK - 1) // _CHUNK * 4
        gate = tl.load(starts_in + starts_at // 4 + chunk)
        expert, block = tl.arange(0, EP)[None, :], tl.arange(0, BP)[None, :]
        for first in range(0, _CHUNK, STEP):
            row = (chunk * _CHUNK + first + tl.arange(0, STEP)).to(tl.int64)
            valid = row < run_rows
            masks = bits_in + bits_at + row[:, None] * MASK_BYTES
            inside = valid[:, None] & (expert < E)
            flag = B + expert
            active = (tl.load(masks + flag // 8, mask=inside, other=0).to(tl.int32) >> (flag % 8)) & 1
            count = tl.sum(active, 1)
            before = gate + tl.cumsum(count, 0) - count
            each = before[:, None] + tl.cumsum(active, 1) - active
            values = tl.load(gates_in + gates_at // 4 + each, mask=active != 0, other=0.0)
            tl.store(gates + (first_row + row)[:, None] * E + expert, values, mask=inside)
            tl.store(gate_of + first_row + row, before, mask=valid)
            inside = valid[:, None] & (block < B)
            chosen = (tl.load(masks + block // 8, mask=inside, other=0).to(tl.int32) >> (block % 8)) & 1
            tl.store(blocks + (first_row + row)[:, None] * B + block, chosen.to(tl.uint8), mask=inside)
            gate += tl.sum(count, 0)


@triton.jit
def pack_gradients_kernel(
    grad_x,
    grad_gates,
    gates,
    gate_of,
    table,
    rows_out,
    gates_out,
    R: tl.constexpr,
    RP: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    D: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    STEP: tl.constexpr,
    COPY: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """As `unpack_kernel`, the other way: rows, and the gradients of gates that are active."""
    start, run_rows, _, first_row, chunk = _chunk(table, R, RP, ROW_BYTES, 0)
    ITEM: tl.constexpr = ROW_BYTES // D
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    for first in range(0, _CHUNK, COPY):
        row = (chunk * _CHUNK + first + tl.arange(0, COPY)).to(tl.int64)[:, None]
        inside = (row < run_rows) & (d < D)
        values = tl.load(grad_x + (first_row + row) * D + d, mask=inside)
        tl.store(rows_out + _first_number(start, ITEM) + row * D + d, values, mask=inside)

    if tl.program_id(1) == 0:
        gates_at = start + _gates_at(run_rows, ROW_BYTES)
        expert = tl.arange(0, EP)[None, :]
        for first in range(0, _CHUNK, STEP):
            row = (chunk * _CHUNK + first + tl.arange(0, STEP)).to(tl.int64)
            valid = row < run_rows
            at = (first_row + row)[:, None] * E + expert
            inside = valid[:, None] & (expert < E)
            active = (tl.load(gates + at, mask=inside, other=0.0) != 0).to(tl.int32)
            before = tl.load(gate_of + first_row + row, mask=valid, other=0)
            each = before[:, None] + tl.cumsum(active, 1) - active
            values = tl.load(grad_gates + at, mask=active != 0, other=0.0)
            tl.store(gates_out + gates_at // 4 + each, values, mask=active != 0)


@triton.jit(do_not_specialize=["n"])
def spread_kernel(
    grad, row_of, rows_out, n, R: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """A token's gradient for every rank that it went to."""
    token, rank = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    row = tl.load(row_of + token.to(tl.int64) * R + rank, mask=token < n, other=-1)
    inside = (row >= 0)[:, None] & (d < D)
    values = tl.load(grad + token.to(tl.int64)[:, None] * D + d, mask=inside)
    tl.store(rows_out + row.to(tl.int64)[:, None] * D + d, values, mask=inside)


@triton.jit(do_not_specialize=["n", "stride"])
def sum_kernel(
    rows_in,
    gates_in,
    gates,
    row_of,
    gate_of,
    table,
    total,
    grad_gates,
    n,
    stride,
    R: tl.constexpr,
    E: tl.constexpr,
    EP: tl.constexpr,
    D: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    HAS_GATES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A token's sum over the ranks that it went to, in their order and in float32; and the gradients of its gates."""
    token, part = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    wide, valid = token.to(tl.int64), token < n
    ITEM: tl.constexpr = ROW_BYTES // D
    d = part * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    expert = tl.arange(0, EP)[None, :]
    sums = tl.zeros((TOKENS, BLOCK_D), tl.float32)
    first_row = tl.full((), 0, tl.int64)
    start = tl.full((), 0, tl.int64)
    for rank in range(0, R):
        run_rows = tl.load(table + rank * _COUNTS)
        run_gates = tl.load(table + rank * _COUNTS + 1)
        row = tl.load(row_of + wide * R + rank, mask=valid, other=-1)
        inside = (row >= 0)[:, None] & (d < D)
        first_number = _first_number(start, ITEM) if HAS_GATES else start // ITEM
        source = rows_in + first_number + (row - first_row)[:, None] * D + d
        sums += tl.load(source, mask=inside, other=0.0).to(tl.float32)
        if HAS_GATES:
            if part == 0:
                _, active = _active_gates(gates, token, rank, n, stride, E, EP)
                gate = tl.load(gate_of + wide * R + rank, mask=valid, other=0)
                each = gate[:, None] + tl.cumsum(active, 1) - active
                gates_at = start + _gates_at(run_rows, ROW_BYTES)
                values = tl.load(gates_in + gates_at // 4 + each, mask=active != 0, other=0.0)
                target = grad_gates + wide[:, None] * (R * E) + rank * E + expert
                tl.store(target, values, mask=valid[:, None] & (expert < E))
        first_row += run_rows
        start += _run_bytes(run_rows, run_gates, ROW_BYTES, 0, HAS_GATES == 0)
    tl.store(total + wide[:, None] * D + d, sums.to(total.dtype.element_ty), mask=valid[:, None] & (d < D))
