"""A training step on a cluster, predicted from recorded routing and the rates of a card and of its links.

Routing is dealt to the ranks of one expert-parallel group, token by token; the other groups are taken to be as busy.
Every number of rows, gates, blocks and bytes is counted (`crossings`), so that the busiest rank of each layer is known,
and times follow from the coefficients of a `CostModel`: fitted on ranks that were measured, or a card's (`cards`).
Ranks wait for each other in every exchange, so the busiest one's residual experts are what all wait for.

An exchange takes, on the rank where that is longest, the latency, so much for each message, and its bytes over the
bandwidth, in the direction that has more of them; links inside and between nodes work side by side. Tokens travel while
the shared expert is computed, and in the two-level exchange rows come home while the residual experts compute the
node's own tokens; what is hidden so takes no time. CPU ranks copy what travels by the cores that compute, which nothing
hides; a slow link between hosts comes on top.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.scaling.cost_model import FORWARD_FLOPS, STEP_FLOPS, CostModel, Workload
from unifmoe_dist.studies.scaling.crossings import Crossings, Leg, flat_legs, two_level_legs
from unifmoe_dist.studies.scaling.measured_step import Point, Study
from unifmoe_dist.studies.scaling.recorded_routing import RecordedLayer

PARTS = {
    "routing": "routing",
    "shared": "shared expert",
    "residual": "residual experts",
    "waiting": "wait for the busiest rank",
    "near": "exchange inside nodes",
    "far": "exchange between nodes",
    "backward": "experts backward",
    "rest": "rest of the model",
    "all_reduce": "all-reduce",
    "optimizer": "optimiser",
}
"""Parts of a step, which add up to it. Experts are forward but for `backward`; `waiting` is both ways."""


EXCHANGES = FLAT, LEVELS = "alltoall", "two_level"
_PAYLOAD = 1448 / 1514
"""Of an Ethernet frame what TCP carries."""


@dataclass(frozen=True)
class Links:
    """Two kinds of links; speeds are per rank and direction."""

    ranks_per_node: int
    node_gbps: float  # Gbit/s between ranks of a node
    link_gbps: float  # Gbit/s between ranks of different nodes
    node_latency: float = 0.0  # seconds until a message inside a node arrives
    link_latency: float = 0.0  # seconds until one between nodes arrives
    message: float = 0.0  # seconds for which each message occupies its sender
    shared: bool = False  # whether the ranks of a node share one link, so many times as fast, to other nodes
    copying: Links | None = None  # what cores that compute take for each collective besides

    def __post_init__(self) -> None:
        for name in ("ranks_per_node", "node_gbps", "link_gbps"):
            if getattr(self, name) <= 0:
                raise UserError(f"{name} must be above 0, not {getattr(self, name)}.")

    @staticmethod
    def fitted(model: CostModel, ranks_per_node: int, slowed: float, megabits: float = math.inf) -> Links:
        """Of CPU ranks whose cores, slowed by sharing, copy as where they were measured; nodes share links so fast."""
        collective, message, byte, _ = model.coefficients["exchange"]
        gbps = 8e-9 / (slowed * byte) if byte else math.inf
        copying = Links(
            sys.maxsize, gbps, gbps, slowed * collective, message=slowed * message
        )  # alike wherever it goes
        link = 1e-3 * _PAYLOAD * megabits / ranks_per_node
        return Links(ranks_per_node, math.inf, link, shared=True, copying=copying)

    def split(self, sent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Bytes (R, R) inside and between nodes."""
        node = np.arange(len(sent)) // self.ranks_per_node
        inside = node[:, None] == node
        return np.where(inside, sent, 0), np.where(inside, 0, sent)

    def seconds(self, leg: Leg) -> tuple[float, float]:
        """Of one collective, inside and between nodes."""
        near, far = self.split(leg.bytes)
        if self.shared:
            first = np.arange(0, len(far), self.ranks_per_node)  # rank of each node; a group may be less than one
            far = np.add.reduceat(np.add.reduceat(far, first, 0), first, 1) / self.ranks_per_node
        inside = self._longest(near, self.node_gbps, self.node_latency)
        return inside, self._longest(far, self.link_gbps, self.link_latency)

    def _longest(self, sent: np.ndarray, gbps: float, latency: float) -> float:
        if not sent.any():
            return 0.0
        messages, most = (sent > 0).sum(1), np.maximum(sent.sum(0), sent.sum(1))
        return latency + float((self.message * messages + 8e-9 / gbps * most).max())

    def rings(self, load: Workload) -> float:
        """Seconds of the rings that sum gradients; what crosses is spread over the links of a node."""
        total = 0.0
        for ring in load.rings:
            on_node = max(1, self.ranks_per_node // ring.apart)
            far = ring.ranks > on_node
            speed = min(self.node_gbps, on_node * self.link_gbps) if far else self.node_gbps
            total += ring.steps * (self.link_latency if far else self.node_latency) + 8e-9 * ring.sent / speed
        return total


@dataclass(frozen=True)
class Job:
    """What trains: recorded layers, each standing for `repeats` of the model's, and the rest of the model."""

    layers: Sequence[RecordedLayer]
    tokens: int  # per rank and step
    dense_parameters: float  # that every rank holds, shared experts included
    itemsize: int = 2  # bytes of a number that travels
    zero: int = 1
    repeats: float = 1.0
    contention: float = 1.0
    activations: float = 0.0  # bytes that the rest of the model keeps for the backward pass, per token


@dataclass(frozen=True)
class Step:
    """A predicted step."""

    experts: int
    ranks: int
    expert_parallel: int
    exchange: str
    seconds: dict[str, float]  # by part
    tokens_per_second: float  # of all ranks
    near_bytes: float  # that the rank with most sends inside its node in a step, or receives
    far_bytes: float  # and between nodes
    memory: float  # bytes of the rank with most

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def expert_size(layer: RecordedLayer) -> int:
    """Parameters of one expert."""
    return (3 if layer.gated else 2) * layer.model_dim * layer.hidden_dim


def simulate(
    job: Job, ranks: int, model: CostModel, links: Links, exchanges: Sequence[str] = EXCHANGES, size: int = 0
) -> list[Step]:
    """One step for each exchange; experts lie over `size` ranks, by default as many as K and the nodes allow."""
    size = size or group_size(job.layers[0].num_experts, ranks, links.ranks_per_node)
    per_node = min(size, links.ranks_per_node)
    crossings = [Crossings.of(x, size, per_node, job.tokens) for x in job.layers]
    return [_step(job, ranks, size, crossings, model, links, name) for name in exchanges]


def simulated(model: CostModel, point: Point, study: Study, layers: Sequence[RecordedLayer]) -> Step:
    """A measured point by the routing that its ranks had."""
    layout, result = point.layout, point.result
    job = Job(
        layers,
        result.tokens // layout.ranks,
        result.dense_parameters,
        itemsize=study.itemsize,
        zero=layout.zero,
        contention=result.contention,
    )
    links = Links.fitted(model, study.ranks_of_node(layout), result.contention, layout.megabits or math.inf)
    (step,) = simulate(job, layout.ranks, model, links, [layout.dispatcher], layout.expert_parallel)
    return step


def group_size(experts: int, ranks: int, ranks_per_node: int) -> int:
    """The most ranks that divide the experts and all ranks, and are whole nodes or share one."""
    fits = (n for n in range(1, min(experts, ranks) + 1) if experts % n == 0 and ranks % n == 0)
    return max(n for n in fits if n % ranks_per_node == 0 or ranks_per_node % n == 0)


def _step(
    job: Job, ranks: int, size: int, crossings: Sequence[Crossings], model: CostModel, links: Links, exchange: str
) -> Step:
    first, (rate, per_group), late = job.layers[0], model.coefficients["experts"], model.coefficients["exchange"][3]
    per_node = min(size, links.ranks_per_node)
    sums = dict.fromkeys(PARTS, 0.0)
    link_bytes, kept, flying, flops = np.zeros((2, 2, size)), np.zeros(size), 0.0, 0.0
    for layer, x in zip(job.layers, crossings, strict=True):
        forward, whole = (
            job.contention * rate * f[layer.gated] * layer.model_dim * layer.hidden_dim / layer.num_blocks
            for f in (FORWARD_FLOPS, STEP_FLOPS)
        )
        levels = exchange == LEVELS and size > links.ranks_per_node  # on one node the two exchanges are one
        groups = (
            job.contention * per_group * layer.num_blocks * np.array([1, x.experts * (1 + levels)]) * forward / whole
        )
        residual, shared = x.blocks.sum(0), x.shared.mean()
        times = np.array([forward * shared, forward * residual.mean()]) + groups
        sums["shared"] += times[0]
        sums["residual"] += times[1]
        sums["backward"] += times.sum() * (whole / forward - 1)
        sums["waiting"] += late * whole * (residual.max() - residual.mean())
        flops += whole / (job.contention * rate) * (shared + residual.mean())
        row_bytes = job.itemsize * layer.model_dim
        if levels:
            legs = two_level_legs(x, row_bytes, per_node)
            stay = forward * float(links.split(x.blocks)[0].sum() / size)
        else:
            legs, stay = flat_legs(x, row_bytes), 0.0
        near, far = _exposed(legs, links, forward * shared, stay, whole / forward - 1)
        sums["near"] += near
        sums["far"] += far
        parts = [links.split(leg.bytes) for leg in legs]
        link_bytes += np.array([[[y.sum(1) for y in pair], [y.sum(0) for y in pair]] for pair in parts]).sum(0)
        kept += 2 * row_bytes * x.rows.sum(0)
        flying = max(flying, *(float((leg.bytes.sum(0) + leg.bytes.sum(1)).max()) for leg in legs))
    load = Workload(
        ranks=ranks,
        expert_parallel=size,
        contention=job.contention,
        layers=round(job.repeats * len(job.layers)),
        tokens=job.tokens,
        flops=job.repeats * flops,
        extra_flops=0.0,
        groups=0.0,
        collectives=0.0,
        messages=0.0,
        bytes=0.0,
        dense_parameters=job.dense_parameters,
        expert_parameters=job.repeats * sum(expert_size(x) * x.num_experts / size for x in job.layers),
        gradient_bytes=job.itemsize,
        zero=job.zero,
    )
    seconds = {name: job.repeats * value for name, value in sums.items()}
    terms = model.predict(load)
    seconds |= {"routing": terms["route"], "rest": terms["dense"], "optimizer": terms["optimizer"]}
    seconds["all_reduce"] = terms["all_reduce"] + links.rings(load)
    states = 2 * job.itemsize * load.held + (8 if job.itemsize == 4 else 12) * load.updated
    near_bytes, far_bytes = (job.repeats * link_bytes).max((0, 2))
    return Step(
        experts=first.num_experts,
        ranks=ranks,
        expert_parallel=size,
        exchange=exchange,
        seconds=seconds,
        tokens_per_second=job.tokens * ranks / sum(seconds.values()),
        near_bytes=float(near_bytes),
        far_bytes=float(far_bytes),
        memory=states + job.repeats * float(kept.max()) + flying + job.activations * job.tokens,
    )


_PASSES = ((False, "counts"), (False, "there"), (False, "home"), (True, "home"), (True, "there"))


def _exposed(legs: Sequence[Leg], links: Links, shared: float, stay: float, backward: float) -> tuple[float, float]:
    """Seconds of one layer's exchange inside and between nodes that no computing hides.

    While tokens travel, the shared expert computes for `shared` seconds; while rows come home, the residual experts
    compute the node's own tokens for `stay`, where these are on their own. So do their gradients, in a time `backward`
    times as long. A node's own tokens travel beside those between nodes.
    """
    total = np.sum([links.copying.seconds(leg) for leg in legs], 0) if links.copying else np.zeros(2)
    during = dict(zip(_PASSES, (0.0, shared, stay, backward * shared, backward * stay), strict=True))
    for is_backward, name in _PASSES:
        found = {leg.level: links.seconds(leg) for leg in legs if (leg.backward, leg.name) == (is_backward, name)}
        own = found.pop("near", (0.0, 0.0))[0] if name != "counts" else 0.0
        seconds = np.array([(near, 0.0) if near > far else (0.0, far) for near, far in found.values()]).sum(0)
        seconds[0] += max(0.0, own - seconds[1])
        hidden = during[is_backward, name]
        far_hidden = min(hidden, seconds[1])
        total += seconds - (min(hidden - far_hidden, seconds[0]), far_hidden)
    return float(total[0]), float(total[1])
