"""The workspace of the block-sparse FFN: how large it is, and the sizes that a call's launches share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from unifmoe_dist.kernels import tile_sizes
from unifmoe_dist.kernels.scratch import Scratch, take
from unifmoe_dist.kernels.triton import tuning
from unifmoe_dist.kernels.triton.ffn_reductions import combine_kernel
from unifmoe_dist.kernels.triton.math import power_of_two, precision
from unifmoe_dist.kernels.triton.plan import Plan

HOPPER = 200 * 1024  # bytes of shared memory that a program may have from an H100 on


@dataclass(frozen=True)
class TritonOptions:
    """How the Triton path computes; the results differ by float rounding only.

    Args:
        workspace_bytes: Bytes for rows waiting to be summed, in each pass; None for the default.
        tile_rows: Rows of a tile, a power of two from 16 to 128; None chooses by the number of tokens.
        tail_rows: Rows that are computed of a tile in which no more are in use, a power of two from 16.
        kept_bytes: Bytes for channels before the activation, from the forward pass to the backward pass; those of the
            other rows are computed again. None keeps at most what a dense FFN of this width keeps.
        part_channels: Most channels of a block that are computed at once, where registers hold more.
    """

    workspace_bytes: int | None = None
    tile_rows: int | None = None
    tail_rows: int = 64
    kept_bytes: int | None = None
    part_channels: int | None = None


def tile_rows(device: torch.device, dtype: torch.dtype, tokens: int, experts: int) -> int:
    """Rows of a tile of the forward pass, of so many experts in the same launches."""
    largest = 128 if dtype.itemsize == 2 and tuning.shared_memory(device) >= tuning.LARGE else 64
    return tile_sizes.tile_rows(tokens, experts, largest)


def part_channels(device: torch.device, gated: bool) -> int | None:
    """Most channels of a block that are computed at once, where it is not registers alone that say so.

    An A100 keeps the operands of products in registers too: of 192 gated channels its overflow launch would keep
    5 KiB of a thread on the stack.
    """
    return 128 if gated and tuning.LARGE <= tuning.shared_memory(device) < HOPPER else None


class LaunchShape:
    """Sizes that the launches of one call share."""

    def __init__(
        self,
        x: Tensor,
        gates: Tensor,
        keys: Tensor,
        num_blocks: int,
        options: TritonOptions,
        gated: bool = False,
        shared: bool = False,
    ) -> None:
        self.n, self.dim = x.shape
        self.experts = gates.shape[1]
        self.block_width = keys.shape[1] // num_blocks
        self.options, self.banks = options, 1 + gated
        widest = options.part_channels or part_channels(x.device, gated)
        self.parts, self.width = tile_sizes.parts(self.block_width, x.element_size(), gated, widest)
        self.blocks = num_blocks * self.parts
        # Three equal tiles where that wastes fewer channels than one power of two.
        third = power_of_two(triton.cdiv(self.width, 3), 16)
        self.sub, self.num_sub = power_of_two(self.width, 16), 1
        if 3 * third < self.sub:
            self.sub, self.num_sub = third, 3
        self.tile_rows = options.tile_rows or self._tile_rows(x)
        self.row_bytes = self.dim * x.element_size()
        default = tile_sizes.workspace_bytes(self.n, self.row_bytes)
        self.limit = default if options.workspace_bytes is None else options.workspace_bytes
        self.precision = precision(x.dtype)
        self.shared = shared
        # Channels and columns of a program that sums over rows, whichever launch has it.
        self.gradient_channels = min(128, power_of_two(self.width, 16))
        self.combined_columns = min(512, power_of_two(self.dim))

    def _tile_rows(self, x: Tensor) -> int:
        return tile_rows(x.device, x.dtype, self.n, self.experts)

    def max_tiles(self) -> int:
        """Tiles if every token used every expert."""
        return tile_sizes.max_tiles(self.n, self.blocks, self.experts, self.tile_rows, self.shared)

    def held_tiles(self, row_bytes: int) -> int:
        """Tiles that a workspace of `row_bytes` per row holds at once."""
        affordable = self.limit // (row_bytes * self.tile_rows)
        sizes = self.n, self.blocks, self.experts, self.tile_rows
        return tile_sizes.held_tiles(*sizes, self.max_tiles(), affordable)

    def tile_arguments(self) -> dict[str, Any]:
        """What every kernel with tiles is compiled for."""
        return self.group_arguments() | dict(
            E=self.experts, SUB=self.sub, NUM_SUB=self.num_sub, D=self.dim, PRECISION=self.precision
        )

    def group_arguments(self) -> dict[str, Any]:
        """How groups and their channels lie."""
        return dict(B=self.blocks, PARTS=self.parts, WIDTH=self.block_width, M=self.width, TILE_ROWS=self.tile_rows)


class Workspace:
    """Rows that wait to be summed over their tokens, and the sums.

    Args:
        like: (N, D), gives the type and device of the output.
        shape: Sizes.
        row_bytes: Bytes per row, of all that is kept of it.
        scratch: What a pass that is captured is lent for its rows.

    Attributes:
        tiles: Tiles that it holds at once.
        fillings: How often at most the overflow launch fills a third of it.
        rows: (tiles * tile_rows, D).
        total: (N, D) float32, sums over the rows so far; one number where all tiles fit.
        output: (N, D).
    """

    def __init__(self, like: Tensor, shape: LaunchShape, row_bytes: int, scratch: Scratch | None) -> None:
        self.shape, self.tiles, self.scratch = shape, shape.held_tiles(row_bytes), scratch
        self.fillings = triton.cdiv(shape.max_tiles() - self.tiles, max(1, self.tiles // 3))
        self.rows = self.rows_of("rows", shape.dim, like.dtype, like.device)
        size = like.shape if self.fillings else (1,)
        self.total = take(scratch, "total", size, torch.float32, like.device)
        self.output = torch.empty_like(like)

    def rows_of(self, name: str, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(tiles * tile_rows, width), until the pass ends."""
        return take(self.scratch, name, (self.tiles * self.shape.tile_rows, width), dtype, device)

    def kept(self, x: Tensor, wanted: bool) -> Tensor:
        """(tiles, banks of keys, tile_rows, M) for channels before the activation of the first tiles that it holds."""
        shape, item = self.shape, x.element_size()
        limit = shape.options.kept_bytes
        if limit is None:  # a dense FFN keeps these channels and those after the activation
            limit = (1 + shape.banks) * shape.n * shape.blocks * shape.width * item
        tile = shape.banks, shape.tile_rows, shape.width
        tiles = min(self.tiles, limit // (math.prod(tile) * item)) if wanted else 0
        return x.new_empty((tiles, *tile))

    @property
    def counters(self) -> int:
        """Counters of the overflow launch."""
        return 1 + 2 * self.fillings if self.fillings else 0

    def combine(self, plan: Plan, gates: Tensor, shared_value_bias: Tensor | None, value_bias: Tensor | None) -> None:
        """Sum the rows that are in it, and the value biases."""
        shape = self.shape
        block_d = shape.combined_columns
        combine_kernel[(shape.n, triton.cdiv(shape.dim, block_d))](
            self.rows,
            gates,
            shared_value_bias,
            value_bias,
            self.total,
            self.output,
            plan.token_slots,
            plan.token_count,
            plan.num_tiles,
            self.tiles,
            E=shape.experts,
            G=shape.experts * shape.blocks,
            D=shape.dim,
            TILE_ROWS=shape.tile_rows,
            HAS_SHARED=shared_value_bias is not None,
            HAS_BIAS=value_bias is not None,
            BLOCK_D=block_d,
            num_warps=4,
        )
