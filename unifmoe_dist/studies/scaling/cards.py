"""Rates of cards that a prediction rests on, with where each comes from."""

from __future__ import annotations

from dataclasses import dataclass

from unifmoe_dist.studies.scaling.cost_model import CostModel
from unifmoe_dist.studies.scaling.simulator import Job, expert_size


@dataclass(frozen=True)
class Card:
    """Rates in half precision."""

    experts: float  # FLOP/s of experts, forward and backward
    dense: float  # FLOP/s of the rest of the model
    memory: float  # bytes/s of the optimiser
    route_layer: float  # seconds per layer
    route_token: float  # seconds per token and layer
    sources: str


CARDS = {
    "h200": Card(
        experts=345e12,
        dense=400e12,
        memory=3.4e12,
        route_layer=2e-4,
        route_token=1e-8,
        sources="Experts: 345 TFLOP/s, measured on an H200 with the first prototype of the Triton kernels, forward in "
        "bf16 (376 GFLOP of 16,384 tokens, d = 1024, K = B = 16, in 1.09 ms without routing); today's kernels and "
        "backward have not been timed. Routing: 0.2 ms a layer and 10 ns a token, of the same prototype. Rest of the "
        "model: 400 TFLOP/s, assumed, 40 % of the 989 that NVIDIA states. Optimiser: 28 bytes a parameter at 3.4 TB/s, "
        "assumed, 70 % of the 4.8 stated.",
    ),
    "rtx3090": Card(
        experts=25e12,
        dense=28e12,
        memory=0.65e12,
        route_layer=2e-4,
        route_token=1e-7,
        sources="All assumed, nothing was measured: an H200's shares of what is stated, here 71 TFLOP/s (bf16 with "
        "float32 sums) and 936 GB/s; routing as on an H200, its tokens ten times as slow.",
    ),
}
_UPDATE_BYTES = 28
"""Of Adam per parameter in float32: weight, gradient and two moments read, all but the gradient written."""


def card_model(card: Card, job: Job) -> CostModel:
    """The cost model of a card for what trains; links are not in it."""
    shared = job.repeats * sum(map(expert_size, job.layers))
    per_token = 6 * max(0.0, job.dense_parameters - shared) / card.dense
    return CostModel(
        {
            "experts": [1 / card.experts, 0.0],
            "route": [card.route_layer, card.route_token],
            "dense": [0.0, per_token, 3 * job.itemsize / card.memory],
            "exchange": [0.0, 0.0, 0.0, 1.0],
            "all_reduce": [0.0, 0.0],
            "optimizer": [0.0, _UPDATE_BYTES / card.memory, 0.0],
        }
    )
