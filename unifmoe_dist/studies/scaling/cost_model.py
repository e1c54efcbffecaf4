"""A cost model of a training step: fitted to measured points, checked on points held out, used for larger clusters.

The step is a sum of five terms. Each is fitted by non-negative least squares to the part of the step that it describes
(`step_split.PARTS`), in errors relative to the whole step:

    experts      per floating-point operation, per (expert, block) group
    dense        a constant, per token, per parameter held (its gradient is written and flattened)
    exchange     per message to a peer, per byte, per second that the busiest rank computes longer than the average
    all_reduce   per ring step, per byte
    optimizer    a constant, per parameter updated, per parameter held

It describes the alltoall dispatcher; points of another one are left out. On a CPU whose cores ranks share, work takes
`contention` times as long; that factor is given, not fitted. Larger clusters take the exchange's and the ring's
coefficients from the link speeds given, all others from the fit: these hold for the device that was measured, so a fit
on CPUs says nothing of the speed of GPUs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.scaling.grid import Point, describe
from unifmoe_dist.studies.scaling.point import TOKENS_PER_IMAGE, Measurement, Study
from unifmoe_dist.studies.scaling.volume import alltoall_volume, expected_traffic

_FLOPS_PER_BLOCK_CHANNEL = 14
"""Per channel and model dimension of a block: up and down forward (4), both and both weights backward (8), and the
up-projection recomputed for the backward pass (2)."""

_MESSAGES_PER_LAYER = 5
"""Exchanges per layer and step: counts, tokens, rows, and the gradients of both."""

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


@dataclass(frozen=True)
class Workload:
    """One rank's step, as the model sees it: the busiest rank where ranks differ.

    Args:
        ranks: World size.
        expert_parallel: Expert-parallel size.
        contention: Slowdown from shared cores.
        tokens: Tokens per rank.
        flops: Floating-point operations of the experts on the busiest rank, forward and backward.
        extra_flops: How many of those exceed the average rank's.
        groups: (expert, block) groups per rank, over all layers.
        messages: Messages to peers per step.
        bytes: Bytes sent to peers per step.
        dense_parameters: Parameters that every rank holds.
        expert_parameters: Parameters of the residual experts on a rank.
        gradient_bytes: Bytes of one gradient element when reduced.
        zero: ZeRO stage.
    """

    ranks: int
    expert_parallel: int
    contention: float
    tokens: float
    flops: float
    extra_flops: float
    groups: float
    messages: float
    bytes: float
    dense_parameters: float
    expert_parameters: float
    gradient_bytes: int
    zero: int

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
        return sum(2 * self.gradient_bytes * count * (n - 1) / n for count, n in parts)

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


def workload_of(point: Point, study: Study) -> Workload:
    """The workload of a measured point: all of it comes from the layout and the routing, nothing from a clock."""
    a, r = point.layout, point.result
    tokens, layers = r.tokens / a.ranks, len(study.layers)
    per_block = _flops_per_block(study)
    return Workload(
        ranks=a.ranks,
        expert_parallel=a.expert_parallel,
        contention=r.contention,
        tokens=tokens,
        flops=per_block * r.rank_blocks,
        extra_flops=per_block * max(0.0, r.rank_blocks - layers * tokens * r.blocks_per_token),
        groups=layers * study.blocks * (1 + a.experts / a.expert_parallel),
        messages=r.exchange_messages,
        bytes=r.exchange_bytes,
        dense_parameters=r.dense_parameters,
        expert_parameters=r.expert_parameters,
        gradient_bytes=_itemsize(study),
        zero=a.zero,
    )


@dataclass(frozen=True)
class CostModel:
    """Coefficients of every term, in the order and units of UNITS."""

    coefficients: dict[str, list[float]]

    @staticmethod
    def fit(workloads: Sequence[Workload], results: Sequence[Measurement]) -> CostModel:
        """Fit to measured steps.

        Args:
            workloads: Those of the measured steps.
            results: The measured steps.

        Raises:
            UserError: too few points to determine the coefficients.
        """
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


@dataclass(frozen=True)
class Check:
    """A fit and its relative errors |predicted - measured| / measured of the step.

    Args:
        model: Fitted to `fitted` points.
        fitted: Points the fit saw.
        held_out: Points it did not see.
        fitted_errors: Their errors.
        held_out_errors: Their errors.
    """

    model: CostModel
    fitted: list[Point]
    held_out: list[Point]
    fitted_errors: list[float]
    held_out_errors: list[float]


def described(points: Sequence[Point]) -> list[Point]:
    """The points that the model is about: those of alltoall, and those where nothing travels."""
    return [p for p in points if p.layout.dispatcher in ("alltoall", "local")]


def hold_out(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Points to fit and points to check: the largest K at each rank count, and every fourth of the others."""
    others = _below_largest(points)
    fitted = [p for i, p in enumerate(others) if i % 4 != 3]
    return fitted, [p for p in points if p not in fitted]


