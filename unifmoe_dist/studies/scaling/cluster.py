"""Steps of a larger cluster, predicted by the cost model.

The exchange's and the ring's coefficients are taken from the link speeds given, all others from the fit: these hold for
the device that was measured, so a fit on CPUs says nothing of the speed of GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.records import markdown
from unifmoe_dist.studies.scaling.cost_model import PARTS_OF_TERM, CostModel, Workload, described, workload
from unifmoe_dist.studies.scaling.grid import Point
from unifmoe_dist.studies.scaling.point import Study


@dataclass(frozen=True)
class Cluster:
    """Nodes with GPUs and two kinds of links; speeds are per GPU and direction."""

    nodes: int
    gpus_per_node: int
    node_gbps: float  # Gbit/s between GPUs of a node
    link_gbps: float  # Gbit/s between GPUs of different nodes
    node_latency: float  # seconds until a message inside a node arrives
    link_latency: float  # seconds until a message between nodes arrives

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0 and not name.endswith("latency"):
                raise UserError(f"{name} must be above 0, not {value}.")

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    def exchange_seconds(self, load: Workload) -> float:
        """Peers in the node and peers beyond, one after the other; bytes spread evenly over peers."""
        peers = load.expert_parallel - 1
        if peers == 0:
            return 0.0
        near = (min(self.gpus_per_node, load.expert_parallel) - 1) / peers
        latency = near * self.node_latency + (1 - near) * self.link_latency
        seconds_per_gbit = near / self.node_gbps + (1 - near) / self.link_gbps
        return load.messages * latency + 8e-9 * load.bytes * seconds_per_gbit

    def ring_seconds(self, load: Workload) -> float:
        """A ring is as slow as its slowest link."""
        far = self.nodes > 1
        gbps, latency = (self.link_gbps, self.link_latency) if far else (self.node_gbps, self.node_latency)
        return load.ring_steps * latency + 8e-9 * load.ring_bytes / gbps


@dataclass(frozen=True)
class Prediction:
    """A predicted step on a cluster."""

    experts: int
    expert_parallel: int
    seconds: dict[str, float]  # by term
    tokens_per_second: float  # of the whole cluster
    gain: float  # throughput over that of as many ranks that each hold all experts, as the model predicts them


def predict_cluster(model: CostModel, points: Sequence[Point], study: Study, cluster: Cluster) -> list[Prediction]:
    """Predict every K that was measured, with experts spread inside a node and over as many ranks as K allows.

    Routing (C_B, k, imbalance) is taken from the measured point of that K with the most expert-parallel ranks.
    """
    chosen = {p.layout.experts: p for p in sorted(described(points), key=lambda p: p.layout.expert_parallel)}
    predictions = []
    for k, point in sorted(chosen.items()):
        alone = sum(model.predict(workload(point, study, ranks=1)).values())
        for size in sorted({math.gcd(k, cluster.gpus_per_node), math.gcd(k, cluster.ranks)}):
            load = workload(point, study, cluster.ranks, size)
            seconds = model.predict(load)
            waiting = model.coefficients["exchange"][2] * model.coefficients["experts"][0] * load.extra_flops
            seconds["exchange"] = cluster.exchange_seconds(load) + (waiting if size > 1 else 0.0)
            seconds["all_reduce"] = cluster.ring_seconds(load)
            step = sum(seconds.values())
            predictions.append(Prediction(k, size, seconds, load.tokens * cluster.ranks / step, alone / step))
    return predictions


def format_predictions(predictions: Sequence[Prediction], cluster: Cluster, device: str) -> str:
    """A table of predictions, and what they rest on."""
    heads = dict(zip(PARTS_OF_TERM, ("experts", "dense", "exchange", "all-reduce", "optimiser"), strict=True))
    rows = [
        {
            "K": p.experts,
            "expert-parallel size": p.expert_parallel,
            "step (ms)": f"{1e3 * sum(p.seconds.values()):.1f}",
            **{head: f"{1e3 * p.seconds[term]:.2f}" for term, head in heads.items()},
            "tokens/s": f"{p.tokens_per_second:,.0f}",
            "over ranks without exchange": f"{p.gain:.2f}",
        }
        for p in predictions
    ]
    lines = [
        f"{cluster.nodes} nodes x {cluster.gpus_per_node} ranks, {cluster.node_gbps:g} Gbit/s inside a node, "
        f"{cluster.link_gbps:g} Gbit/s between nodes:\n",
        markdown(rows, left=()),
        f"\nThe last column is tokens/s over those of {cluster.ranks} ranks that each hold all K experts and exchange "
        "nothing: above 1 sharding the experts pays, below 1 it costs.",
    ]
    if device == "cpu":
        lines.append(
            "\nThe compute terms were fitted on CPU ranks and hold for such ranks only; "
            "sweep on one GPU of the cluster's kind and predict from that for GPUs."
        )
    return "\n".join(lines)
