"""Bytes, step split, scaling study and cost model: formulas against brute force, counts and steps of real ranks."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from launch import scale
from tests.support.ranks import run_ranks
from unifmoe_dist.errors import UserError
from unifmoe_dist.profiling import profile_range
from unifmoe_dist.runtime.local_ranks import check_world_size, run_local_ranks
from unifmoe_dist.studies.scaling import cost_model
from unifmoe_dist.studies.scaling import grid as scaling
from unifmoe_dist.studies.scaling.cost_model import Cluster, CostModel, Workload
from unifmoe_dist.studies.scaling.point import Layout, Measurement, Study
from unifmoe_dist.studies.scaling.step_split import PARTS, split_step
from unifmoe_dist.studies.scaling.volume import (
    Traffic,
    alltoall_volume,
    counting_bytes,
    expected_traffic,
    measure_volume,
    minimum_volume,
    tutel_volume,
)

ROOT = Path(__file__).parents[2]


# -- volumes ------------------------------------------------------------------------------------------------


def random_gates(tokens: int, experts: int) -> torch.Tensor:
    gates = torch.rand(tokens, experts) * (torch.rand(tokens, experts) > 0.6)
    gates[0, 0] = float("nan")
    gates[1] = 0
    return gates


@pytest.mark.parametrize("experts,size,rank,blocks", [(6, 2, 1, 8), (12, 4, 0, 9), (64, 2, 0, 33), (4, 1, 0, 8)])
def test_volumes_equal_brute_force(experts, size, rank, blocks):
    torch.manual_seed(experts)
    gates, row = random_gates(20, experts), 24
    local = experts // size
    forward = backward = ours = 0
    for token in range(20):
        for other in range(size):
            here = sum(bool(g != 0) for g in gates[token, other * local : (other + 1) * local])
            if other == rank or not here:
                continue
            forward += row + -(-blocks // 8) + 4 * here + row
            backward += row + row + 4 * here
            ours += -(-(blocks + local) // 8) - -(-blocks // 8)
    traffic = Traffic.of(gates, blocks, row, size, rank)
    minimum, sent = minimum_volume(traffic), alltoall_volume(traffic)
    assert (minimum.forward, minimum.backward) == (forward, backward)
    assert (sent.forward, sent.backward) == (forward + ours + 32 * (size - 1), backward)
    assert traffic.largest_load == max(sum(bool(g != 0) for g in gates[:, e]) for e in range(experts))
    padded = torch.zeros(experts, 5, row, dtype=torch.uint8)  # (K, capacity, D) of a rank, one way
    assert tutel_volume(traffic, 5).forward == 2 * (padded.numel() - padded[:local].numel())


def volumes(rank, world, *args):
    return measure_volume(*args)


@pytest.mark.parametrize("world,experts,skewed", [(2, 64, False), (2, 6, True), (4, 16, True)])
def test_alltoall_sends_the_formula_and_at_most_the_minimum_plus_5_percent(world, experts, skewed):
    values = run_ranks(world, volumes, experts, skewed, 100, 384, 8)[0]
    assert values["alltoall"] == pytest.approx(values["formula"], rel=1e-12)
    assert values["minimum"] < values["alltoall"] <= 1.05 * values["minimum"]
    assert values["tutel"] > values["alltoall"]
    assert (values["load_imbalance"] > 1.5) == skewed


def tutel_bytes(rank, world):
    """Bytes that Tutel's exchange hands to the collective, and its padded volume by the formula."""
    from unifmoe_dist.dispatch.tutel import TutelDispatcher

    torch.manual_seed(rank)
    x, gates = torch.randn(50, 384, requires_grad=True), random_gates(50, 6).nan_to_num(0.5).requires_grad_()
    traffic = Traffic.of(gates, 8, 4 * 384, world, rank)
    capacity = torch.tensor(traffic.largest_load)
    dist.all_reduce(capacity, op=dist.ReduceOp.MAX)
    with counting_bytes() as count:
        exchange = TutelDispatcher(dist.group.WORLD).dispatch(x, gates, torch.rand(50, 8) > 0.5)
        rows = exchange.arrivals()
        exchange.combine(rows.x * rows.gates.sum(1, keepdim=True)).sum().backward()
    return count.bytes, tutel_volume(traffic, int(capacity)).total


