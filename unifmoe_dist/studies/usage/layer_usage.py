"""How a trained UniF-MoE layer uses its blocks and experts: distributions, load, co-activation, router geometry; and
where in an image, by which element, and on which tokens of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from unifmoe_dist.errors import UserError
from unifmoe_dist.experts import BlockExperts
from unifmoe_dist.routing import Router, Routing
from unifmoe_dist.studies.diagnostics.rankings import expert_pairs
from unifmoe_dist.studies.records import plain
from unifmoe_dist.studies.usage.capture import Capture

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Distribution:
    """Values of one quantity over N tokens."""

    edges: list[float]  # (bins + 1,); of a whole number each bin is centred on one value
    fraction: list[float]  # (bins,) fraction of tokens in each bin
    mean: float
    deviation: float  # standard deviation over tokens
    quantiles: dict[float, float]  # by level


@dataclass(frozen=True)
class LayerUsage:
    """One layer over a data set of N tokens."""

    tokens: int
    shared_demand: Distribution  # of alpha
    shared_block_count: Distribution  # of b
    expert_count: Distribution  # of k
    block_compute: Distribution  # of C_B
    expert_load: list[float]  # (K,) fraction of tokens that use each residual expert
    block_load: list[float]  # (B,) fraction of tokens for which each block is shared
    coactivation: Tensor  # (K, K) fraction of tokens that use both experts; the diagonal is the load
    gram: Tensor  # (K + 1, K + 1) Gram matrix of the router's embeddings, the shared one first
    expert_distance: float  # `expert_distance` of the residual experts

    @property
    def pair_coactivation(self) -> Tensor:
        """(P,) co-activation of the K (K - 1) / 2 pairs, in the order of `expert_pairs`."""
        return self.coactivation[tuple(expert_pairs(len(self.coactivation)).T)]

    @property
    def mean_pair_coactivation(self) -> float:
        return float(self.pair_coactivation.mean())

    @property
    def gram_distance(self) -> float:
        """Gram loss: Frobenius distance of the Gram matrix to the identity."""
        return float(torch.linalg.matrix_norm(self.gram - torch.eye(len(self.gram), dtype=self.gram.dtype)))


def study_layer(routing: Routing, router: Router, experts: BlockExperts) -> LayerUsage:
    """Summarise the routing of N tokens (`capture`), the router that made it, and the residual experts."""
    num_experts, num_blocks = routing.gates.shape[1], routing.shared_blocks.shape[1]
    active = (routing.gates > 0).double()
    weight = router.weight.detach().double().cpu()
    return LayerUsage(
        tokens=len(active),
        shared_demand=distribution(routing.shared_demand, np.linspace(0, 1, 41)),
        shared_block_count=distribution(routing.shared_block_count, np.arange(0.5, num_blocks)),
        expert_count=distribution(routing.expert_count, np.arange(0.5, num_experts + 1)),
        # C_B = b + k (B - b) lies between B (k = 1) and 1 + K (B - 1)
        block_compute=distribution(
            routing.block_compute, np.arange(num_blocks - 0.5, 2 + num_experts * (num_blocks - 1))
        ),
        expert_load=active.mean(0).tolist(),
        block_load=routing.shared_blocks.double().mean(0).tolist(),
        coactivation=active.T @ active / len(active),
        gram=weight @ weight.T,
        expert_distance=expert_distance(experts),
    )


def expert_distance(experts: BlockExperts) -> float:
    """How far experts that start as copies have parted: the mean distance of two experts' weight matrices, each
    expert's as one vector, over the mean norm. 0 for copies, about √2 for experts that have nothing in common."""
    matrices = [m for m in (experts.keys, experts.values, experts.gate_keys) if m is not None]
    each = torch.cat([matrix.detach().float().flatten(1) for matrix in matrices], dim=1)
    return float(torch.pdist(each).mean() / each.norm(dim=1).mean())


def usage_record(usage: LayerUsage) -> dict[str, Any]:
    """Everything, as JSON can hold it."""
    more = {"mean_pair_coactivation": usage.mean_pair_coactivation, "gram_distance": usage.gram_distance}
    return plain(vars(usage) | more)


def distribution(values: Tensor, edges: Sequence[float] | np.ndarray) -> Distribution:
    """Histogram, moments and quantiles (linear between order statistics) of a vector."""
    data = values.detach().double().cpu().numpy()
    counts, _ = np.histogram(data, edges)
    quantiles = dict(zip(QUANTILES, np.quantile(data, QUANTILES).tolist(), strict=True))
    return Distribution(
        list(map(float, edges)), (counts / len(data)).tolist(), float(data.mean()), float(data.std()), quantiles
    )


def coactivation_change(without: LayerUsage, with_loss: LayerUsage) -> float:
    """Relative change of the mean pair co-activation from a run without the Gram loss to one with it; -0.629 is the
    paper's reduction by 62.9 %. NaN where no pair is co-activated without it."""
    before = without.mean_pair_coactivation
    return with_loss.mean_pair_coactivation / before - 1 if before else float("nan")


# -- where -------------------------------------------------------------------------------------------------------------


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
    """Use of shared blocks and residual experts by semantic element."""

    elements: list[int]  # (E,) their numbers in the mask, rising
    patches: list[int]  # (E,) patches of each
    blocks: Tensor  # (E, B) share of the element's shared-block selections that go to each block; rows sum to 1
    experts: Tensor  # (E, K) share of its residual-expert activations that go to each expert; rows sum to 1
    compute: Tensor  # (E,) mean C_B
    shared_demand: Tensor  # (E,) mean alpha
    shared_block_count: Tensor  # (E,) mean b
    expert_count: Tensor  # (E,) mean k

    def most_common(self, count: int) -> ElementUsage:
        """The `count` elements with the most patches, in the order of their numbers."""
        kept = sorted(sorted(range(len(self.elements)), key=lambda e: -self.patches[e])[:count])
        columns: list[Any] = [[c[e] for e in kept] if isinstance(c, list) else c[kept] for c in vars(self).values()]
        return ElementUsage(*columns)


def element_usage(captured: Capture, grid: PatchGrid, mask: Tensor, ignore: int = -1) -> ElementUsage:
    """Group patches of whole images by a mask (items, rows, columns) of the element that each shows; `ignore` is none.

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
    """C_B of every token of texts captured in that order, from the strings of each text's tokens, padding's too.

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
