"""Sizes of the Triton path's buffers, from shapes alone and without Triton: kernels and the memory estimate share them.

Groups are pairs of an expert and a block, or part of a block. A tile is some rows of one group.
"""

from __future__ import annotations

import math

WIDEST = {(2, False): 256, (4, False): 128, (2, True): 192, (4, True): 64}
"""Channels of a block held in registers, by bytes of the type and whether experts are gated, which have two of each."""
WORKSPACE_BYTES = 384 * 2**20
WORKSPACE_TOKENS = 24
"""A workspace of so many rows a token, or of so many bytes where that is more, holds what the paper's layers need: 22
rows of a language layer forward, 9 of a vision layer that are twice as long in the backward pass."""
MOST_FILLINGS = 512


def parts(width: int, item: int, gated: bool, widest: int | None = None) -> tuple[int, int]:
    """In how many parts a block of `width` channels of `item` bytes is cut, and channels of a part, a multiple of 16.

    As few as registers hold, or as parts of at most `widest` channels are, or one more where that makes them equal;
    else the last part is the shorter one.
    """
    fewest = math.ceil(width / min(WIDEST[item, gated], widest or width))
    for count in (fewest, fewest + 1):
        if width % (16 * count) == 0:
            return count, width // count
    return fewest, 16 * math.ceil(width / (16 * fewest))


def tile_rows(tokens: int, experts: int, largest: int) -> int:
    """Rows of a tile: a group has about 3 / experts of the tokens, and tiles should be mostly full."""
    power = 1 << max(0, tokens // experts - 1).bit_length()
    return min(largest, max(16, power))


def max_tiles(tokens: int, blocks: int, experts: int, rows: int, shared: bool) -> int:
    """Tiles if every token used every expert; with a shared one, a block is computed either by it or by the others."""
    columns = max(experts - 1, 1) if shared else experts
    return math.ceil(tokens * blocks * columns / rows) + experts * blocks


def workspace_bytes(tokens: int, row_bytes: int) -> int:
    """Bytes for rows that wait to be summed, `row_bytes` in the output of a token."""
    return max(WORKSPACE_BYTES, WORKSPACE_TOKENS * tokens * row_bytes)


def held_tiles(tokens: int, blocks: int, experts: int, rows: int, most: int, affordable: int) -> int:
    """Tiles in a workspace, of the `most` and as many as it affords: rows for 2 blocks of all blocks a token.

    At least three where there may be more, since what it does not hold at once passes through it by thirds, and so
    many that no more than `MOST_FILLINGS` pass: their tickets are counted in 32 bits.
    """
    typical = math.ceil(2 * blocks * tokens / rows) + experts * blocks
    least = max(3, math.ceil(3 * most / MOST_FILLINGS))
    return min(most, max(least, min(typical, affordable)))


def overflows(
    tokens: int,
    dim: int,
    width: int,
    blocks: int,
    experts: int,
    rows: int,
    item: int,
    shared: bool,
    gated: bool,
    widest: int | None = None,
) -> bool:
    """Whether either pass may need more tiles than its default workspace holds, with `rows` a tile.

    `blocks` of `width` channels, computed `widest` at a time, `experts` with the shared one, `item` bytes of the type.
    """
    cuts, part = parts(width, item, gated, widest)
    token = dim * item
    backward = token + (2 + gated) * part * item  # holds more of a row, hence no more tiles
    most = max_tiles(tokens, blocks * cuts, experts, rows, shared)
    affordable = workspace_bytes(tokens, token) // (backward * rows)
    return held_tiles(tokens, blocks * cuts, experts, rows, most, affordable) < most
