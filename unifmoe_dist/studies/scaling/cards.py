"""Rates of cards that a prediction rests on; cards.yaml has them, with where each comes from."""

from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import TypeAdapter

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


CARDS = TypeAdapter(dict[str, Card]).validate_python(yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()))
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
