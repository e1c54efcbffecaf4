"""The tiles that a workspace does not hold at once: one launch, whatever their number is.

How many tiles there are is known on the device only, and there may be many times more than the workspace holds. They
are computed in fillings of a third of the workspace, in turns: while one third is reduced (its rows summed over tokens,
its channels over groups), the next is filled. Launches for the worst case would be one after the other and mostly
empty; here programs take tickets from a counter, and tickets are in the order of work:

    fill 0, fill 1, reduce 0, fill 2, reduce 1, ..., fill F - 1, reduce F - 2, reduce F - 1

A fill waits for the reduction that empties its third, a reduction for its fill and for the reduction before it (whose
sums it continues). What is waited for has an earlier ticket, so a program that runs has it or is done with it: whatever
the number of programs that run at once, one included, the work goes on. All sums have the order of tiles, so tickets
decide nothing about results. Without such tiles the launch ends at once.
"""

# Arguments of device functions have no Python types.
# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unifmoe_dist.kernels.triton.ffn_kernel import NOTHING_STORED, ffn_tile
from unifmoe_dist.kernels.triton.ffn_products import TILES
from unifmoe_dist.kernels.triton.ffn_reductions import combine_token
from unifmoe_dist.kernels.triton.math import power_of_two
from unifmoe_dist.kernels.triton.plan import Plan
from unifmoe_dist.kernels.triton.weight_gradients import (
    NO_GRADIENTS,
    WEIGHT_TILES,
    bias_grad_tile,
    pick,
    pick_outs,
    weight_grad_tile,
)
from unifmoe_dist.kernels.triton.workspace import LaunchShape, Workspace


@triton.jit
def _wait_for(counter, count):
    """Until `count` programs have told; what they stored before can be read then."""
    while tl.atomic_add(counter, 0, sem="acquire") < count:
        pass


@triton.jit
def _tell(counter):
    tl.debug_barrier()  # the stores of all threads come before
    tl.atomic_add(counter, 1, sem="release")


