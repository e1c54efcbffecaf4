"""A cost model of a training step: fitted to measured points, and checked on points held out.

The step is a sum of five terms. Each is fitted by non-negative least squares to the part of the step that it describes
(`step_split.PARTS`), in errors relative to the whole step:

    experts      per floating-point operation, per (expert, block) group
    dense        a constant, per token, per parameter held (its gradient is written and flattened)
    exchange     per message to a peer, per byte, per second that the busiest rank computes longer than the average
    all_reduce   per ring step, per byte
    optimizer    a constant, per parameter updated, per parameter held

It describes the alltoall dispatcher; points of another one are left out. On a CPU whose cores ranks share, work takes
`contention` times as long; that factor is given, not fitted.

For a larger cluster the exchange's and the ring's coefficients come from the link speeds given, all others from the
fit: these hold for the device that was measured, so a fit on CPUs says nothing of the speed of GPUs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.records import markdown
from unifmoe_dist.studies.scaling.measured_step import Measurement, Point, Study
from unifmoe_dist.studies.scaling.volume import alltoall_volume, expected_traffic

_FLOPS_PER_BLOCK_CHANNEL = 14
"""Per channel and model dimension of a block: up and down forward (4), both and both weights backward (8), and the
up-projection recomputed for the backward pass (2)."""

PARTS_OF_TERM = {
    "experts": ("shared_experts", "residual_experts"),
    "dense": ("route", "other"),
    "exchange": ("dispatch", "combine"),
    "all_reduce": ("all_reduce",),
    "optimizer": ("optimizer",),
}
UNITS = {
    "experts": ("s/FLOP", "s/group"),
    "dense": ("s", "s/token", "s/parameter"),
    "exchange": ("s/message", "s/byte", "s/s"),
    "all_reduce": ("s/ring step", "s/byte"),
    "optimizer": ("s", "s/parameter updated", "s/parameter held"),
}
_LEAST_POINTS = 6
_MESSAGES_PER_LAYER = 5
"""Exchanges per layer and step: counts, tokens, rows, and the gradients of both."""


@dataclass(frozen=True)
class Workload:
    """One rank's step, as the model sees it: the busiest rank where ranks differ."""

    ranks: int
    expert_parallel: int
    contention: float  # slowdown from shared cores
    tokens: float  # per rank
    flops: float  # of the experts on the busiest rank, forward and backward
    extra_flops: float  # how many of those exceed the average rank's
    groups: float  # (expert, block) groups per rank, over all layers
    messages: float  # to peers per step
    bytes: float  # sent to peers per step
    dense_parameters: float  # that every rank holds
    expert_parameters: float  # of the residual experts on a rank
    gradient_bytes: int  # of one gradient element when reduced
    zero: int  # ZeRO stage

    @property
    def held(self) -> float:
        return self.dense_parameters + self.expert_parameters

    @property
    def replicas(self) -> int:
        return self.ranks // self.expert_parallel

    @property
    def updated(self) -> float:
        """Parameters that this rank's optimiser updates."""
        if self.zero == 0:
            return self.held
        return self.dense_parameters / self.ranks + self.expert_parameters / self.replicas

    @property
    def ring_bytes(self) -> float:
        """Bytes that a rank sends to sum gradients in rings: dense over all ranks, experts over their replicas."""
        parts = ((self.dense_parameters, self.ranks), (self.expert_parameters, self.replicas))
        return sum(2 * self.gradient_bytes * number * (n - 1) / n for number, n in parts)

    @property
    def ring_steps(self) -> int:
        return 2 * (self.ranks - 1) + 2 * (self.replicas - 1)

    def features(self, seconds_per_flop: float) -> dict[str, list[float]]:
        """What each term's coefficients multiply, in the order of UNITS."""
        c = self.contention
        late = seconds_per_flop * self.extra_flops if self.expert_parallel > 1 else 0.0
        return {
            "experts": [c * self.flops, c * self.groups],
            "dense": [c, c * self.tokens, c * self.held],
            "exchange": [c * self.messages, c * self.bytes, c * late],
            "all_reduce": [c * self.ring_steps, c * self.ring_bytes],
            "optimizer": [c, c * self.updated, c * self.held],
        }