@pytest.mark.tutel
def test_padded_volume_is_what_tutel_sends():
    for counted, formula in run_ranks(2, tutel_bytes):
        assert formula < counted < 1.01 * formula  # the block masks travel beside what Tutel would send


def test_expected_traffic_is_the_mean_over_random_experts():
    torch.manual_seed(0)
    experts, size, k, tokens = 12, 4, 3, 20_000
    gates = torch.zeros(tokens, experts).scatter_(1, torch.rand(tokens, experts).argsort(1)[:, :k], 1.0)
    got, want = Traffic.of(gates, 8, 4, size, 0), expected_traffic(tokens, k, experts, 8, 4, size)
    assert got.crossings == pytest.approx(want.crossings, rel=0.01)
    assert got.gates == pytest.approx(want.gates, rel=0.01)
    assert expected_traffic(10, 11, 12, 8, 4, 4).crossings == 30  # more experts than the other ranks hold
    assert expected_traffic(10, 3, 12, 8, 4, 1).crossings == 0


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
    "dense": [5e-3, 2e-6, 4e-9],
    "exchange": [3e-4, 2e-9, 0.7],
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
                tokens=320 * a,
                flops=3e9 * b,
                extra_flops=2e8 * c,
                groups=float(random.integers(20, 500)),
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


def test_too_few_points_and_mixed_devices_are_refused():
    truth, loads = CostModel(TRUE), workloads(5)
    with pytest.raises(UserError, match="at least 6 points.*there are 5"):
        CostModel.fit(loads, [measured(truth, w) for w in loads])
    layout = Layout(4, 1, 1, 8, "local", 1)
    points = [scaling.Point(layout, measured(truth, loads[0], device=name)) for name in ("cpu", "H100")]
    with pytest.raises(UserError, match="several devices"):
        cost_model.check(points, Study())


def test_held_out_points_are_the_largest_experts_and_every_fourth():
    result = measured(CostModel(TRUE), workloads(1)[0])
    points = [scaling.Point(Layout(k, n, n, 8, "alltoall", 1), result) for n in (1, 2) for k in (2, 4, 8, 16)]
    fitted, held = cost_model.hold_out(points)
    assert [(p.layout.ranks, p.layout.experts) for p in held] == [(1, 16), (2, 2), (2, 16)]
    assert len(fitted) == 5 and not set(map(id, fitted)) & set(map(id, held))


@pytest.mark.parametrize("ranks, batches", [((1,), (8,)), ((1, 2), (8,)), ((1, 2, 4), (8, 16))])
def test_too_few_points_say_how_many_are_enough(ranks, batches):
    """One fewer than the number in the message is refused, as many as it says are enough, whatever was measured."""
    made = measured(CostModel(TRUE), workloads(1)[0])
    layouts = [Layout(k, n, 1, b, "local", 1) for k in range(2, 12) for n in ranks for b in batches]
    points = [scaling.Point(layout, made) for layout in layouts]
    first = points[: 2 * len(ranks) * len(batches)]
    with pytest.raises(UserError, match="measure .* in all") as error:
        cost_model.check(first, Study())
    enough = int(re.search(r"measure (\d+) in all", str(error.value))[1])
    largest = [p for p in points if p.layout.experts == 11]  # the sweep that the message asks for, with a larger K
    others = [p for p in points if p.layout.experts < 11][: enough - len(largest)]
    assert len(cost_model.hold_out([*others, *largest])[0]) >= 6
    with pytest.raises(UserError, match=f"measure {enough} in all"):
        cost_model.check([*others[:-1], *largest], Study())


def test_predictions_say_what_their_last_column_is():
    prediction = cost_model.Prediction(4, 2, dict.fromkeys(cost_model.PARTS_OF_TERM, 0.001), 1000.0, 1.07)
    text = cost_model.format_predictions([prediction], Cluster(2, 4, 100.0, 100.0, 0.0, 0.0), "H100")
    assert "single ranks" not in text and "| 1.07 |" in text
    assert "tokens/s over those of 8 ranks that each hold all K experts and exchange nothing: above 1" in text


