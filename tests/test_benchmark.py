"""The benchmark measures what it says it does; how fast anything is, no test asserts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.analysis import benchmark

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("shape", [benchmark.VISION, benchmark.LANGUAGE])
def test_operating_point_is_reached(shape):
    torch.manual_seed(0)
    layer = UniFMoELayer(UniFMoEConfig(shape.dim, 2 * shape.blocks, shape.experts, shape.blocks))
    x = torch.randn(2000, shape.dim)
    reached = benchmark.at_operating_point(layer, x, shape.block_compute)
    assert reached == pytest.approx(shape.block_compute, rel=0.01)
    assert layer.route(x).block_compute.float().mean().item() == reached


def test_every_contender_is_a_layer_that_trains():
    shape = benchmark.Shape("small", 40, 48, 96, 4, 4, 5.0)
    x = torch.randn(shape.tokens, shape.dim)
    found = {c.name: c for c in benchmark.contenders(shape, x)}
    assert {"dense FFN", "UniF-MoE", "UniF-MoE, masked reference", "Transformers Mixtral top-2"} <= found.keys()
    outputs = {}
    for name, contender in found.items():
        leaf = x.clone().requires_grad_()
        with contender.context():
            outputs[name] = contender.layer(leaf)
        outputs[name].sum().backward()
        assert outputs[name].shape == x.shape and leaf.grad.abs().sum() > 0, name
    torch.testing.assert_close(outputs["UniF-MoE"], outputs["UniF-MoE, masked reference"])
    assert found["UniF-MoE"].blocks == pytest.approx(5.0 / 4, rel=0.05)


def test_command_line(tmp_path):
    command = [sys.executable, str(ROOT / "launch/benchmark.py"), "--tokens", "32", "--seconds", "0.1",
               "--threads", "1", "--output", str(tmp_path)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads((tmp_path / "benchmark.json").read_text())["results"]
    rounds = {len(t[kind]) for t in result["timings"] for kind in ("forward", "training")}
    assert len(rounds) == 1 and rounds.pop() >= 3  # interleaved: all have as many
    assert "| UniF-MoE |" in (tmp_path / "benchmark.md").read_text()
    assert (tmp_path / "benchmark.png").stat().st_size > 10_000

    bad = subprocess.run([*command[:2], "--tokens", "0"], capture_output=True, text=True, cwd=ROOT)
    assert bad.returncode == 2 and bad.stderr.strip().splitlines()[-1].startswith("error: --tokens must be above 0")