@triton.jit
def _filling(phase):
    """Whether a phase reduces, and which filling it is about."""
    reducing = (phase % 2 == 0) & (phase > 0)
    return reducing, tl.where(reducing, phase // 2 - 1, (phase + 1) // 2)


@triton.jit
def _tickets(phase, sizes, tile_group, PER_GROUP: tl.constexpr):
    """First and end tile of a phase's filling, and how many tickets the phase has."""
    first_tile, tiles, size, per_reduction = sizes
    reducing, filling = _filling(phase)
    low = tl.minimum(first_tile + filling * size, tiles)
    high = tl.minimum(low + size, tiles)
    tickets = high - low
    if reducing & (low < high):
        tickets = per_reduction
        if PER_GROUP > 0:
            groups = tl.load(tile_group + high - 1) - tl.load(tile_group + low) + 1
            tickets += groups * PER_GROUP
    return low, high, tickets


@triton.jit(do_not_specialize=["n", "kept_tiles", "held_tiles", "max_fillings"])
def overflow_kernel(
    x,
    gates,
    shared_keys,
    keys,
    shared_key_bias,
    key_bias,
    shared_linear_keys,
    linear_keys,
    shared_linear_bias,
    linear_bias,
    shared_values,
    values,
    workspace,
    grad_y,
    hidden,
    grad_pre,
    grad_linear,
    grad_gate,
    grad_bias,
    grad_linear_bias,
    kept,
    kept_tiles,
    rows,
    tile_group,
    tile_count,
    num_tiles,
    group_tiles,
    token_slots,
    token_count,
    counters,
    total,
    out,
    channels_0,
    channels_1,
    channels_2,
    source_0,
    source_1,
    source_2,
    shared_out_0,
    shared_out_1,
    shared_out_2,
    out_0,
    out_1,
    out_2,
    carry,
    partial_0,
    partial_1,
    shared_bias_out_0,
    shared_bias_out_1,
    bias_out_0,
    bias_out_1,
    bias_carry,
    n,
    held_tiles,
    max_fillings,
    seed,
    E: tl.constexpr,
    B: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    SUB: tl.constexpr,
    NUM_SUB: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BACKWARD: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    DROPOUT: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    FIRST_EXPERT: tl.constexpr,
    MATRICES: tl.constexpr,
    BIASES: tl.constexpr,
    MP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Fill and reduce what lies beyond the first `held_tiles`, which have been computed and reduced.

    `counters` are zeros: tickets taken, then tiles done and reductions done of each of `max_fillings`. Weights want
    gradients of MATRICES matrices and BIASES biases, with sums handed on in `carry` (2, MATRICES, M, D) and
    `bias_carry` (2, BIASES, M); the first half of each holds what was cut at `held_tiles`.
    """
    tiles = tl.load(num_tiles)
    third = held_tiles // 3
    fillings = (tiles - held_tiles + third - 1) // third
    if fillings <= 0:
        return
    read = (shared_keys, keys, shared_key_bias, key_bias)
    more_read = (shared_linear_keys, linear_keys, shared_linear_bias, linear_bias)
    beside = (grad_y, hidden, grad_pre, grad_linear, grad_gate, grad_bias, grad_linear_bias)
    CUTS: tl.constexpr = (M + BLOCK_H - 1) // BLOCK_H
    COLUMNS: tl.constexpr = (D + BLOCK_W - 1) // BLOCK_W
    PER_GROUP: tl.constexpr = MATRICES * CUTS * COLUMNS + BIASES
    SLICES: tl.constexpr = (D + BLOCK_C - 1) // BLOCK_C
    combines = (n + TOKENS - 1) // TOKENS * SLICES
    size = (tiles - held_tiles + fillings - 1) // fillings  # alike, so that no filling is nearly empty
    sizes = (held_tiles, tiles, size, combines)
    tiles_done = counters + 1
    reductions_done = tiles_done + max_fillings
    phase = 0
    begin = 0
    low, high, tickets = _tickets(phase, sizes, tile_group, PER_GROUP)
    ticket = tl.atomic_add(counters, 1)
    while phase <= 2 * fillings:
        while (ticket >= begin + tickets) & (phase <= 2 * fillings):
            begin += tickets
            phase += 1
            low, high, tickets = _tickets(phase, sizes, tile_group, PER_GROUP)
        if phase <= 2 * fillings:
            item = ticket - begin
            reducing, filling = _filling(phase)
            place = (filling % 3) * third
            here = (low, high, place * TILE_ROWS)
            if reducing:
                _wait_for(tiles_done + filling, high - low)
                if filling > 0:
                    _, _, before = _tickets(phase - 2, sizes, tile_group, PER_GROUP)
                    _wait_for(reductions_done + filling - 1, before)
                if item < combines:
                    column = (item % SLICES) * BLOCK_C + tl.arange(0, BLOCK_C)
                    first_token = item // SLICES * TOKENS
                    for index in range(0, tl.minimum(TOKENS, n - first_token)):
                        combine_token(
                            (first_token + index).to(tl.int64),
                            column,
                            here,
                            high == tiles,
                            workspace,
                            gates,
                            (None, None),
                            total,
                            out,
                            token_slots,
                            token_count,
                            E,
                            E * B,
                            D,
                            TILE_ROWS,
                            False,
                            False,
                            False,
                        )
                elif PER_GROUP > 0:
                    item -= combines
                    group = tl.load(tile_group + low) + item // PER_GROUP
                    part = item % PER_GROUP
                    if part < MATRICES * CUTS * COLUMNS:
                        if MATRICES > 0:
                            matrix = part // (CUTS * COLUMNS)
                            channel = (part // COLUMNS % CUTS) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
                            column = (part % COLUMNS) * BLOCK_W + tl.arange(0, BLOCK_W)[None, :]
                            shared_outs = (shared_out_0, shared_out_1, shared_out_2)
                            carried = carry + (filling % 2 * MATRICES + matrix).to(tl.int64) * (M * D)
                            carry_on = carry + ((filling + 1) % 2 * MATRICES + matrix).to(tl.int64) * (M * D)
                            weight_grad_tile(
                                group,
                                channel,
                                column,
                                here,
                                pick(matrix, (channels_0, channels_1, channels_2)),
                                pick(matrix, (source_0, source_1, source_2)),
                                pick_outs(matrix, shared_outs, (out_0, out_1, out_2), HAS_SHARED),
                                (carried, carry_on),
                                rows,
                                tile_count,
                                group_tiles,
                                B,
                                PARTS,
                                WIDTH,
                                D,
                                M,
                                TILE_ROWS,
                                BLOCK_H,
                                BLOCK_W,
                                BLOCK_R,
                                HAS_SHARED,
                                PRECISION,
                                True,
                            )
                    elif BIASES > 0:
                        projection = part - MATRICES * CUTS * COLUMNS
                        shared_bias_outs = (shared_bias_out_0, shared_bias_out_1, shared_bias_out_1)
                        bias_grad_tile(
                            group,
                            here,
                            pick(projection, (partial_0, partial_1, partial_1)),
                            pick_outs(projection, shared_bias_outs, (bias_out_0, bias_out_1, bias_out_1), HAS_SHARED),
                            (
                                bias_carry + (filling % 2 * BIASES + projection) * M,
                                bias_carry + ((filling + 1) % 2 * BIASES + projection) * M,
                            ),
                            group_tiles,
                            B,
                            PARTS,
                            WIDTH,
                            M,
                            TILE_ROWS,
                            MP,
                            HAS_SHARED,
                            True,
                        )
                _tell(reductions_done + filling)
            else:
                if filling > 2:
                    _, _, before = _tickets(phase - 3, sizes, tile_group, PER_GROUP)
                    _wait_for(reductions_done + filling - 3, before)
                ffn_tile(
                    low + item,
                    place + item,
                    x,
                    gates,
                    (read, more_read, (shared_values, values)),
                    workspace,
                    beside,
                    (kept, kept_tiles),
                    (rows, tile_group, tile_count),
                    seed,
                    E,
                    B,
                    PARTS,
                    WIDTH,
                    D,
                    M,
                    SUB,
                    NUM_SUB,
                    TILE_ROWS,
                    TILE_ROWS,
                    ACTIVATION,
                    GATED,
                    BACKWARD,
                    HAS_SHARED,
                    HAS_BIAS,
                    PRECISION,
                    DROPOUT,
                    THRESHOLD,
                    SCALE,
                    FIRST_EXPERT,
                    BLOCK_K,
                    BLOCK_D,
                )
                _tell(tiles_done + filling)
            ticket = tl.atomic_add(counters, 1)


def launch_overflow(workspace: Workspace, plan: Plan, given: dict[str, Any], choices: dict[str, Any]) -> None:
    """Compute what the workspace does not hold, if there can be such tiles.

    Args:
        given: Arguments of `overflow_kernel` by name; of those that are missing there is nothing.
        choices: What it is compiled for.
    """
    if not workspace.fillings:
        return
    shape, x = workspace.shape, given["x"]
    names = ("rows", "tile_group", "tile_count", "num_tiles", "group_tiles", "token_slots", "token_count", "counters")
    planned = {name: getattr(plan, name) for name in names}
    sizes = dict(n=shape.n, held_tiles=workspace.tiles, max_fillings=workspace.fillings)
    own = dict(workspace=workspace.rows, total=workspace.total, out=workspace.output)
    tiles = _tiles(x, shape) | dict(BLOCK_C=shape.combined_columns, TOKENS=16)
    counts = dict(MATRICES=0, BIASES=0, MP=power_of_two(shape.width))
    arguments = NOTHING_STORED | NO_GRADIENTS | planned | sizes | own | counts | given | choices | tiles
    overflow_kernel[(_programs(x.device),)](**arguments)


def _tiles(x: Tensor, shape: LaunchShape) -> dict[str, int]:
    """The likeliest tiles of both kinds of work; counters that go on cannot be timed again and again."""
    block_k, block_d, warps, stages = TILES.of(x.dtype, x.device, shape.dim, shape.banks > 1, shape.width)[0]
    block_w, block_r, _, _ = WEIGHT_TILES.of(x.dtype, x.device, shape.dim)[0]
    own = dict(BLOCK_K=block_k, BLOCK_D=block_d, num_warps=warps, num_stages=stages)
    return own | dict(BLOCK_W=block_w, BLOCK_R=block_r, BLOCK_H=shape.gradient_channels)


def _programs(device: torch.device) -> int:
    """As many as may run at once; those that do not are late and find nothing to do."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