def test_cluster_links_cost_what_they_should():
    w = replace(
        workloads(1)[0],
        ranks=8,
        expert_parallel=4,
        messages=30.0,
        bytes=3e6,
        dense_parameters=1e6,
        expert_parameters=2e6,
    )
    node = Cluster(1, 8, node_gbps=80, link_gbps=8, node_latency=1e-6, link_latency=1e-5)
    assert node.exchange_seconds(w) == pytest.approx(30 * 1e-6 + 3e6 / 1e10)
    spread = Cluster(4, 2, node_gbps=80, link_gbps=8, node_latency=1e-6, link_latency=1e-5)  # 1 of 3 peers is near
    assert spread.exchange_seconds(w) == pytest.approx((10 * 1e-6 + 20 * 1e-5) + (1e6 / 1e10 + 2e6 / 1e9))
    ring = 2 * 4 * 1e6 * 7 / 8 + 2 * 4 * 2e6 * 1 / 2
    assert node.ring_seconds(w) == pytest.approx(16 * 1e-6 + ring / 1e10)
    assert spread.ring_seconds(w) == pytest.approx(16 * 1e-5 + ring / 1e9)
    alone = replace(w, ranks=1, expert_parallel=1)
    assert node.exchange_seconds(alone) == 0 and node.ring_seconds(alone) == 0


# -- the study ------------------------------------------------------------------------------------------------


def test_grid_leaves_out_what_cannot_be():
    layouts, left_out = scaling.grid([6, 2], [1, 4], [0], [8], ["auto", "local"], [1])
    found = [(x.experts, x.ranks, x.expert_parallel, x.dispatcher) for x in layouts]
    assert found == [
        (2, 1, 1, "local"),
        (6, 1, 1, "local"),
        (2, 4, 2, "alltoall"),
        (2, 4, 1, "local"),
        (6, 4, 2, "alltoall"),
        (6, 4, 1, "local"),
    ]
    assert left_out == 0
    layouts, left_out = scaling.grid([6, 4], [2, 4], [4], [8], ["alltoall"], [1, 2])
    assert {(x.experts, x.ranks) for x in layouts} == {(4, 4)} and left_out == 6
    with pytest.raises(UserError, match="no combination"):
        scaling.grid([6], [2, 4], [4], [8], ["alltoall"], [1, 2])
    with pytest.raises(UserError, match="--batch must be at least 1, not 0"):
        scaling.grid([2], [1], [0], [0], ["auto"], [1])


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    check_world_size(1000)  # on the CPU any number goes
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_world_size(2)
    with pytest.raises(UserError, match="3 ranks need 3 GPUs, but this machine has 2"):
        check_world_size(3)


def fail_on_one_rank(kind):
    if os.environ["RANK"] == "1":
        if kind == "user":
            raise UserError("use fewer.")
        if kind == "crash":
            raise ValueError("broken here")
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)
    time.sleep(100)


@pytest.mark.parametrize(
    "kind,error,words",
    [
        ("user", UserError, "use fewer"),
        ("crash", RuntimeError, "rank 1 failed(.|\n)*broken here"),
        ("death", RuntimeError, "rank 1 died(.|\n)*last words"),
    ],
)
def test_a_failing_rank_takes_the_others_down(kind, error, words):
    started = time.monotonic()
    with pytest.raises(error, match=words):
        run_local_ranks(2, fail_on_one_rank, kind)
    assert time.monotonic() - started < 60  # rank 0 would sleep for 100 s


