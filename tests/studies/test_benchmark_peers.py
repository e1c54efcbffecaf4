"""The benchmark's peers compute what they mean, and one that cannot run is left out with a reason."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.support.benchmarks import CPU, SMALL
from unifmoe_dist.studies.benchmark import side_by_side
from unifmoe_dist.studies.benchmark.peers import PEERS, reason
from unifmoe_dist.studies.benchmark.side_by_side import Contender, Subject, Timing


def tutel_parts(layer):
    experts = layer.experts

    def expert(e, x):
        hidden = F.gelu(x @ experts.batched_fc1_w[e].T + experts.batched_fc1_bias[e])
        return hidden @ experts.batched_fc2_w[e] + experts.batched_fc2_bias[e]

    return layer.gates[0].wg.weight, expert


def mixtral_parts(layer):
    block = layer.block

    def expert(e, x):
        gate, up = (x @ block.experts.gate_up_proj[e].T).chunk(2, -1)
        return (F.silu(gate) * up) @ block.experts.down_proj[e].T

    return block.gate.weight, expert


def deepspeed_parts(layer):
    moe = layer.moe.deepspeed_moe
    return moe.gate.wg.weight, lambda e, x: moe.experts.deepspeed_experts[e](x)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize(
    "name,parts",
    [
        pytest.param("Tutel", tutel_parts, marks=pytest.mark.tutel),
        ("Transformers Mixtral", mixtral_parts),
        ("DeepSpeed MoE", deepspeed_parts),
    ],
)
def test_peers_compute_what_they_mean_and_drop_nothing(name, parts, top_k):
    torch.manual_seed(0)
    layer = PEERS[name](SMALL, top_k, CPU, torch.float32)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) / 7)
        x = torch.randn(SMALL.tokens, SMALL.dim)
        with FlopCounterMode(display=False) as counter:
            y = layer(x)
        router, expert = parts(layer)
        gates, chosen = (x @ router.T).softmax(-1).topk(top_k, -1)
        if top_k > 1 or name == "Transformers Mixtral":
            gates = gates / gates.sum(-1, keepdim=True)
        want = torch.zeros_like(x)
        for e in range(SMALL.experts):
            want += (gates * (chosen == e)).sum(-1, keepdim=True) * expert(e, x)
        busiest = int(chosen.flatten().bincount().max())
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
    # The work that it is credited with is the least that it did; buffers are padded to the busiest expert at most.
    ffn = 4 * SMALL.tokens * SMALL.dim * SMALL.hidden
    routing = 2 * SMALL.tokens * (SMALL.dim + 2) * SMALL.experts  # logits, and top-2 gates by einsum
    assert top_k * ffn <= counter.get_total_flops() <= ffn * SMALL.experts * busiest / SMALL.tokens + routing


@pytest.mark.parametrize(
    "library,name", [("megablocks", "MegaBlocks dMoE"), ("sonicmoe", "SonicMoE"), ("scattermoe", "ScatterMoE")]
)
def test_a_peer_that_cannot_run_says_why(library, name):
    with pytest.raises(Exception) as caught:
        PEERS[name](SMALL, 2, CPU, torch.float32)
    installed = importlib.util.find_spec(library) is not None
    assert ("needs a GPU" if installed else f"{library} is not installed") in reason(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("scattermoe") is None, reason="ScatterMoE is not installed")
def test_scattermoe_in_the_interpreter():
    code = """
import torch
from unifmoe_dist.studies.benchmark.peers import PEERS, Shape
torch.manual_seed(0)
layer = PEERS["ScatterMoE"](Shape("small", 32, 64, 128, 4, 4), 2, torch.device("cpu"), torch.float32)
x = torch.randn(32, 64, requires_grad=True)
y = layer(x)
gates, chosen = layer.router(x).softmax(-1).topk(2, -1)
gates = gates / gates.sum(-1, keepdim=True)
up, down = layer.mlp.experts.weight, layer.mlp.output_experts.weight
want = sum((gates * (chosen == e)).sum(-1, keepdim=True) * (torch.nn.functional.gelu(x @ up[e].T) @ down[e].T)
           for e in range(4))
torch.testing.assert_close(y, want, rtol=1e-3, atol=1e-4)
y.sum().backward()
assert x.grad.abs().sum() > 0
"""
    command = ["env", "TRITON_INTERPRET=1", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def fails(message="it broke\nand here is why"):
    raise RuntimeError(message)


def test_a_failing_peer_never_ends_the_benchmark():
    def ready(contender):
        contender.build()
        return Subject(Timing(contender.name, 1.0), lambda: None, lambda: None, contender.peer)

    good = Contender("good", lambda: nn.Identity(), 1.0)
    bad = Contender("bad", fails, 1.0, peer=True)
    late = Contender("late", lambda: nn.Identity(), 1.0, peer=True)
    subjects, skipped = side_by_side.prepare([good, bad, late], ready)
    assert skipped == {"bad": "RuntimeError: it broke"}
    subjects[1].train = partial(fails, "out of memory")
    assert side_by_side.measure(subjects, CPU, 0.0, lambda: None) == {"late": "RuntimeError: out of memory"}
    assert [s.timing.contender for s in subjects] == ["good"] and len(subjects[0].timing.training) == 3
    with pytest.raises(RuntimeError, match="it broke"):  # our own faults are not swallowed
        side_by_side.prepare([replace(bad, peer=False)], ready)
