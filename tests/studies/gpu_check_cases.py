"""What the check does on a card only, run without one: a stand-in takes the card's place, and sizes are small.

Run in Triton's interpreter by test_gpu_check.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.support.graphs import Again
from unifmoe_dist import graphs
from unifmoe_dist.kernels import self_test
from unifmoe_dist.kernels.triton.interpreter import quicken
from unifmoe_dist.studies.benchmark.layers_and_models import MODELS, UNIFORM, VISION
from unifmoe_dist.studies.benchmark.side_by_side import Result, Timing
from unifmoe_dist.studies.gpu_check import card, device, launches, layers, memory, one_rank, timing, training
from unifmoe_dist.studies.gpu_check.record import DeviceLost, Record

quicken()
SMALL = dict(tokens=24, dim=16, hidden=64, experts=2, blocks=4)


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Of a machine with a card, which the CPU stands for."""
    monkeypatch.setattr(device, "need_card", lambda device: None)
    monkeypatch.setattr(device, "captured", lambda call, device: call)
    monkeypatch.setattr(timing, "_ROUNDS", 0.0)
    monkeypatch.setattr(timing, "matmul_rate", lambda device, dtype: 1e12)  # bf16 is slow on most CPUs
    return Record(tmp_path / "part.json", 300, on_card=True)


def verdicts(record):
    return {finding["what"]: finding["verdict"] for finding in record.findings}


def test_card(record, monkeypatch):
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=2**37, L2_cache_size=2**25)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(device, "driver", lambda fields: {"clocks.sm": "1980 MHz", "power.draw": "90 W"})
    card.check(record)
    text = next(finding["text"] for finding in record.findings if finding["what"] == "card")
    assert "capability 9.0, 132 multiprocessors, 128.0 GiB, clocks 1980 MHz of ?" in text
    assert verdicts(record)["a product on the card"] == "ok"


def test_layers(record, monkeypatch):
    monkeypatch.setitem(layers.SIZES, "gated", layers.TINY)
    layers.check(record, "gated")
    assert set(verdicts(record).values()) == {"ok"} and len(record.findings) == 6
    assert len(record.tables["errors"]["rows"]) == 3


def test_a_wrong_gradient_fails(record, monkeypatch):
    monkeypatch.setitem(layers.SIZES, "vision", layers.TINY)
    monkeypatch.setattr(layers, "DTYPES", {"fp32": torch.float32})
    passes, made = layers.passes, []

    def wrong(*args, **more):
        made.append(passes(*args, **more))
        if len(made) == 2:  # Triton's
            made[1]["experts.keys"] *= 1.01
        return made[-1]

    monkeypatch.setattr(layers, "passes", wrong)
    layers.check(record, "vision")
    assert verdicts(record)["vision, fp32: values"] == "failed"
    assert "experts.keys" in record.findings[0]["text"]


def test_launches(record, monkeypatch):
    waits = ["layer.py:3"]
    monkeypatch.setattr(launches, "EXPERTS", (2,))
    monkeypatch.setattr(launches, "SIZES", launches.TINY)
    monkeypatch.setattr(device, "host_waits", lambda call, device: waits)
    launches.check(record)
    assert verdicts(record)["K = 2: waits"] == "failed"
    row = record.tables["launches"]["rows"][0]
    assert int(row["forward"]) >= 5 and int(row["backward"]) >= 5


def test_one_rank(record, monkeypatch):
    join, used = dist.init_process_group, []
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **more: (used.append(backend), join("gloo", **more))
    )
    monkeypatch.setattr(one_rank, "TOLERANCE", {"fp32": 1e-4})
    monkeypatch.setitem(layers.SIZES, "vision", layers.TINY)
    try:
        one_rank.check(record)
    finally:
        dist.destroy_process_group()
    assert verdicts(record)["alltoall, fp32: waits"] == "note"
    assert used == ["nccl"] and verdicts(record)["alltoall, fp32"] == "ok"


def test_benchmark(record, monkeypatch):
    monkeypatch.setattr(device, "kernels", lambda **options: nullcontext())  # the interpreter is too slow to time
    shapes = [replace(UNIFORM[0], **SMALL), replace(VISION, **SMALL, block_compute=5.0)]
    shapes.append(replace(shapes[0], name="gated", gated=True))
    monkeypatch.setattr(timing, "_shapes", lambda *_: shapes)
    monkeypatch.setattr(device, "driver", lambda fields: dict.fromkeys(fields.split(","), "1"))
    monkeypatch.setattr(self_test, "_verdicts", {"a case": True, "another": False})
    monkeypatch.setattr(timing, "tuned_tiles", lambda: {"ffn_kernel": {"16 4": "num_warps: 4"}})
    monkeypatch.setattr(graphs, "device", Again())
    timing.check(record, "own")
    found = verdicts(record)
    assert found["vision, N = 24, router as it starts"] == found["vision, N = 24, C_B = 5: what was timed"] == "ok"
    assert found["vision, N = 24, router as it starts: UniF-MoE, in a CUDA graph, forward"] == "note"
    assert len(record.tables["clocks"]["rows"]) == 3 and record.tables["tiles"]["rows"][0]["kernel"] == "ffn_kernel"
    assert found["self-test: a case"] == "ok" and found["self-test: another"] == "failed"
    rows = record.tables["own, vision, N = 24, router as it starts"]["rows"]
    own = {"dense FFN", "dense FFN, in a CUDA graph", "UniF-MoE", "UniF-MoE, in a CUDA graph"}
    assert own | {"UniF-MoE, cuda_graphs=True"} <= {r[""] for r in rows}
    measured = {row[""] for row in record.tables["own, vision, N = 24, C_B = 5"]["rows"]}
    assert {f"UniF-MoE, {variant}, in a CUDA graph" for variant in timing.VARIANTS} == measured - {r[""] for r in rows}
    gated = {row[""] for row in record.tables["own, gated, N = 24, router as it starts"]["rows"]}
    variants = {f"UniF-MoE, {variant}, in a CUDA graph" for variant in timing.GATED_VARIANTS}
    assert variants == gated - {r[""] for r in rows} and timing.GATED_VARIANTS
    texts = {finding["what"]: finding["text"] for finding in record.findings}
    assert "goal" not in texts["gated, N = 24, router as it starts: UniF-MoE, in a CUDA graph, forward"]
    assert all(float(row["made ready (s)"]) >= 0 for row in rows)
    assert min(float(row["forward / dense"]) for row in rows if row[""].startswith("dense")) == 1


