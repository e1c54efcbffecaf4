"""Where in an image, and on which tokens of a text, a UniF-MoE layer spends its computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.usage.capture import Capture


@dataclass(frozen=True)
class PatchGrid:
    """Patches of a vision transformer: `rows` x `columns` in row-major order, after `prefix` class tokens."""

    rows: int
    columns: int
    prefix: int

    @staticmethod
    def of(model: Any) -> PatchGrid:
        """The grid of a timm vision transformer.

        Raises:
            UserError: The model has none.
        """
        size = getattr(getattr(model, "patch_embed", None), "grid_size", None)
        if size is None:
            raise UserError(f"{type(model).__name__} has no patch grid; patch maps need a timm vision transformer.")
        return PatchGrid(int(size[0]), int(size[1]), int(getattr(model, "num_prefix_tokens", 0)))

    @property
    def tokens(self) -> int:
        """Tokens of an image, class tokens among them."""
        return self.rows * self.columns + self.prefix

    def fold(self, values: Tensor, captured: Capture) -> Tensor:
        """Values (N, ...) of captured tokens as (items, rows, columns, ...); class tokens are dropped.

        Raises:
            UserError: The items do not have one token per patch.
        """
        patches = values[captured.position >= self.prefix]
        items = int(captured.item.max()) + 1
        if len(patches) != items * self.rows * self.columns:
            raise UserError(
                f"{len(patches)} patch tokens of {items} images do not fill grids of {self.rows} x {self.columns}; "
                "capture whole images."
            )
        return patches.view(items, self.rows, self.columns, *values.shape[1:])


def patch_compute(captured: Capture, grid: PatchGrid) -> Tensor:
    """(items, rows, columns) int64: C_B of every patch."""
    return grid.fold(captured.routing.block_compute, captured)


def high_demand(compute: Tensor, threshold: int) -> Tensor:
    """Bool, shaped like `compute`: patches with C_B >= threshold; the paper outlines those from 20 on (K=6, B=8)."""
    return compute >= threshold


@dataclass(frozen=True)
class ElementUsage:
    """Use of shared blocks and residual experts by semantic element.

    Args:
        elements: (E,) their numbers in the mask, rising.
        patches: (E,) patches of each.
        blocks: (E, B) share of the element's shared-block selections that go to each block; rows sum to 1.
        experts: (E, K) share of its residual-expert activations that go to each expert; rows sum to 1.
        compute: (E,) mean C_B.
        shared_demand: (E,) mean alpha.
        shared_block_count: (E,) mean b.
        expert_count: (E,) mean k.
    """

    elements: list[int]
    patches: list[int]
    blocks: Tensor
    experts: Tensor
    compute: Tensor
    shared_demand: Tensor
    shared_block_count: Tensor
    expert_count: Tensor

    def most_common(self, count: int) -> ElementUsage:
        """The `count` elements with the most patches, in the order of their numbers."""
        kept = sorted(sorted(range(len(self.elements)), key=lambda e: -self.patches[e])[:count])
        columns: list[Any] = [[c[e] for e in kept] if isinstance(c, list) else c[kept] for c in vars(self).values()]
        return ElementUsage(*columns)


def element_usage(captured: Capture, grid: PatchGrid, mask: Tensor, ignore: int = -1) -> ElementUsage:
    """Group patches by a mask.

    Args:
        captured: Routing of whole images.
        grid: Their patches.
        mask: (items, rows, columns) integers, the element that each patch shows.
        ignore: Number of patches that belong to none.

    Raises:
        UserError: The mask has another shape, or names no element.
    """
    routing = captured.routing
    compute = patch_compute(captured, grid)
    if mask.shape != compute.shape:
        raise UserError(f"the mask has shape {tuple(mask.shape)}, but the patches have shape {tuple(compute.shape)}.")
    elements = [int(number) for number in mask.unique() if number != ignore]
    if not elements:
        raise UserError(f"the mask names no element: every patch is {ignore}.")

    def means(values: Tensor) -> Tensor:
        """(E, ...) mean of values (N, ...) over each element's patches."""
        folded = grid.fold(values.double(), captured)
        return torch.stack([folded[mask == number].mean(0) for number in elements])

    blocks, experts = means(routing.shared_blocks), means(routing.gates > 0)
    return ElementUsage(
        elements,
        [int((mask == number).sum()) for number in elements],
        blocks / blocks.sum(1, keepdim=True),
        experts / experts.sum(1, keepdim=True),
        means(routing.block_compute),
        means(routing.shared_demand),
        means(routing.shared_block_count),
        means(routing.expert_count),
    )


@dataclass(frozen=True)
class TextCompute:
    """One sentence: its tokens as strings, special ones included, with C_B and k of each."""

    tokens: list[str]
    block_compute: list[int]
    expert_count: list[int]


def token_means(texts: Sequence[TextCompute]) -> pd.DataFrame:
    """Every different token of some texts with mean C_B, mean k and how often it was seen: columns token,
    block_compute, expert_count and count, by falling C_B, equal ones by their string."""
    tokens = pd.concat([pd.DataFrame(vars(text)) for text in texts]).groupby("tokens", as_index=False)
    means = tokens.agg(
        block_compute=("block_compute", "mean"), expert_count=("expert_count", "mean"), count=("expert_count", "size")
    ).rename(columns={"tokens": "token"})
    return means.sort_values(["block_compute", "token"], ascending=[False, True], ignore_index=True)


def text_compute(captured: Capture, tokens: Sequence[Sequence[str]]) -> list[TextCompute]:
    """C_B of every token of some texts.

    Args:
        captured: Routing of those texts, in that order, padding left out.
        tokens: Strings of each text's tokens; those at positions that were padding are not looked at.

    Raises:
        UserError: A text has captured tokens beyond its strings.
    """
    result = []
    for number, strings in enumerate(tokens):
        rows = (captured.item == number).nonzero().squeeze(1)
        positions = captured.position[rows].tolist()
        if positions and positions[-1] >= len(strings):
            raise UserError(
                f"text {number} has {len(strings)} token strings, but its token at position {positions[-1]} was routed."
            )
        compute, experts = captured.routing.block_compute[rows], captured.routing.expert_count[rows]
        result.append(TextCompute([strings[place] for place in positions], compute.tolist(), experts.tolist()))
    return result
