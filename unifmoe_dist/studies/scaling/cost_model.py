"""A cost model of a training step: fitted to measured points, and checked on points held out.

The step is a sum of six terms. Each is fitted by non-negative least squares to the part of the step that it describes
(`step_split.PARTS`), in errors relative to the whole step:

    experts      per floating-point operation of the mean rank, per (expert, block) group
    route        per layer, per token and layer
    dense        the rest: a constant, per token, per parameter held (its gradient is written and flattened)
    exchange     per collective, per message to a peer, per byte, per second that the busiest rank computes longer
    all_reduce   per ring step, per byte
    optimizer    a constant, per parameter updated, per parameter held

It describes our own exchanges; points of another dispatcher are left out. On a CPU whose cores ranks share, work takes
`contention` times as long; that factor is given, not fitted. `simulator` predicts clusters with these coefficients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.records import markdown
from unifmoe_dist.studies.scaling.measured_step import Measurement, Point, Study

FORWARD_FLOPS, STEP_FLOPS = (4, 6), (14, 22)
"""Per channel and model dimension of a block, plain and gated. Forward: up, gate and down. A step adds, backward, those
and their weights (8 and 12), and what is recomputed for it, up and gate (2 and 4)."""

PARTS_OF_TERM = {
    "experts": ("shared_experts", "residual_experts"),
    "route": ("route",),
    "dense": ("other",),
    "exchange": ("dispatch", "combine"),
    "all_reduce": ("all_reduce",),
    "optimizer": ("optimizer",),
}
UNITS = {
    "experts": ("s/FLOP", "s/group"),
    "route": ("s/layer", "s/token and layer"),
    "dense": ("s", "s/token", "s/parameter"),
    "exchange": ("s/collective", "s/message", "s/byte", "s/s"),
    "all_reduce": ("s/ring step", "s/byte"),
    "optimizer": ("s", "s/parameter updated", "s/parameter held"),
}
DESCRIBED = ("alltoall", "two_level", "local")
_LEAST_POINTS = 6


class Ring(NamedTuple):
    sent: float  # bytes by each rank
    steps: int
    ranks: int
    apart: int  # from one of them to the next


@dataclass(frozen=True)
class Workload:
    """One rank's step, as the model sees it."""

    ranks: int
    expert_parallel: int
    contention: float  # slowdown from shared cores
    layers: int  # UniF-MoE layers
    tokens: float  # per rank
    flops: float  # of the experts on the mean rank, forward and backward
    extra_flops: float  # how many more the busiest rank has
    groups: float  # (expert, block) groups per rank, over all layers
    collectives: float  # of exchanges per step
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
    def rings(self) -> list[Ring]:
        """Gradients are summed in rings, dense ones over all ranks, those of experts over their replicas.

        With ZeRO, DeepSpeed does that all the same, and then gathers what each rank updated.
        """
        rounds = 3 if self.zero else 2
        parts = ((self.dense_parameters, self.ranks, 1), (self.expert_parameters, self.replicas, self.expert_parallel))
        return [Ring(rounds * self.gradient_bytes * x * (n - 1) / n, rounds * (n - 1), n, by) for x, n, by in parts]

    def features(self, seconds_per_flop: float) -> dict[str, list[float]]:
        """What each term's coefficients multiply, in the order of UNITS."""
        c = self.contention
        late = seconds_per_flop * self.extra_flops if self.expert_parallel > 1 else 0.0
        return {
            "experts": [c * self.flops, c * self.groups],
            "route": [c * self.layers, c * self.layers * self.tokens],
            "dense": [c, c * self.tokens, c * self.held],
            "exchange": [c * self.collectives, c * self.messages, c * self.bytes, c * late],
            "all_reduce": [c * sum(r.steps for r in self.rings), c * sum(r.sent for r in self.rings)],
            "optimizer": [c, c * self.updated, c * self.held],
        }