def test_a_layer_that_captures_nothing_is_not_timed_for_one_that_does(record, monkeypatch):
    monkeypatch.setattr(device, "kernels", lambda **options: nullcontext())
    monkeypatch.setattr(timing, "_shapes", lambda *_: [replace(UNIFORM[0], **SMALL)])
    stand_in = Again()
    stand_in.fails = True
    monkeypatch.setattr(graphs, "device", stand_in)
    timing.check(record, "own")
    title = "vision, N = 24, router as it starts"
    assert verdicts(record)[f"{title}: UniF-MoE, cuda_graphs=True"] == "failed"
    assert "UniF-MoE, cuda_graphs=True" not in {row[""] for row in record.tables[f"own, {title}"]["rows"]}


def test_peers_and_a_model(record, monkeypatch):
    monkeypatch.setattr(device, "kernels", nullcontext)  # the interpreter is too slow to time
    monkeypatch.setattr(timing, "_shapes", lambda *_: [replace(UNIFORM[0], **SMALL)])
    peers = {"Tutel": lambda shape, top_k, device, dtype: torch.nn.Linear(shape.dim, shape.dim).to(device, dtype)}
    monkeypatch.setattr("unifmoe_dist.studies.benchmark.layers_and_models.PEERS", peers)
    times = [Timing(name, 1.0, [0.001] * 3, [0.002] * 3) for name in ("dense", "UniF-MoE")]
    monkeypatch.setattr(timing, "run_model", lambda model, *more: Result("deit-s", "batch 64", 1.0, 1.0, times, {}))
    timing.check(record, "peers")
    texts = {finding["what"]: finding["text"] for finding in record.findings}
    assert "times as fast as" in texts["vision, N = 24, router as it starts: UniF-MoE, in a CUDA graph"]
    assert texts["DeiT-S"].startswith("1.00 and 1.00 of dense")
    assert MODELS["deit-s"].batch == 64


def test_a_peer_that_kills_the_device_is_named(record, monkeypatch):
    monkeypatch.setattr(device, "kernels", nullcontext)  # the interpreter is too slow to time

    def build(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(timing, "PEERS", {"Tutel": build})
    monkeypatch.setattr("unifmoe_dist.studies.benchmark.layers_and_models.PEERS", {"Tutel": build})
    monkeypatch.setattr(timing, "_shapes", lambda *_: [replace(UNIFORM[0], **SMALL)])
    with pytest.raises(DeviceLost):
        timing.check(record, "peers")
    assert "Tutel top-2" in record.findings[0]["text"]


def test_shapes_are_those_that_goals_are_for(record):
    titles = [timing._title(shape) for shape in timing._shapes(True, "own")]
    assert titles == [
        "vision, N = 12608, router as it starts",
        "language, N = 4096, router as it starts",
        "gated, N = 4096, router as it starts",
        "language, N = 16384, router as it starts",
        "vision, N = 12608, C_B = 11.41",
        "language, N = 16384, C_B = 47.61",
    ]
    assert [timing._title(shape) for shape in timing._shapes(True, "peers")] == titles[:2] + titles[3:]


def test_jobs_of_training(record):
    digits, deit = training._digits(record), training._deit(record)
    assert digits.images.shape == (1797, 1, 8, 8) and deit.images.shape == (64, 3, 224, 224)
    model = deit.build()
    assert 21e6 < sum(p.numel() for p in model.parameters()) < 23e6
    for job in (digits, deit):
        images, labels = job.step(3)
        assert job.build()(images[:1]).shape == (1, 10) and len(labels) == job.batch


@pytest.mark.parametrize("measured,verdict", [(2**30, "ok"), (2**31, "failed")])
def test_memory(record, monkeypatch, measured, verdict):
    from unifmoe_dist.studies.memory import fake_step, measured_peak

    configs = []
    monkeypatch.setattr(measured_peak, "measure_peak", lambda config: (configs.append(config), (measured, None))[1])
    monkeypatch.setattr(fake_step, "estimate", lambda *_: SimpleNamespace(peak=2**30))
    memory.check(record, "bf16")
    configs[0].validate(1)
    assert configs[0].data.task == "pacs" and verdicts(record) == {"DeiT-S, bf16": verdict}
