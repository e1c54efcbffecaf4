"""The parts of a step, and the model of its cost that is fitted to them."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from unifmoe_dist.errors import UserError
from unifmoe_dist.profiling import profile_range
from unifmoe_dist.studies.scaling import cost_model
from unifmoe_dist.studies.scaling.cost_model import CostModel, Workload
from unifmoe_dist.studies.scaling.measured_step import Layout, Measurement, Point, Study
from unifmoe_dist.studies.scaling.step_split import PARTS, split_step

# -- step split -----------------------------------------------------------------------------------------------


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.02)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.06)
        return grad


def test_split_charges_backward_to_the_part_of_the_forward():
    x = torch.zeros(3, requires_grad=True)

    def step():
        with profile_range("route"):
            y = Sleep.apply(x)
        with profile_range("optimizer"):
            time.sleep(0.03)
            with profile_range("all_reduce"):
                time.sleep(0.01)
        (Sleep.apply(y) + y).sum().backward()  # the second sleep is in no part

    parts = split_step(step, 0.2, 2, torch.device("cpu"))
    assert set(parts) == set(PARTS) and sum(parts.values()) == pytest.approx(0.2)
    assert parts["dispatch"] == 0
    # 80 of 200 ms each for "route" and "other"; the machine may add to any of them, so bounds are wide
    assert 0.04 < parts["route"] < 0.12 and 0.04 < parts["other"] < 0.12
    assert parts["all_reduce"] > 0.003 and parts["optimizer"] > 0.01
    assert parts["route"] > parts["optimizer"] > parts["all_reduce"]


def test_ranges_are_not_recorded_without_a_profiler():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recording:
        with profile_range("route"):
            pass
    assert "unifmoe::route" in {e.name for e in recording.events()}
    assert not isinstance(profile_range("route"), torch.autograd.profiler.record_function)


# -- the cost model -------------------------------------------------------------------------------------------

TRUE = {
    "experts": [3e-11, 1e-4],
    "route": [2e-4, 3e-7],
    "dense": [5e-3, 2e-6, 4e-9],
    "exchange": [1e-4, 3e-4, 2e-9, 0.7],
    "all_reduce": [2e-3, 3e-9],
    "optimizer": [1e-3, 9e-9, 1e-9],
}


def workloads(count: int) -> list[Workload]:
    random = np.random.default_rng(0)
    result = []
    for i in range(count):
        ranks = int(2 ** random.integers(0, 4))
        size = int(random.choice([s for s in (1, 2, 4, 8) if s <= ranks]))
        a, b, c, d, e = random.uniform(0.5, 2, 5)
        result.append(
            Workload(
                ranks=ranks,
                expert_parallel=size,
                contention=float(random.choice([1, 2])),
                layers=int(1 + i % 3),
                tokens=320 * a,
                flops=3e9 * b,
                extra_flops=2e8 * c,
                groups=float(random.integers(20, 500)),
                collectives=10.0 * (1 + i % 2) * (size > 1),
                messages=10.0 * (size - 1),
                bytes=1e6 * d * (size > 1),
                dense_parameters=8e5 * e,
                expert_parameters=4e6 * a * c,
                gradient_bytes=4,
                zero=i % 2,
            )
        )
    return result


def measured(model: CostModel, workload: Workload, **changes) -> Measurement:
    """What a machine that follows the model exactly would have measured."""
    seconds = model.predict(workload)
    parts = dict.fromkeys(PARTS, 0.0)
    for term, value in seconds.items():
        names = cost_model.PARTS_OF_TERM[term]
        parts.update({name: value / len(names) for name in names})
    values = dict.fromkeys(Measurement.__dataclass_fields__, 1.0) | parts | {"step": sum(seconds.values())}
    return Measurement(**{**values, "device": "cpu", **changes})  # type: ignore[arg-type]


def test_fit_recovers_known_coefficients():
    truth, loads = CostModel(TRUE), workloads(30)
    fitted = CostModel.fit(loads, [measured(truth, w) for w in loads])
    for term, values in TRUE.items():
        assert fitted.coefficients[term] == pytest.approx(values, rel=1e-6), term
    assert sum(fitted.predict(loads[3]).values()) == pytest.approx(sum(truth.predict(loads[3]).values()))


def test_fit_with_noise_stays_non_negative_and_close():
    truth, loads = CostModel(TRUE), workloads(60)
    random = np.random.default_rng(1)
    noisy = []
    for w in loads:
        r = measured(truth, w)
        factors = {name: getattr(r, name) * random.uniform(0.95, 1.05) for name in PARTS}
        noisy.append(replace(r, **factors, step=sum(factors.values())))
    fitted = CostModel.fit(loads, noisy)
    assert all(v >= 0 for values in fitted.coefficients.values() for v in values)
    for w in workloads(70)[60:]:
        assert sum(fitted.predict(w).values()) == pytest.approx(sum(truth.predict(w).values()), rel=0.05)


def unused(model, point):
    raise AssertionError


def test_too_few_points_and_mixed_devices_are_refused():
    truth, loads = CostModel(TRUE), workloads(5)
    with pytest.raises(UserError, match="at least 6 points.*there are 5"):
        CostModel.fit(loads, [measured(truth, w) for w in loads])
    layout = Layout(4, 1, 1, 8, "local", 1)
    points = [Point(layout, measured(truth, loads[0], device=name)) for name in ("cpu", "H100")]
    with pytest.raises(UserError, match="several devices"):
        cost_model.check(points, Study(), unused)


def test_held_out_points_are_the_largest_experts_and_every_fourth():
    result = measured(CostModel(TRUE), workloads(1)[0])
    points = [Point(Layout(k, n, n, 8, "alltoall", 1), result) for n in (1, 2) for k in (2, 4, 8, 16)]
    fitted, held = cost_model.hold_out(points)
    assert [(p.layout.ranks, p.layout.experts) for p in held] == [(1, 16), (2, 2), (2, 16)]
    assert len(fitted) == 5 and not set(map(id, fitted)) & set(map(id, held))
    slow = Point(Layout(32, 2, 2, 8, "alltoall", 1, megabits=10), result)
    assert cost_model.hold_out([slow, *points]) == (fitted, [slow, *held])


@pytest.mark.parametrize("ranks, batches", [((1,), (8,)), ((1, 2), (8,)), ((1, 2, 4), (8, 16))])
def test_too_few_points_say_how_many_are_enough(ranks, batches):
    """One fewer than the number in the message is refused, as many as it says are enough, whatever was measured."""
    made = measured(CostModel(TRUE), workloads(1)[0])
    layouts = [Layout(k, n, 1, b, "local", 1) for k in range(2, 12) for n in ranks for b in batches]
    points = [Point(layout, made) for layout in layouts]
    first = points[: 2 * len(ranks) * len(batches)]
    with pytest.raises(UserError, match="measure .* in all") as error:
        cost_model.check(first, Study(), unused)
    enough = int(re.search(r"measure (\d+) in all", str(error.value))[1])
    largest = [p for p in points if p.layout.experts == 11]  # the sweep that the message asks for, with a larger K
    others = [p for p in points if p.layout.experts < 11][: enough - len(largest)]
    assert len(cost_model.hold_out([*others, *largest])[0]) >= 6
    with pytest.raises(UserError, match=f"measure {enough} in all"):
        cost_model.check([*others[:-1], *largest], Study(), unused)