def _below_largest(points: Sequence[Point]) -> list[Point]:
    """The points whose K is not the largest of their rank count."""
    ranks = {p.layout.ranks for p in points}
    largest = {count: max(p.layout.experts for p in points if p.layout.ranks == count) for count in ranks}
    return [p for p in points if p.layout.experts < largest[p.layout.ranks]]


def _points_to_measure(points: Sequence[Point]) -> int:
    """How many points, at the rank counts of these, leave enough to fit when `hold_out` has taken its share."""
    others = _LEAST_POINTS
    while others - others // 4 < _LEAST_POINTS:
        others += 1
    return others + len(points) - len(_below_largest(points))


def check(points: Sequence[Point], study: Study) -> Check:
    """Fit to a part of the points and predict the rest.

    Raises:
        UserError: too few points, or points of several devices.
    """
    points = described(points)
    devices = sorted({p.result.device for p in points})
    if len(devices) > 1:
        raise UserError(f"the points come from several devices ({', '.join(devices)}); fit a sweep of one device.")
    fitted, held_out = hold_out(points)
    if len(fitted) < _LEAST_POINTS:
        raise UserError(
            f"a cost model needs at least {_LEAST_POINTS} points to fit, but of {len(points)} that were measured "
            f"{len(held_out)} are held out to check it; measure {_points_to_measure(points)} in all: the same command "
            "with more values of --experts or --batch measures what is missing."
        )
    model = CostModel.fit([workload_of(p, study) for p in fitted], [p.result for p in fitted])

    def errors(chosen: list[Point]) -> list[float]:
        predicted = [sum(model.predict(workload_of(p, study)).values()) for p in chosen]
        return [abs(v / p.result.step - 1) for v, p in zip(predicted, chosen, strict=True)]

    return Check(model, fitted, held_out, errors(fitted), errors(held_out))