def workload(point: Point, study: Study) -> Workload:
    """A point's step, all of it from its layout and routing and nothing from a clock."""
    layout, result, layers = point.layout, point.result, len(study.layers)
    tokens = result.tokens / layout.ranks
    per_block = STEP_FLOPS[0] * study.width * (4 * study.width // study.blocks)
    mean = layers * tokens * result.blocks_per_token
    calls = 1 + (layout.dispatcher == "two_level" and layout.expert_parallel > study.ranks_of_node(layout))
    return Workload(
        ranks=layout.ranks,
        expert_parallel=layout.expert_parallel,
        contention=result.contention,
        layers=layers,
        tokens=tokens,
        flops=per_block * mean,
        extra_flops=per_block * max(0.0, result.rank_blocks - mean),
        groups=layers * study.blocks * (1 + calls * layout.experts / layout.expert_parallel),
        collectives=result.exchange_collectives,
        messages=result.exchange_messages,
        bytes=result.exchange_bytes,
        dense_parameters=result.dense_parameters,
        expert_parameters=result.expert_parameters,
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


@dataclass(frozen=True)
class Check:
    """A fit, the points that it saw ("fitted") and those that it did not ("held out" on one host, and "slow link").

    Errors, one for each point, are |predicted - measured| / measured of the step.
    """

    model: CostModel
    points: dict[str, list[Point]]
    predicted: dict[str, list[float]]  # seconds of the step

    @property
    def errors(self) -> dict[str, list[float]]:
        return {
            name: [abs(s / p.result.step - 1) for s, p in zip(self.predicted[name], points, strict=True)]
            for name, points in self.points.items()
        }


def described(points: Sequence[Point]) -> list[Point]:
    """The points that the model is about: those of our exchanges, and those where nothing travels."""
    return [p for p in points if p.layout.dispatcher in DESCRIBED]


def hold_out(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Points to fit, and to check: the largest K at each rank count, every fourth of the others, and slow links."""
    fitted = [p for i, p in enumerate(_below_largest(points)) if i % 4 != 3]
    return fitted, [p for p in points if p not in fitted]


def _below_largest(points: Sequence[Point]) -> list[Point]:
    """The points on one host whose K is not the largest of their rank count there."""
    points = [p for p in points if not p.layout.megabits]
    layouts = [p.layout for p in points]
    return [p for p in points if p.layout.experts < max(x.experts for x in layouts if x.ranks == p.layout.ranks)]


def check(points: Sequence[Point], study: Study, predict: Callable[[CostModel, Point], float]) -> Check:
    """Fit to a part of the points, and predict them and the rest by `predict`.

    Raises:
        UserError: points are too few, or of several devices.
    """
    points = described(points)
    devices = sorted({p.result.device for p in points})
    if len(devices) > 1:
        raise UserError(f"the points come from several devices ({', '.join(devices)}); fit a sweep of one device.")
    fitted, held_out = hold_out(points)
    if len(fitted) < _LEAST_POINTS:
        below = next(n for n in count(_LEAST_POINTS) if n - n // 4 >= _LEAST_POINTS)  # of them every fourth is held out
        raise UserError(
            f"a cost model needs at least {_LEAST_POINTS} points to fit, but of {len(points)} that were measured "
            f"{len(held_out)} are held out to check it; measure {below + len(points) - len(_below_largest(points))} in "
            "all: the same command with more values of --experts or --batch measures what is missing."
        )
    model = CostModel.fit([workload(p, study) for p in fitted], [p.result for p in fitted])
    slow = [p for p in held_out if p.layout.megabits]
    groups = {"fitted": fitted, "held out": [p for p in held_out if p not in slow], "slow link": slow}
    groups = {name: group for name, group in groups.items() if group}
    return Check(model, groups, {name: [predict(model, p) for p in group] for name, group in groups.items()})


def format_check(result: Check) -> str:
    """The coefficients and the errors of a fit, and the spread of what it is compared with, as text."""
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
    spread = [p.result.step_spread / p.result.step for points in result.points.values() for p in points]
    lines.append(
        f"\nspread of a point's own steps, half the interquartile range: {100 * np.mean(spread):.1f} % on average, "
        f"at most {100 * max(spread):.1f} %"
    )
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
