"""Rounds of tiles through a workspace: the sizes that a call's launches share, and the sum of rows over each token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from unifmoe_dist.kernels import tile_sizes
from unifmoe_dist.kernels.triton.ffn_reductions import combine_kernel, finish_kernel
from unifmoe_dist.kernels.triton.math import power_of_two, precision
from unifmoe_dist.kernels.triton.plan import Plan


@dataclass(frozen=True)
class TritonOptions:
    """How the Triton path computes; the results differ by float rounding only.

    Args:
        atomic: Add rows with float32 atomics: less memory, no fixed order of summation.
        workspace_bytes: Bytes for rows waiting to be summed, in each pass; None for the default.
        tile_rows: Rows of a tile, a power of two from 16 to 128; None chooses by the number of tokens.
        backward_tile_rows: The same for the backward pass, which needs twice the registers.
    """

    atomic: bool = False
    workspace_bytes: int | None = None
    tile_rows: int | None = None
    backward_tile_rows: int | None = None


def tile_rows(device: torch.device, dtype: torch.dtype, tokens: int, experts: int) -> int:
    """Rows of a tile of the forward pass, of so many experts in the same launches."""
    largest = 128 if dtype.itemsize == 2 else 64
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        if getattr(properties, "shared_memory_per_block_optin", 2**20) < 128 * 1024:
            largest = 64  # consumer cards
    return tile_sizes.tile_rows(tokens, experts, largest)


class LaunchShape:
    """Sizes that the launches of one call share."""

    def __init__(
        self, x: Tensor, gates: Tensor, keys: Tensor, num_blocks: int, options: TritonOptions, gated: bool
    ) -> None:
        self.n, self.dim = x.shape
        self.experts = gates.shape[1]
        width = keys.shape[1] // num_blocks
        self.parts = tile_sizes.parts(width, x.element_size(), gated)
        self.blocks, self.width = num_blocks * self.parts, width // self.parts
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

    def _tile_rows(self, x: Tensor) -> int:
        return tile_rows(x.device, x.dtype, self.n, self.experts)

    def round_tiles(self, plan: Plan, row_bytes: int) -> int:
        """Tiles computed in a round."""
        affordable = self.limit // (row_bytes * self.tile_rows)
        sizes = self.n, self.blocks, self.experts, self.tile_rows
        return tile_sizes.round_tiles(*sizes, plan.max_tiles, affordable)

    def tile_arguments(self) -> dict[str, Any]:
        return dict(
            E=self.experts,
            B=self.blocks,
            D=self.dim,
            M=self.width,
            SUB=self.sub,
            NUM_SUB=self.num_sub,
            TILE_ROWS=self.tile_rows,
            PRECISION=self.precision,
        )


class Rounds:
    """Rounds of tiles through a workspace, and the sum of its rows over each token.

    Args:
        like: (N, D), gives the type and device of the output.
        plan: The plan.
        shape: Sizes.
        row_bytes: Workspace bytes per row.
        atomic: Rows are added to the float32 sum by the tile kernels.
        one_round: Nothing but that sum limits the number of tiles.
    """

    def __init__(
        self, like: Tensor, plan: Plan, shape: LaunchShape, row_bytes: int, atomic: bool, one_round: bool = False
    ) -> None:
        self.plan, self.shape, self.atomic = plan, shape, atomic
        self.tiles = plan.max_tiles if one_round else shape.round_tiles(plan, row_bytes)
        self.output = torch.empty_like(like)
        several = self.tiles < plan.max_tiles
        if atomic:
            self.rows = self.total = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
        else:
            self.rows = like.new_empty((self.tiles * shape.tile_rows, shape.dim))
            # With a single round nothing is carried over.
            size = like.shape if several else (1,)
            self.total = torch.empty(size, dtype=torch.float32, device=like.device)

    def __iter__(self) -> Iterator[int]:
        """The first tile of every round."""
        return iter(range(0, self.plan.max_tiles, self.tiles))

    def combine(self, first: int, gates: Tensor, shared_value_bias: Tensor | None, value_bias: Tensor | None) -> None:
        """Sum the rows of the round that starts at tile `first`, and on the first, the value biases."""
        shape, plan = self.shape, self.plan
        sizes = dict(
            E=shape.experts,
            D=shape.dim,
            HAS_SHARED=shared_value_bias is not None,
            HAS_BIAS=value_bias is not None,
            BLOCK_D=min(512, power_of_two(shape.dim)),
            num_warps=4,
        )
        grid = (shape.n, triton.cdiv(shape.dim, sizes["BLOCK_D"]))
        if not self.atomic:
            combine_kernel[grid](
                self.rows,
                gates,
                shared_value_bias,
                value_bias,
                self.total,
                self.output,
                plan.token_slots,
                plan.token_count,
                plan.num_tiles,
                first,
                self.tiles,
                G=shape.experts * shape.blocks,
                TILE_ROWS=shape.tile_rows,
                **sizes,
            )
        elif first + self.tiles >= plan.max_tiles:
            finish_kernel[grid](self.total, gates, shared_value_bias, value_bias, self.output, **sizes)