def workload(point: Point, study: Study, ranks: int | None = None, expert_parallel: int = 1) -> Workload:
    """A point's step, all of it from its layout and routing and nothing from a clock.

    On other `ranks` than the point's own it is the step of that K and routing there: no core is shared, exchanges send
    what is expected of experts that lie anywhere, and the busiest rank's residual work over the mean is 1 on one rank,
    the busiest expert's load where each rank holds one expert, and between these linear in logarithms.
    """
    layout, result, layers = point.layout, point.result, len(study.layers)
    tokens = result.tokens / layout.ranks
    if ranks is None:
        ranks, expert_parallel, contention = layout.ranks, layout.expert_parallel, result.contention
        blocks, messages, sent = result.rank_blocks, result.exchange_messages, result.exchange_bytes
    else:
        spread = math.log(expert_parallel) / math.log(layout.experts) if expert_parallel > 1 else 0.0
        residual = (result.blocks_per_token - result.shared_per_token) * max(1.0, result.load_imbalance) ** spread
        blocks, contention = layers * tokens * (result.shared_per_token + residual), 1.0
        shape = layout.experts, study.blocks, study.width * study.itemsize, expert_parallel
        sent = layers * alltoall_volume(expected_traffic(tokens, result.experts_per_token, *shape)).total
        messages = layers * _MESSAGES_PER_LAYER * (expert_parallel - 1)
    per_block = _FLOPS_PER_BLOCK_CHANNEL * study.width * (4 * study.width // study.blocks)
    return Workload(
        ranks=ranks,
        expert_parallel=expert_parallel,
        contention=contention,
        tokens=tokens,
        flops=per_block * blocks,
        extra_flops=per_block * max(0.0, blocks - layers * tokens * result.blocks_per_token),
        groups=layers * study.blocks * (1 + layout.experts / expert_parallel),
        messages=messages,
        bytes=sent,
        dense_parameters=result.dense_parameters,
        expert_parameters=result.expert_parameters * layout.expert_parallel / expert_parallel,
        gradient_bytes=study.itemsize,
        zero=layout.zero,
    )


@dataclass(frozen=True)
class CostModel:
    """Coefficients of every term, in the order and units of UNITS."""

    coefficients: dict[str, list[float]]

    @staticmethod
    def fit(workloads: Sequence[Workload], results: Sequence[Measurement]) -> CostModel:
        """Fit to measured steps: their workloads and what was measured. Raises UserError for too few."""
        if len(workloads) < _LEAST_POINTS:
            raise UserError(
                f"a cost model needs at least {_LEAST_POINTS} points to fit, but there are {len(workloads)}; "
                "sweep more values of --experts, --ranks or --batch."
            )
        steps = np.array([r.step for r in results])
        coefficients: dict[str, list[float]] = {}
        for term, parts in PARTS_OF_TERM.items():  # experts first: the exchange's features need its rate
            rate = coefficients["experts"][0] if coefficients else 0.0
            features = np.array([w.features(rate)[term] for w in workloads])
            seconds = np.array([sum(getattr(r, part) for part in parts) for r in results])
            scale = np.abs(features).max(0)
            scale[scale == 0] = 1.0  # a feature that no point has gets the coefficient 0
            solution, _ = nnls(features / scale / steps[:, None], seconds / steps)
            coefficients[term] = (solution / scale).tolist()
        return CostModel(coefficients)

    def predict(self, workload: Workload) -> dict[str, float]:
        """Seconds of every term."""
        features = workload.features(self.coefficients["experts"][0])
        return {t: float(np.dot(self.coefficients[t], features[t])) for t in PARTS_OF_TERM}

    def step(self, point: Point, study: Study, ranks: int | None = None) -> float:
        """Seconds of a point's step, or of its K on other ranks without an exchange."""
        return sum(self.predict(workload(point, study, ranks)).values())


@dataclass(frozen=True)
class Check:
    """A fit, the points that it saw ("fitted") and those that it did not ("held out").

    Errors, one for each point, are |predicted - measured| / measured of the step.
    """

    model: CostModel
    points: dict[str, list[Point]]
    errors: dict[str, list[float]]


def described(points: Sequence[Point]) -> list[Point]:
    """The points that the model is about: those of alltoall, and those where nothing travels."""
    return [p for p in points if p.layout.dispatcher in ("alltoall", "local")]


def hold_out(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Points to fit and points to check: the largest K at each rank count, and every fourth of the others."""
    fitted = [p for i, p in enumerate(_below_largest(points)) if i % 4 != 3]
    return fitted, [p for p in points if p not in fitted]


def _below_largest(points: Sequence[Point]) -> list[Point]:
    """The points whose K is not the largest of their rank count."""
    layouts = [p.layout for p in points]
    return [p for p in points if p.layout.experts < max(x.experts for x in layouts if x.ranks == p.layout.ranks)]


def check(points: Sequence[Point], study: Study, unchecked: bool = False) -> Check:
    """Fit to a part of the points and predict the rest. Raises UserError for too few, or those of several devices.

    `unchecked` fits to all where they are enough for that, but not for holding some out.
    """
    points = described(points)
    devices = sorted({p.result.device for p in points})
    if len(devices) > 1:
        raise UserError(f"the points come from several devices ({', '.join(devices)}); fit a sweep of one device.")
    fitted, held_out = hold_out(points)
    if unchecked and len(fitted) < _LEAST_POINTS <= len(points):
        fitted, held_out = list(points), []
    if len(fitted) < _LEAST_POINTS:
        below = next(n for n in count(_LEAST_POINTS) if n - n // 4 >= _LEAST_POINTS)  # of them every fourth is held out
        raise UserError(
            f"a cost model needs at least {_LEAST_POINTS} points to fit, but of {len(points)} that were measured "
            f"{len(held_out)} are held out to check it; measure {below + len(points) - len(_below_largest(points))} in "
            "all: the same command with more values of --experts or --batch measures what is missing."
        )
    model = CostModel.fit([workload(p, study) for p in fitted], [p.result for p in fitted])
    groups = {"fitted": fitted, "held out": held_out} if held_out else {"fitted": fitted}
    errors = {name: [abs(model.step(p, study) / p.result.step - 1) for p in group] for name, group in groups.items()}
    return Check(model, groups, errors)


def format_check(result: Check) -> str:
    """The coefficients and the errors of a fit, as text."""
    rows = [
        {"term": term, "coefficient": f"{value:.3g}", "unit": unit}
        for term, values in result.model.coefficients.items()
        for value, unit in zip(values, UNITS[term], strict=True)
    ]
    lines = [markdown(rows, left=("term", "unit"))]
    for name, errors in result.errors.items():
        worst = int(np.argmax(errors))
        lines.append(
            f"\n{name}: {len(errors)} points, relative error of the step {100 * np.mean(errors):.1f} % on average, "
            f"at most {100 * errors[worst]:.1f} % ({result.points[name][worst].layout})"
        )
    if "held out" not in result.errors:
        lines.append("\nheld out: none, so the error on other points is not known; measure more to hold some out")
    return "\n".join(lines)


def save_model(result: Check, path: Path) -> None:
    """Write coefficients with units, and errors, as JSON."""
    coefficients = {term: dict(zip(UNITS[term], v, strict=True)) for term, v in result.model.coefficients.items()}
    record: dict[str, Any] = {"coefficients": coefficients}
    for name, errors in result.errors.items():
        stem = name.replace(" ", "_")
        record[f"{stem}_points"] = [str(p.layout) for p in result.points[name]]
        record[f"{stem}_error"] = {"mean": float(np.mean(errors)), "max": max(errors)}
    path.write_text(json.dumps(record, indent=1))


# -- larger clusters ---------------------------------------------------------------------------------------------------


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
        alone = model.step(point, study, ranks=1)
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