# -- larger clusters ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """Nodes with GPUs and two kinds of links; speeds are per GPU and direction.

    Args:
        nodes: Nodes.
        gpus_per_node: GPUs of one node.
        node_gbps: Gbit/s between GPUs of a node.
        link_gbps: Gbit/s between GPUs of different nodes.
        node_latency: Seconds until a message inside a node arrives.
        link_latency: Seconds until a message between nodes arrives.
    """

    nodes: int
    gpus_per_node: int
    node_gbps: float
    link_gbps: float
    node_latency: float
    link_latency: float

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0 and not name.endswith("latency"):
                raise UserError(f"{name} must be above 0, not {value}.")

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    def exchange_seconds(self, workload: Workload) -> float:
        """Peers in the node and peers beyond, one after the other; bytes spread evenly over peers."""
        peers = workload.expert_parallel - 1
        if peers == 0:
            return 0.0
        inside = min(self.gpus_per_node, workload.expert_parallel) - 1
        near, far = inside / peers, 1 - inside / peers
        return workload.messages * (near * self.node_latency + far * self.link_latency) + 8e-9 * workload.bytes * (
            near / self.node_gbps + far / self.link_gbps
        )

    def ring_seconds(self, workload: Workload) -> float:
        """A ring is as slow as its slowest link."""
        far = self.nodes > 1
        gbps, latency = (self.link_gbps, self.link_latency) if far else (self.node_gbps, self.node_latency)
        return workload.ring_steps * latency + 8e-9 * workload.ring_bytes / gbps


@dataclass(frozen=True)
class Prediction:
    """A predicted step on a cluster.

    Args:
        experts: K.
        expert_parallel: Expert-parallel size.
        seconds: By term.
        tokens_per_second: Of the whole cluster.
        gain: Throughput over that of as many independent ranks that each hold all experts, as the model predicts
            them; above 1 where holding fewer experts saves more than the exchange costs.
    """

    experts: int
    expert_parallel: int
    seconds: dict[str, float]
    tokens_per_second: float
    gain: float


def predict_cluster(model: CostModel, points: Sequence[Point], study: Study, cluster: Cluster) -> list[Prediction]:
    """Predict every K that was measured, with experts spread inside a node and over as many ranks as K allows.

    Routing (C_B, k, imbalance) is taken from the measured point of that K with the most expert-parallel ranks.
    """
    best: dict[int, Point] = {}
    for point in described(points):
        known = best.get(point.layout.experts)
        if known is None or point.layout.expert_parallel >= known.layout.expert_parallel:
            best[point.layout.experts] = point
    predictions = []
    for k, point in sorted(best.items()):
        alone = sum(model.predict(_scaled(point, study, ranks=1, expert_parallel=1)).values())
        for size in sorted({math.gcd(k, cluster.gpus_per_node), math.gcd(k, cluster.ranks)}):
            workload = _scaled(point, study, cluster.ranks, size)
            seconds = model.predict(workload)
            waiting = model.coefficients["exchange"][2] * model.coefficients["experts"][0] * workload.extra_flops
            seconds["exchange"] = cluster.exchange_seconds(workload) + (waiting if size > 1 else 0.0)
            seconds["all_reduce"] = cluster.ring_seconds(workload)
            step = sum(seconds.values())
            tokens = workload.tokens * cluster.ranks
            predictions.append(Prediction(k, size, seconds, tokens / step, alone / step))
    return predictions


def _scaled(point: Point, study: Study, ranks: int, expert_parallel: int) -> Workload:
    """The workload of a measured point's K and routing on another number of ranks."""
    a, r = point.layout, point.result
    layers, tokens = len(study.layers), a.batch * TOKENS_PER_IMAGE
    residual = r.blocks_per_token - r.shared_per_token
    blocks = layers * tokens * (r.shared_per_token + residual * _imbalance(point, study, expert_parallel))
    traffic = expected_traffic(
        tokens, r.experts_per_token, a.experts, study.blocks, study.width * _itemsize(study), expert_parallel
    )
    per_block = _flops_per_block(study)
    return Workload(
        ranks=ranks,
        expert_parallel=expert_parallel,
        contention=1.0,
        tokens=tokens,
        flops=per_block * blocks,
        extra_flops=per_block * (blocks - layers * tokens * r.blocks_per_token),
        groups=layers * study.blocks * (1 + a.experts / expert_parallel),
        messages=layers * _MESSAGES_PER_LAYER * (expert_parallel - 1),
        bytes=layers * alltoall_volume(traffic).total,
        dense_parameters=r.dense_parameters,
        expert_parameters=r.expert_parameters * a.expert_parallel / expert_parallel,
        gradient_bytes=_itemsize(study),
        zero=a.zero,
    )


