"""What each kernel of a layer does, in operations and bytes, from the constants it is compiled for and a load.

Device code is not asked: these are counts on paper, which a measurement confirms or refutes line by line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unifmoe_dist.studies.kernel_estimates.cases import Load
from unifmoe_dist.studies.kernel_estimates.compiled import Launch


@dataclass(frozen=True)
class Work:
    """Operations; bytes that cross the L2 cache; bytes that come from or go to memory, if the cache kept nothing; and
    programs with turns of a loop in each."""

    operations: float
    cached: float
    memory: float
    programs: float = 0.0
    turns: float = 0.0


_ITEM = 2  # bytes, of half precision


def work_of(launch: Launch, load: Load) -> Work | None:
    """What a launch does; None where it only counts or adds, which its launch outweighs."""
    count = _COUNTS.get(launch.name)
    return None if count is None else count(launch.given, load)


def _columns(given: dict[str, Any], load: Load) -> Work:
    read = load.hidden * load.dim * _ITEM
    return Work(load.hidden * load.dim, read, read)


def _route(given: dict[str, Any], load: Load) -> Work:
    products = 3 if given["SPLIT"] else 1
    read = load.tokens * load.dim * _ITEM + load.tokens / given["TOKENS"] * (given["KP"] + given["BP"]) * load.dim * 4
    pairs = load.tokens * (given["BP"] * load.blocks + given["KP"] * load.experts) * 8  # ranks, by comparing all
    return Work(2 * products * load.tokens * load.dim * (given["KP"] + given["BP"]) + pairs, read, read)


def _fill(given: dict[str, Any], load: Load) -> Work:
    gates = load.tokens * given["E"] ** 2 / 2 * 4
    slots = load.rows(given["PARTS"]) * 8
    return Work(load.tokens * given["E"] * given["B"] * 10, gates + slots, slots)


def _ffn(given: dict[str, Any], load: Load) -> Work:
    rows, width, dim = load.tile_rows(given, given["TAIL_ROWS"]), given["M"], load.dim
    banks, backward = 2 + load.gated, given["BACKWARD"]
    tiles = load.tile_rows(given, given["TILE_ROWS"]) / given["TILE_ROWS"]
    kept = min(1.0, given["kept_tiles"] / tiles)
    again = (1 - kept) * backward  # of the channels before the activation
    # Backward: values the other way and gradients of all keys spread.
    products = banks + again * (banks - 1)
    channels = (banks - 1) * load.rows(given["PARTS"]) * width * _ITEM
    read = tiles * products * width * dim * _ITEM + rows * (1 + again) * dim * _ITEM + channels * backward
    written = load.rows(given["PARTS"]) * (dim + (banks * width if backward else 0)) * _ITEM
    written += channels * (again if backward else kept)
    weights = banks * (load.experts + 1) * load.hidden * dim * _ITEM
    tokens = (1 + again) * load.tokens * dim * _ITEM + channels * kept * backward
    turns = dim / min(given["BLOCK_K"], given["BLOCK_D"])
    return Work(2 * products * rows * width * dim, read + written, weights + tokens + written, tiles, turns)


def _combine(given: dict[str, Any], load: Load) -> Work:
    parts = given["G"] // given["E"] // load.blocks
    moved = (load.rows(parts) + load.tokens) * load.dim * _ITEM
    return Work(load.rows(parts) * load.dim, moved, moved)


def _weights(given: dict[str, Any], load: Load) -> Work:
    matrices, rows, width = 2 + load.gated, load.rows(given["PARTS"]), given["M"]
    slices = math.ceil(load.dim / given["BLOCK_D"]), math.ceil(width / given["BLOCK_H"])
    read = rows * (width * slices[0] + load.dim * slices[1]) * _ITEM * matrices
    written = matrices * (load.experts + 1) * load.hidden * load.dim * _ITEM
    channels = matrices * rows * width * _ITEM
    sides = slices[0] * given["BLOCK_D"], slices[1] * given["BLOCK_H"]  # what is beyond them is computed and not stored
    groups = (load.experts + 1) * given["B"]
    programs, turns = matrices * slices[0] * slices[1] * groups, rows / groups / given["BLOCK_R"]
    operations = 2 * matrices * rows * sides[0] * sides[1]
    return Work(operations, read + written, channels + written, programs, turns)


def _gate_gradients(given: dict[str, Any], load: Load) -> Work:
    read = load.tokens * load.dim * _ITEM + load.rows(given["PARTS"]) * 4
    return Work(2 * load.tokens * load.dim * given["EP"], read, read)


def _route_backward(given: dict[str, Any], load: Load) -> Work:
    moved = load.tokens * (load.dim * _ITEM + (load.experts + 1) * 12)
    return Work(6 * load.tokens * load.dim * given["KP"], moved, moved)


_COUNTS: dict[str, Callable[[dict[str, Any], Load], Work]] = {
    "columns_kernel": _columns,
    "route_kernel": _route,
    "_fill_kernel": _fill,
    "ffn_kernel": _ffn,
    "combine_kernel": _combine,
    "weight_grad_kernel": _weights,
    "gate_grad_kernel": _gate_gradients,
    "route_backward_kernel": _route_backward,
    "route_weight_kernel": _route_backward,
}
