"""Which rows every (expert, block) group computes: a deterministic plan, made on the device without a host stall.

Tokens of a group are listed in ascending order and padded to whole tiles of `tile_rows`; a tile belongs to one group.
Slot s = tile * tile_rows + row numbers the rows of all tiles in a row. Groups are ordered by expert, then block, so
the slots of one token ascend, and a sum over them has one order.

Three small kernels: counts per (token chunk, expert, block), a prefix sum over chunks, and a fill. The number of rows
is known only on the device, so buffers have the size of the worst case, N * B blocks per active expert column:
`rows` takes 4 bytes per worst-case row and `token_slots` 4 per (token, expert, block), both dropped after use. A
tile that is not needed costs one load and an exit.
"""

# Arguments of device functions have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from unifmoe_dist.kernels.triton_math import power_of_two

_CHUNK = 128  # tokens per counting program


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
        tile_rows: Rows of a tile.
    """

    rows: Tensor
    tile_group: Tensor
    tile_count: Tensor
    num_tiles: Tensor
    group_tiles: Tensor
    token_slots: Tensor
    token_count: Tensor
    tile_rows: int

    @property
    def max_tiles(self) -> int:
        return self.tile_group.shape[0]


def make_plan(gates_NE: Tensor, blocks_NB: Tensor, tile_rows: int, has_shared: bool = False) -> Plan:
    """Plan the blocks of every token.

    Args:
        gates_NE: (N, E) coefficients; 0 means that the token does not use the expert, NaN that it does.
        blocks_NB: (N, B) bool, blocks that the active experts of the token compute.
        tile_rows: Rows of a tile, a power of two.
        has_shared: Expert 0 computes `blocks_NB` and all others the complement.
    """
    (n, experts), num_blocks = gates_NE.shape, blocks_NB.shape[1]
    device = gates_NE.device
    gates, blocks = gates_NE.contiguous(), blocks_NB.contiguous().view(torch.uint8)
    groups = experts * num_blocks
    # A block is computed either by the shared expert or by the others, hence one column less where there are others.
    columns = max(experts - 1, 1) if has_shared else experts
    max_tiles = triton.cdiv(n * num_blocks * columns, tile_rows) + groups
    chunks = triton.cdiv(n, _CHUNK)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    counts, totals = empty(chunks, experts, num_blocks), empty(groups)
    plan = Plan(
        empty(max_tiles * tile_rows), empty(max_tiles), empty(max_tiles), empty(1), empty(groups + 1),
        empty(n, groups), empty(n), tile_rows,
    )  # fmt: skip
    sizes = dict(E=experts, B=num_blocks, BP=power_of_two(num_blocks))
    if n:
        _count_kernel[(chunks, experts)](
            gates, blocks, counts, n, CHUNK=_CHUNK, HAS_SHARED=has_shared, **sizes, num_warps=4
        )
    _scan_kernel[(experts,)](counts, totals, chunks, STEP=32, **sizes, num_warps=4)
    _fill_kernel[(chunks + 1, experts)](
        gates, blocks, counts, totals, plan.rows, plan.tile_group, plan.tile_count, plan.num_tiles, plan.group_tiles,
        plan.token_slots, plan.token_count, n, chunks, CHUNK=_CHUNK, TILE_ROWS=tile_rows, GP=power_of_two(groups),
        HAS_SHARED=has_shared, **sizes, num_warps=4,
    )  # fmt: skip
    return plan


@triton.jit
def _selection(
    gates, blocks, token, expert, n, E: tl.constexpr, B: tl.constexpr, BP: tl.constexpr, HAS_SHARED: tl.constexpr
):  # fmt: skip
    """(tokens, BP) bool: which blocks of `expert` the tokens compute."""
    block = tl.arange(0, BP)
    valid = token < n
    active = tl.load(gates + token.to(tl.int64) * E + expert, mask=valid, other=0.0) != 0
    inside = valid[:, None] & (block < B)[None, :]
    chosen = tl.load(blocks + token[:, None].to(tl.int64) * B + block[None, :], mask=inside, other=0) != 0
    if HAS_SHARED:
        chosen = chosen == (expert == 0)
    return chosen & inside & active[:, None]


@triton.jit(do_not_specialize=["n"])
def _count_kernel(
    gates, blocks, counts, n, E: tl.constexpr, B: tl.constexpr, CHUNK: tl.constexpr, BP: tl.constexpr,
    HAS_SHARED: tl.constexpr,
):  # fmt: skip
    chunk, expert = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    chosen = _selection(gates, blocks, token, expert, n, E, B, BP, HAS_SHARED)
    block = tl.arange(0, BP)
    tl.store(counts + (chunk * E + expert) * B + block, tl.sum(chosen.to(tl.int32), 0), mask=block < B)


@triton.jit(do_not_specialize=["chunks"])
def _scan_kernel(
    counts, totals, chunks, E: tl.constexpr, B: tl.constexpr, STEP: tl.constexpr, BP: tl.constexpr
):  # fmt: skip
    """Turn the counts of every chunk into the number of earlier rows of the group, and keep the totals."""
    expert = tl.program_id(0)
    block = tl.arange(0, BP)
    before = tl.zeros((BP,), tl.int32)
    for first in range(0, chunks, STEP):
        chunk = first + tl.arange(0, STEP)
        at = counts + (chunk[:, None] * E + expert) * B + block[None, :]
        inside = (chunk < chunks)[:, None] & (block < B)[None, :]
        here = tl.load(at, mask=inside, other=0)
        tl.store(at, before[None, :] + tl.cumsum(here, 0) - here, mask=inside)
        before += tl.sum(here, 0)
    tl.store(totals + expert * B + block, before, mask=block < B)


@triton.jit(do_not_specialize=["n", "chunks"])
def _fill_kernel(
    gates, blocks, counts, totals, rows, tile_group, tile_count, num_tiles, group_tiles, token_slots, token_count,
    n, chunks, E: tl.constexpr, B: tl.constexpr, CHUNK: tl.constexpr, TILE_ROWS: tl.constexpr,
    GP: tl.constexpr, BP: tl.constexpr, HAS_SHARED: tl.constexpr,
):  # fmt: skip
    chunk, expert = tl.program_id(0), tl.program_id(1)
    block = tl.arange(0, BP)
    group = tl.arange(0, GP)
    # First tile of every group of this expert: the tiles of earlier experts, then of its own earlier blocks.
    sizes = tl.load(totals + group, mask=group < expert * B, other=0)
    own = tl.load(totals + expert * B + block, mask=block < B, other=0)
    own_tiles = (own + TILE_ROWS - 1) // TILE_ROWS
    first_tile = tl.sum((sizes + TILE_ROWS - 1) // TILE_ROWS, 0) + tl.cumsum(own_tiles, 0) - own_tiles
    if chunk == chunks:  # the last column of programs describes the tiles
        tl.store(group_tiles + expert * B + block, first_tile, mask=block < B)
        end = tl.max(first_tile + own_tiles, 0)
        if expert == E - 1:
            tl.store(group_tiles + E * B, end)
            tl.store(num_tiles, end)
        for first in range(0, tl.max(own_tiles, 0), 32):
            index = first + tl.arange(0, 32)
            inside = (index[None, :] < own_tiles[:, None]) & (block < B)[:, None]
            tile = first_tile[:, None] + index[None, :]
            count = tl.minimum(own[:, None] - index[None, :] * TILE_ROWS, TILE_ROWS)
            tl.store(tile_group + tile, (expert * B + block)[:, None] + tl.zeros_like(tile), mask=inside)
            tl.store(tile_count + tile, count, mask=inside)
    else:
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        chosen = _selection(gates, blocks, token, expert, n, E, B, BP, HAS_SHARED).to(tl.int32)
        earlier = tl.load(counts + (chunk * E + expert) * B + block, mask=block < B, other=0)
        place = (first_tile * TILE_ROWS + earlier)[None, :] + tl.cumsum(chosen, 0) - chosen
        tl.store(rows + place, token[:, None] + tl.zeros_like(place), mask=chosen != 0)
        # Position in the token's own list: its blocks under earlier experts, then under this one.
        inside = (token < n)[:, None] & (block < B)[None, :]
        mine = tl.load(blocks + token[:, None].to(tl.int64) * B + block[None, :], mask=inside, other=0) != 0
        width = tl.sum((mine & inside).to(tl.int32), 1)
        position = tl.zeros((CHUNK,), tl.int32)
        for first in range(0, expert, 16):
            other = first + tl.arange(0, 16)
            used = tl.load(
                gates + token[:, None].to(tl.int64) * E + other[None, :],
                mask=(token < n)[:, None] & (other < expert)[None, :], other=0.0,
            ) != 0  # fmt: skip
            if HAS_SHARED:
                blocks_each = tl.where(other[None, :] == 0, width[:, None], B - width[:, None])
            else:
                blocks_each = width[:, None] + tl.zeros_like(other)[None, :]
            position += tl.sum(tl.where(used, blocks_each, 0), 1)
        at = token_slots + token[:, None].to(tl.int64) * (E * B) + position[:, None] + tl.cumsum(chosen, 1) - chosen
        tl.store(at, place, mask=chosen != 0)
        if expert == E - 1:
            tl.store(token_count + token, position + tl.sum(chosen, 1), mask=token < n)
