"""How a trained UniF-MoE layer uses its blocks and experts: distributions, load, co-activation, router geometry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unifmoe_dist.routing import Router, Routing
from unifmoe_dist.studies.diagnostics.pairs import expert_pairs
from unifmoe_dist.studies.records import plain

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Distribution:
    """Values of one quantity over N tokens.

    Args:
        edges: (bins + 1,) bin edges; of a whole number each bin is centred on one value.
        fraction: (bins,) fraction of tokens in each bin.
        mean: Mean.
        deviation: Standard deviation over tokens.
        quantiles: By level.
    """

    edges: list[float]
    fraction: list[float]
    mean: float
    deviation: float
    quantiles: dict[float, float]


@dataclass(frozen=True)
class LayerUsage:
    """One layer over a data set.

    Args:
        tokens: Number N of tokens.
        shared_demand: Distribution of alpha.
        shared_block_count: Of b.
        expert_count: Of k.
        block_compute: Of C_B.
        expert_load: (K,) fraction of tokens that use each residual expert.
        block_load: (B,) fraction of tokens for which each block is shared.
        coactivation: (K, K) fraction of tokens that use both experts; the diagonal is the load.
        gram: (K + 1, K + 1) Gram matrix of the router's embeddings, the shared one first.
    """

    tokens: int
    shared_demand: Distribution
    shared_block_count: Distribution
    expert_count: Distribution
    block_compute: Distribution
    expert_load: list[float]
    block_load: list[float]
    coactivation: Tensor
    gram: Tensor

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


def study_layer(routing: Routing, router: Router) -> LayerUsage:
    """Summarise the routing of N tokens (`capture`) and the router that made it."""
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
    )


def usage_record(usage: LayerUsage) -> dict[str, Any]:
    """Everything, as JSON can hold it."""
    return plain(
        asdict(usage) | {"mean_pair_coactivation": usage.mean_pair_coactivation, "gram_distance": usage.gram_distance}
    )


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
