"""Which rows every (expert, block) group computes: a deterministic plan, made on the device without a host stall.

Tokens of a group are listed in ascending order and padded to whole tiles of `tile_rows`; a tile belongs to one group.
Slot s = tile * tile_rows + row numbers the rows of all tiles in a row. Groups are ordered by expert, then block, so
the slots of one token ascend, and a sum over them has one order.

Three small kernels: counts per (token span, expert, block), a prefix sum over spans, and a fill. Where the routing
kernel ran it has counted already. The prefix sums do not depend on the tile size and take G / 32 bytes per token for G
groups, so the forward pass keeps them, and a backward pass with tiles of its own plans again with one launch.

The number of rows is known only on the device, so a plan's buffers have the size of the worst case, N * B blocks per
active expert column: `rows` takes 4 bytes per worst-case row and `token_slots` 4 per (token, expert, block). That is
as much as the tokens themselves at N = 16384, D = 1024, K = B = 16, hence a plan is dropped after use, even where both
passes have the same tiles. A tile that is not needed costs one load and an exit.
"""

# Arguments of device functions have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from unifmoe_dist.kernels import tile_sizes
from unifmoe_dist.kernels.triton.math import power_of_two

SPAN = 128  # tokens between two offsets


@dataclass(frozen=True)
class GroupOffsets:
    """Prefix sums of the sizes of G = E * B groups.

    Args:
        earlier: (ceil(N / SPAN), E, B) int32, rows of every group that belong to tokens before the span.
        totals: (E, B) int32, rows of every group.
    """

    earlier: Tensor
    totals: Tensor