def run_scale(*options):
    return subprocess.run(
        [sys.executable, str(ROOT / "launch" / "scale.py"), *map(str, options)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_the_volume_table_takes_no_other_option():
    with pytest.raises(UserError, match="--ranks 2 would change nothing"):
        scale.main(["--ranks", "2", "--volume"])


def test_sweep_measures_plots_and_continues(tmp_path):
    options = (
        "--experts",
        2,
        4,
        "--ranks",
        2,
        "--batch",
        3,
        "--width",
        16,
        "--depth",
        2,
        "--steps",
        2,
        "--warmup",
        1,
        "--output",
        tmp_path,
    )
    first = run_scale(*options)
    assert first.returncode == 0, first.stderr
    assert "no cost model: a cost model needs at least 6 points" in first.stdout
    assert "but of 2 that were measured 1 are held out to check it; measure 8 in all:" in first.stdout
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
    with (tmp_path / "scaling.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    assert [(r["experts"], r["ranks"], r["expert_parallel"]) for r in rows] == [("2", "2", "2"), ("4", "2", "2")]
    for row in rows:
        number = {name: float(row[name]) for name in Measurement.__dataclass_fields__ if name != "device"}
        assert number["tokens"] == 2 * 3 * 5 and number["dropped"] == 0 and np.isfinite(number["loss"])
        assert sum(number[name] for name in PARTS) == pytest.approx(number["step"], rel=1e-6)
        assert all(number[name] > 0 for name in PARTS)  # every part was found in the profile, all-reduce too
        assert number["minimum_bytes"] < number["sent_bytes"] <= number["tutel_bytes"] * 2
        assert number["sent_bytes"] - number["minimum_bytes"] <= 2 * 32 / 30 + 1  # counts, and bits of active experts
        assert number["exchange_messages"] == 5
        # Both ranks' work together is what routing asked for: C_B blocks per token.
        assert number["rank_blocks"] >= number["blocks_per_token"] * 15 * 0.9
        assert number["memory"] > 0

    # All points are there: nothing is measured again.
    text = (tmp_path / "scaling.csv").read_text()
    study, layouts = scaling.read_study(tmp_path), [Layout(k, 2, 2, 3, "alltoall", 1) for k in (2, 4)]
    points = scaling.run_study(layouts, study, tmp_path, progress=False)
    assert [p.layout for p in points] == layouts and (tmp_path / "scaling.csv").read_text() == text

    # A crash while the last row was written: that point is missing, and its row replaces the rest of the line.
    (tmp_path / "scaling.csv").write_text(text[: text.rindex(".") + 1])
    assert scaling.read_points(tmp_path) == points[:1]
    scaling._append(tmp_path / "scaling.csv", points[1])
    assert (tmp_path / "scaling.csv").read_text() == text and scaling.read_points(tmp_path) == points


def test_a_command_error_is_one_sentence(tmp_path):
    result = run_scale("--predict", tmp_path)
    assert result.returncode == 2 and "holds no study.json" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "layout,study,words",
    [
        (dict(experts=2), dict(width=18), "width 18"),
        (dict(experts=16), dict(width=16), "at most 15 experts"),
        (dict(experts=3, ranks=2, expert_parallel=2), dict(), "3 is not divisible"),
        (dict(experts=2), dict(steps=0), "steps must be at least 1, not 0"),
    ],
)
def test_what_cannot_work_is_refused_before_ranks_start(layout, study, words, tmp_path):
    with pytest.raises(UserError, match=words):
        chosen = Layout(**{**dict(ranks=1, expert_parallel=1, batch=2, dispatcher="local", zero=1), **layout})
        scaling.run_study([chosen], Study(**study), tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


def test_another_shape_in_the_same_folder_is_refused(tmp_path):
    scaling._agree_on_study(tmp_path, Study(width=64))
    with pytest.raises(UserError, match="width 64"):
        scaling.run_study([Layout(2, 1, 1, 2, "local", 1)], Study(width=32), tmp_path, progress=False)


def test_folders_that_hold_no_study(tmp_path):
    layout = Layout(2, 1, 1, 2, "local", 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output .*file"):
        scaling.run_study([layout], Study(), tmp_path / "file", progress=False)
    for text in ("{", "[]", '{"colour": 1}'):
        (tmp_path / "study.json").write_text(text)
        with pytest.raises(UserError, match="study.json"):
            scaling.read_study(tmp_path)
    (tmp_path / "scaling.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="scaling.csv"):
        scaling.read_points(tmp_path)