def _imbalance(point: Point, study: Study, expert_parallel: int) -> float:
    """Residual work of the busiest rank over the mean at another expert-parallel size.

    It is 1 with one rank, as measured at the measured size, and the busiest expert's load where each rank holds one
    expert; between these its logarithm is linear in that of the size.
    """
    a, r = point.layout, point.result
    tokens = len(study.layers) * r.tokens / a.ranks
    mean = tokens * (r.blocks_per_token - r.shared_per_token)
    measured = max(1.0, (r.rank_blocks - tokens * r.shared_per_token) / mean) if mean else 1.0
    known = {1: 1.0, a.experts: max(1.0, r.load_imbalance)}
    if 1 < a.expert_parallel < a.experts:
        known[a.expert_parallel] = measured
    sizes = sorted(known)
    return float(np.exp(np.interp(math.log(expert_parallel), np.log(sizes), np.log([known[s] for s in sizes]))))


def _flops_per_block(study: Study) -> float:
    return _FLOPS_PER_BLOCK_CHANNEL * study.width * (4 * study.width // study.blocks)


def _itemsize(study: Study) -> int:
    return 4 if study.precision == "fp32" else 2


# -- reports --------------------------------------------------------------------------------------------------------


def format_check(result: Check) -> str:
    """The coefficients and the errors of a fit, as text."""
    lines = ["| term | coefficient | unit |", "| --- | ---: | --- |"]
    for term, values in result.model.coefficients.items():
        lines += [f"| {term} | {v:.3g} | {u} |" for v, u in zip(values, UNITS[term], strict=True)]
    for name, points, errors in (
        ("fitted", result.fitted, result.fitted_errors),
        ("held out", result.held_out, result.held_out_errors),
    ):
        worst = max(range(len(errors)), key=errors.__getitem__)
        lines.append(
            f"\n{name}: {len(points)} points, relative error of the step {100 * np.mean(errors):.1f} % on average, "
            f"at most {100 * errors[worst]:.1f} % ({describe(points[worst].layout)})"
        )
    return "\n".join(lines)


def format_predictions(predictions: Sequence[Prediction], cluster: Cluster, device: str) -> str:
    """A table of predictions, and what they rest on."""
    lines = [
        f"{cluster.nodes} nodes x {cluster.gpus_per_node} ranks, {cluster.node_gbps:g} Gbit/s inside a node, "
        f"{cluster.link_gbps:g} Gbit/s between nodes:\n",
        "| K | expert-parallel size | step (ms) | experts | dense | exchange | all-reduce | optimiser | tokens/s "
        "| over ranks without exchange |",
        "|" + " ---: |" * 10,
    ]
    for p in predictions:
        parts = " | ".join(f"{1e3 * p.seconds[term]:.2f}" for term in PARTS_OF_TERM)
        lines.append(
            f"| {p.experts} | {p.expert_parallel} | {1e3 * sum(p.seconds.values()):.1f} | {parts} "
            f"| {p.tokens_per_second:,.0f} | {p.gain:.2f} |"
        )
    lines.append(
        f"\nThe last column is tokens/s over those of {cluster.ranks} ranks that each hold all K experts and exchange "
        "nothing: above 1 sharding the experts pays, below 1 it costs."
    )
    if device == "cpu":
        lines.append(
            "\nThe compute terms were fitted on CPU ranks and hold for such ranks only; "
            "sweep on one GPU of the cluster's kind and predict from that for GPUs."
        )
    return "\n".join(lines)


def save_model(result: Check, path: Path) -> None:
    """Write coefficients with units, and errors, as JSON."""
    path.write_text(
        json.dumps(
            {
                "coefficients": {
                    term: dict(zip(UNITS[term], values, strict=True))
                    for term, values in result.model.coefficients.items()
                },
                "fitted_points": [describe(p.layout) for p in result.fitted],
                "held_out_points": [describe(p.layout) for p in result.held_out],
                "fitted_error": {"mean": float(np.mean(result.fitted_errors)), "max": max(result.fitted_errors)},
                "held_out_error": {"mean": float(np.mean(result.held_out_errors)), "max": max(result.held_out_errors)},
            },
            indent=1,
        )
    )