@dataclass(frozen=True)
class Plan:
    """Rows of every group. G = E * B groups, T = `max_tiles` tiles, of which the first `num_tiles` are used.

    Args:
        rows: (T * tile_rows,) int32, token of every slot; undefined in padding.
        tile_group: (T,) int32, group expert * B + block of every tile.
        tile_count: (T,) int32, rows in use in every tile.
        num_tiles: (1,) int32.
        group_tiles: (G + 1,) int32, first tile of every group.
        token_slots: (N, G) int32, slots of every token, ascending; undefined beyond its count.
        token_count: (N,) int32.
        counters: int32 zeros, as many as were asked for.
        tile_rows: Rows of a tile.
    """

    rows: Tensor
    tile_group: Tensor
    tile_count: Tensor
    num_tiles: Tensor
    group_tiles: Tensor
    token_slots: Tensor
    token_count: Tensor
    counters: Tensor
    tile_rows: int

    @property
    def tiles(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a kernel with a program per tile reads."""
        return self.rows, self.tile_group, self.tile_count, self.num_tiles

    @property
    def max_tiles(self) -> int:
        return self.tile_group.shape[0]


def count_groups(gates_NE: Tensor, blocks_NB: Tensor, has_shared: bool = False) -> GroupOffsets:
    """Offsets of every group; arguments as in `make_plan`."""
    return scan_groups(count_rows(gates_NE, blocks_NB, has_shared), 1)


def count_rows(gates_NE: Tensor, blocks_NB: Tensor, has_shared: bool) -> Tensor:
    """(spans, E, B) int32, rows of every group among the tokens of each span; arguments as in `make_plan`."""
    (n, experts), num_blocks = gates_NE.shape, blocks_NB.shape[1]
    counts = gates_NE.new_empty((triton.cdiv(n, SPAN), experts, num_blocks), dtype=torch.int32)
    if n:
        _count_kernel[(counts.shape[0], experts)](
            gates_NE.contiguous(),
            blocks_NB.contiguous().view(torch.uint8),
            counts,
            n,
            E=experts,
            B=num_blocks,
            SPAN=SPAN,
            STEP=max(16, min(SPAN, 2048 // power_of_two(num_blocks))),
            BP=power_of_two(num_blocks),
            HAS_SHARED=has_shared,
            num_warps=4,
        )
    return counts


def scan_groups(counts: Tensor, per_span: int, parts: Tensor | None = None, sums: Tensor | None = None) -> GroupOffsets:
    """Offsets from (rows, E, B) int32 counts, `per_span` rows to a span; `parts` are added up in the same launch.

    Args:
        parts: (any, S) float32.
        sums: (S,) float64, receives the sum of the parts.
    """
    rows, experts, num_blocks = counts.shape
    offsets = GroupOffsets(
        counts.new_empty((triton.cdiv(rows, per_span), experts, num_blocks)), counts.new_empty((experts, num_blocks))
    )
    width, blocks = 0 if parts is None else parts.shape[1], power_of_two(num_blocks)
    _scan_kernel[(experts + (parts is not None),)](
        counts,
        offsets.earlier,
        offsets.totals,
        parts,
        sums,
        rows,
        0 if parts is None else parts.shape[0],
        E=experts,
        B=num_blocks,
        BP=blocks,
        STEP=max(16, min(128, 4096 // blocks)),
        PER_SPAN=per_span,
        S=width,
        SP=power_of_two(width),
        num_warps=4,
    )
    return offsets


def make_plan(
    gates_NE: Tensor,
    blocks_NB: Tensor,
    offsets: GroupOffsets,
    tile_rows: int,
    has_shared: bool = False,
    parts: int = 1,
    counters: int = 0,
) -> Plan:
    """Plan the blocks of every token, in one launch.

    Args:
        gates_NE: (N, E) coefficients; 0 means that the token does not use the expert, NaN that it does.
        blocks_NB: (N, B) bool, blocks that the active experts of the token compute.
        offsets: `count_groups` of the same.
        tile_rows: Rows of a tile, a power of two.
        has_shared: Expert 0 computes `blocks_NB` and all others the complement.
        parts: Parts of a block, each a group of its own: the plan then has B * parts blocks.
        counters: Numbers that a later launch counts with, to be cleared.
    """
    (n, experts), num_blocks = gates_NE.shape, blocks_NB.shape[1] * parts
    device = gates_NE.device
    gates, blocks = gates_NE.contiguous(), blocks_NB.contiguous().view(torch.uint8)
    groups = experts * num_blocks
    max_tiles = tile_sizes.max_tiles(n, num_blocks, experts, tile_rows, has_shared)
    spans = triton.cdiv(n, SPAN)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    plan = Plan(
        empty(max_tiles * tile_rows),
        empty(max_tiles),
        empty(max_tiles),
        empty(1),
        empty(groups + 1),
        empty(n, groups),
        empty(n),
        empty(max(1, counters)),
        tile_rows,
    )
    _fill_kernel[(spans + 1, experts)](
        gates,
        blocks,
        offsets.earlier,
        offsets.totals,
        plan.rows,
        plan.tile_group,
        plan.tile_count,
        plan.num_tiles,
        plan.group_tiles,
        plan.token_slots,
        plan.token_count,
        plan.counters,
        n,
        spans,
        counters,
        E=experts,
        B=num_blocks,
        PARTS=parts,
        SPAN=SPAN,
        STEP=max(16, min(SPAN, 2048 // power_of_two(num_blocks))),  # of registers for (STEP, blocks)
        TILE_ROWS=tile_rows,
        GP=power_of_two(groups),
        BP=power_of_two(num_blocks),
        HAS_SHARED=has_shared,
        num_warps=4,
    )
    return plan


@triton.jit
def _selection(
    gates,
    blocks,
    token,
    expert,
    n,
    E: tl.constexpr,
    B: tl.constexpr,
    PARTS: tl.constexpr,
    BP: tl.constexpr,
    HAS_SHARED: tl.constexpr,
):
    """(tokens, BP) bool: which of the B parts of blocks of `expert` the tokens compute."""
    block = tl.arange(0, BP)
    valid = token < n
    active = tl.load(gates + token.to(tl.int64) * E + expert, mask=valid, other=0.0) != 0
    inside = valid[:, None] & (block < B)[None, :]
    at = blocks + token[:, None].to(tl.int64) * (B // PARTS) + (block // PARTS)[None, :]
    chosen = tl.load(at, mask=inside, other=0) != 0
    if HAS_SHARED:
        chosen = chosen == (expert == 0)
    return chosen & inside & active[:, None]


@triton.jit(do_not_specialize=["n"])
def _count_kernel(
    gates,
    blocks,
    counts,
    n,
    E: tl.constexpr,
    B: tl.constexpr,
    SPAN: tl.constexpr,
    STEP: tl.constexpr,
    BP: tl.constexpr,
    HAS_SHARED: tl.constexpr,
):
    span, expert = tl.program_id(0), tl.program_id(1)
    block = tl.arange(0, BP)
    count = tl.zeros((BP,), tl.int32)
    for step in range(0, SPAN, STEP):
        token = span * SPAN + step + tl.arange(0, STEP)
        count += tl.sum(_selection(gates, blocks, token, expert, n, E, B, 1, BP, HAS_SHARED).to(tl.int32), 0)
    tl.store(counts + (span * E + expert) * B + block, count, mask=block < B)


@triton.jit(do_not_specialize=["rows", "num_parts"])
def _scan_kernel(
    counts,
    earlier,
    totals,
    parts,
    sums,
    rows,
    num_parts,
    E: tl.constexpr,
    B: tl.constexpr,
    BP: tl.constexpr,
    STEP: tl.constexpr,
    PER_SPAN: tl.constexpr,
    S: tl.constexpr,
    SP: tl.constexpr,
):
    """One program per expert sums the counts of earlier rows, one more than there are experts sums the parts."""
    expert = tl.program_id(0)
    if expert < E:
        block = tl.arange(0, BP)
        before = tl.zeros((BP,), tl.int32)
        for first in range(0, rows, STEP):
            row = first + tl.arange(0, STEP)
            column = expert * B + block[None, :]
            inside = (row < rows)[:, None] & (block < B)[None, :]
            here = tl.load(counts + row[:, None] * (E * B) + column, mask=inside, other=0)
            starts = inside & (row % PER_SPAN == 0)[:, None]
            at = earlier + (row // PER_SPAN)[:, None] * (E * B) + column
            tl.store(at, before[None, :] + tl.cumsum(here, 0) - here, mask=starts)
            before += tl.sum(here, 0)
        tl.store(totals + expert * B + block, before, mask=block < B)
    elif S > 0:
        s = tl.arange(0, SP)
        total = tl.zeros((SP,), tl.float64)
        for first in range(0, num_parts, 32):
            part = first + tl.arange(0, 32)
            inside = (part < num_parts)[:, None] & (s < S)[None, :]
            total += tl.sum(tl.load(parts + part[:, None] * S + s[None, :], mask=inside, other=0.0).to(tl.float64), 0)
        tl.store(sums + s, total, mask=s < S)


@triton.jit(do_not_specialize=["n", "spans", "num_counters"])
def _fill_kernel(
    gates,
    blocks,
    earlier,
    totals,
    rows,
    tile_group,
    tile_count,
    num_tiles,
    group_tiles,
    token_slots,
    token_count,
    counters,
    n,
    spans,
    num_counters,
    E: tl.constexpr,
    B: tl.constexpr,
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,
    STEP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    GP: tl.constexpr,
    BP: tl.constexpr,
    HAS_SHARED: tl.constexpr,
):
    """B counts the parts of all blocks; offsets and masks are those of whole blocks."""
    span, expert = tl.program_id(0), tl.program_id(1)
    block = tl.arange(0, BP)
    group = tl.arange(0, GP)
    # First tile of every group of this expert: the tiles of earlier experts, then of its own earlier blocks.
    sizes = tl.load(totals + group // PARTS, mask=group < expert * B, other=0)
    own = tl.load(totals + (expert * B + block) // PARTS, mask=block < B, other=0)
    own_tiles = (own + TILE_ROWS - 1) // TILE_ROWS
    first_tile = tl.sum((sizes + TILE_ROWS - 1) // TILE_ROWS, 0) + tl.cumsum(own_tiles, 0) - own_tiles
    if span == spans:  # the last column of programs describes the tiles
        tl.store(group_tiles + expert * B + block, first_tile, mask=block < B)
        end = tl.max(first_tile + own_tiles, 0)
        if expert == E - 1:
            tl.store(group_tiles + E * B, end)
            tl.store(num_tiles, end)
            for first in range(0, num_counters, 128):
                counter = first + tl.arange(0, 128)
                tl.store(counters + counter, tl.zeros((128,), tl.int32), mask=counter < num_counters)
        for first in range(0, tl.max(own_tiles, 0), 32):
            index = first + tl.arange(0, 32)
            inside = (index[None, :] < own_tiles[:, None]) & (block < B)[:, None]
            tile = first_tile[:, None] + index[None, :]
            count = tl.minimum(own[:, None] - index[None, :] * TILE_ROWS, TILE_ROWS)
            tl.store(tile_group + tile, (expert * B + block)[:, None] + tl.zeros_like(tile), mask=inside)
            tl.store(tile_count + tile, count, mask=inside)
    else:
        before = tl.load(earlier + ((span * E + expert) * B + block) // PARTS, mask=block < B, other=0)
        for step in range(0, SPAN, STEP):
            token = span * SPAN + step + tl.arange(0, STEP)
            chosen = _selection(gates, blocks, token, expert, n, E, B, PARTS, BP, HAS_SHARED).to(tl.int32)
            place = (first_tile * TILE_ROWS + before)[None, :] + tl.cumsum(chosen, 0) - chosen
            tl.store(rows + place, token[:, None] + tl.zeros_like(place), mask=chosen != 0)
            # Position in the token's own list: its blocks under earlier experts, then under this one.
            inside = (token < n)[:, None] & (block < B)[None, :]
            at = blocks + token[:, None].to(tl.int64) * (B // PARTS) + (block // PARTS)[None, :]
            mine = tl.load(at, mask=inside, other=0) != 0
            width = tl.sum((mine & inside).to(tl.int32), 1)
            position = tl.zeros((STEP,), tl.int32)
            for first in range(0, expert, 16):
                other = first + tl.arange(0, 16)
                used = (
                    tl.load(
                        gates + token[:, None].to(tl.int64) * E + other[None, :],
                        mask=(token < n)[:, None] & (other < expert)[None, :],
                        other=0.0,
                    )
                    != 0
                )
                if HAS_SHARED:
                    blocks_each = tl.where(other[None, :] == 0, width[:, None], B - width[:, None])
                else:
                    blocks_each = width[:, None] + tl.zeros_like(other)[None, :]
                position += tl.sum(tl.where(used, blocks_each, 0), 1)
            at = token_slots + token[:, None].to(tl.int64) * (E * B) + position[:, None] + tl.cumsum(chosen, 1) - chosen
            tl.store(at, place, mask=chosen != 0)
            if expert == E - 1:
                tl.store(token_count + token, position + tl.sum(chosen, 1), mask=token < n)
            before += tl.sum(chosen, 0)
