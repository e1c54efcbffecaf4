"""The benchmark measures what it says it does; how fast anything is, no test asserts."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.support.jobs import run_job
from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.benchmark import benchmark_results as results_of
from unifmoe_dist.studies.benchmark import decoding, side_by_side
from unifmoe_dist.studies.benchmark import layers_and_models as benchmark
from unifmoe_dist.studies.benchmark.layers_and_models import dense_ffn
from unifmoe_dist.studies.benchmark.peers import PEERS, Shape, reason
from unifmoe_dist.studies.benchmark.side_by_side import Contender, Subject, Timing
from unifmoe_dist.studies.meters import kept_for_backward

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
SMALL = Shape("small", 40, 48, 96, 4, 4, 5.0)


@pytest.mark.parametrize("shape", [benchmark.VISION, benchmark.LANGUAGE])
def test_operating_point_is_reached(shape):
    torch.manual_seed(0)
    layer = UniFMoELayer(UniFMoEConfig(shape.dim, 2 * shape.blocks, shape.experts, shape.blocks))
    x = torch.randn(2000, shape.dim)
    reached = benchmark.at_operating_point(layer, x, shape.block_compute)
    assert reached == pytest.approx(shape.block_compute, rel=0.01)
    assert layer.route(x).block_compute.float().mean().item() == reached


@pytest.mark.parametrize("gated", [False, True])
def test_every_contender_is_a_layer_that_trains(gated):
    torch.manual_seed(0)
    x = torch.randn(SMALL.tokens, SMALL.dim)
    outputs, works = {}, {}
    for contender in benchmark.contenders(replace(SMALL, gated=gated), x):
        try:
            module = contender.build()
        except Exception as error:
            assert contender.peer, f"{contender.name}: {reason(error)}"
            continue
        leaf = x.clone().requires_grad_()
        with contender.context():
            outputs[contender.name] = module(leaf)
        outputs[contender.name].sum().backward()
        assert outputs[contender.name].shape == x.shape and leaf.grad.abs().sum() > 0, contender.name
        works[contender.name] = contender.work
    torch.testing.assert_close(outputs["UniF-MoE"], outputs["UniF-MoE, masked reference"])
    assert works["UniF-MoE"] == pytest.approx(5.0 / 4, rel=0.05)
    assert {"dense FFN", "Transformers Mixtral top-1", "DeepSpeed MoE top-2"} <= outputs.keys()
    if hasattr(F, "grouped_mm"):
        torch.testing.assert_close(outputs["UniF-MoE, torch grouped_mm"], outputs["UniF-MoE"])


def test_a_gated_dense_ffn_costs_what_it_is_credited_with():
    """Three matrices; the peers' experts cost as much, those that are gated themselves too."""
    shape, x = replace(SMALL, gated=True), torch.randn(SMALL.tokens, SMALL.dim)
    result = benchmark.run_layer(shape, CPU, torch.float32, 0.0, lambda: None, 1e9, brief=True)
    assert result.sizes.endswith(", gated")
    found = {c.name: c for c in benchmark.contenders(shape, x, top_ks=(1,))}
    for name, extra in (("dense FFN", 0), ("Transformers Mixtral top-1", 2 * SMALL.tokens * SMALL.dim * SMALL.experts)):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            found[name].build()(x)
        assert counter.get_total_flops() == result.flops + extra == 3 * 2 * 40 * 48 * 96 + extra


# -- peers ----------------------------------------------------------------------------------------------------------


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


# -- memory ---------------------------------------------------------------------------------------------------------


def kept(module, x):
    return kept_for_backward(lambda: module(x.clone().requires_grad_()), module.parameters())


def test_kept_memory_counts_every_storage_once_and_no_parameter():
    ffn, x = dense_ffn(16, 64), torch.randn(10, 16)
    assert kept(ffn, x) == 10 * (16 + 64 + 64) * 4  # tokens, channels before and after the activation

    class Hoards(torch.autograd.Function):  # as some libraries do
        @staticmethod
        def forward(ctx, x):
            ctx.hoard = [torch.zeros(1000)]
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Layer(nn.Module):
        def forward(self, x):
            return Hoards.apply(x)

    assert kept(Layer(), x) == 4000


@pytest.mark.parametrize("shape", [benchmark.VISION, benchmark.LANGUAGE], ids=lambda s: s.name)
def test_activation_memory_is_at_most_that_of_a_top_2_mixture(shape):
    torch.manual_seed(0)
    shape = replace(shape, tokens=300, dim=64, hidden=256)
    x = torch.randn(shape.tokens, shape.dim)
    found = {c.name: c for c in benchmark.contenders(shape, x, top_ks=(2,), reference=False)}
    ours = kept(found["UniF-MoE"].build(), x)
    assert ours > x.nbytes
    compared = 0
    for name in ("Tutel top-2", "Transformers Mixtral top-2", "DeepSpeed MoE top-2"):
        try:
            mixture = found[name].build()
        except ImportError:
            continue
        compared += 1
        assert ours <= kept(mixture, x), name
    assert compared >= 2


# -- whole models, sweeps, command line -----------------------------------------------------------------------------


def tiny_bert():
    from transformers import BertConfig, BertForSequenceClassification

    sizes = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, vocab_size=50)
    return BertForSequenceClassification(BertConfig(**sizes))


def tiny_vit():
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=2, num_classes=5)


@pytest.mark.parametrize(
    "build,inputs,layers",
    [
        (tiny_bert, lambda n: (torch.randint(0, 50, (n, 12)),), (0, 2)),
        (tiny_vit, lambda n: (torch.randn(n, 3, 32, 32),), (1,)),
    ],
)
def test_whole_models(build, inputs, layers, tmp_path):
    model = benchmark.Model("tiny", build, inputs, layers, 4, 4, 6.0, batch=3, cpu_batch=3)
    result = benchmark.run_model(model, CPU, torch.float32, 3, 0.0, lambda: None, 1e9)
    assert result.skipped == {}
    dense, ours, top_2 = result.timings
    assert [t.contender for t in result.timings] == ["dense", "UniF-MoE", "Transformers Mixtral top-2"]
    assert 1 < ours.work < top_2.work < 2
    parameters = list(build().parameters())
    steps = 4 * len(parameters)  # AdamW's step counts
    assert dense.held - steps == pytest.approx(16 * sum(p.numel() for p in parameters), rel=0.02)  # buffers besides
    assert dense.held < ours.held and dense.kept > 0
    text = results_of.table(result)
    assert "training step / floor" in text and text.count("\n| UniF-MoE |") == 1
    assert results_of.plot([result], "here", tmp_path / "models.png").stat().st_size > 10_000


@pytest.mark.parametrize("fast", [True, False])
def test_rows_in_bf16_are_there_or_said_to_be_left_out(fast, monkeypatch):
    monkeypatch.setattr(benchmark, "has_fast_bf16", lambda: fast)
    result = benchmark.run_layer(replace(SMALL, tokens=8), CPU, torch.float32, 0.0, lambda: None, 1e9, brief=True)
    names = ("dense FFN in bf16", "UniF-MoE in bf16")
    assert [t.contender for t in result.timings if "bf16" in t.contender] == [*names] * fast
    left_out = {name: why for name, why in result.skipped.items() if "bf16" in name}
    why = "this CPU has no bf16 instructions (avx512_bf16 or amx_bf16)"
    assert left_out == ({} if fast else dict.fromkeys(names, why))
    text = results_of.table(result)
    assert all(name in text for name in names) and ("no bf16 instructions" in text) != fast


def test_one_kind_of_benchmark_leaves_the_results_of_others(command, tmp_path, monkeypatch):
    """In-process, with timings that take no time: files of layers, whole models and number formats stay apart."""
    timed = [benchmark.run_layer(replace(SMALL, tokens=8), CPU, torch.float32, 0.0, lambda: None, 1e9, brief=True)]
    monkeypatch.setattr(benchmark, "run_layer", lambda *args, **more: timed[0])
    monkeypatch.setattr(benchmark, "run_model", lambda *args, **more: timed[0])
    monkeypatch.setattr(side_by_side, "matmul_rate", lambda *args: 1e9)
    monkeypatch.setattr(results_of, "plot", lambda results, where, path: path.write_text("picture"))
    kept = {}
    for words in (["--shapes", "vision"], ["--models", "deit-s"], ["--shapes", "vision", "--dtype", "bf16"]):
        command.main([*words, "--output", str(tmp_path)])
        assert all((tmp_path / name).stat().st_mtime_ns == time for name, time in kept.items())
        kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    stems = ("benchmark", "models", "benchmark-bf16")
    assert kept.keys() == {f"{stem}.{suffix}" for stem in stems for suffix in ("md", "json", "png")}
    assert json.loads((tmp_path / "models.json").read_text()).keys() >= {"where", "models"}


def test_sweeps(tmp_path):
    results = {
        "N": [
            benchmark.run_layer(
                replace(SMALL, tokens=n, block_compute=None), CPU, torch.float32, 0.0, lambda: None, 1e9, brief=True
            )
            for n in (8, 16)
        ]
    }
    names = {t.contender for t in results["N"][0].timings}
    assert "DeepSpeed MoE top-2" in names and not any("top-1" in n or "reference" in n for n in names)
    text = results_of.sweep_table("N", results["N"])
    assert "| small: N=16, d=48, H=96, K=4, B=4, router as it starts |" in text
    assert results_of.plot_sweeps(results, "here", tmp_path / "sweep.png").stat().st_size > 10_000
    on_gpu = [shape for shapes in benchmark.sweeps(on_gpu=True).values() for shape in shapes]
    assert {1024, 65536} <= {s.tokens for s in on_gpu}
    assert max(s.dim for s in on_gpu) == 4096 and max(s.experts for s in on_gpu) == 64


def test_command_line(tmp_path):
    words = ["--tokens", "32", "--seconds", "0.1", "--shapes", "vision", "--threads", "1", "--output", str(tmp_path)]
    job = run_job(tmp_path, 1, words, timeout=200, script="benchmark")
    assert job.statuses == [0], job.output
    (result,) = json.loads((tmp_path / "benchmark.json").read_text())["layers"]
    rounds = {len(t[kind]) for t in result["timings"] for kind in ("forward", "training")}
    assert len(rounds) == 1 and rounds.pop() >= 3  # interleaved: all have as many
    listed = {t["contender"] for t in result["timings"]} | result["skipped"].keys()
    assert {f"{peer} top-{k}" for peer in PEERS for k in (1, 2)} <= listed  # none is missing without a word
    text = (tmp_path / "benchmark.md").read_text()
    assert "| UniF-MoE |" in text and "UniF-MoE keeps" in text
    assert all(name in text for name in listed)
    assert (tmp_path / "benchmark.png").stat().st_size > 10_000


@pytest.fixture
def command():
    """launch/benchmark.py as a module."""
    spec = importlib.util.spec_from_file_location("launch_benchmark", ROOT / "launch/benchmark.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_few_tokens(command, tmp_path, monkeypatch):
    """Each row is of the layer that it names; the folder's other results stay."""
    monkeypatch.setattr(decoding, "DIM", 24)
    monkeypatch.setattr(decoding, "HIDDEN", 48)
    monkeypatch.setattr(decoding, "TOKENS", (1, 3))
    (tmp_path / "benchmark.md").write_text("kept")
    command.main(["--decoding", "--seconds", "0.01", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "decoding.json").read_text())["rows"]
    assert [(row["ffn"], row["tokens"]) for row in rows] == [("plain", 1), ("plain", 3), ("gated", 1), ("gated", 3)]
    for row in rows:
        assert 1 - 1 / 8 <= row["work"] <= 6 and all(value > 0 for value in list(row.values())[2:])
    text = (tmp_path / "decoding.md").read_text()
    assert "d=24, H=48" in text and len([line for line in text.splitlines() if line.startswith("| ")]) == 6
    assert (tmp_path / "benchmark.md").read_text() == "kept" and not (tmp_path / "benchmark.json").exists()


def test_compiled_beside_eager(command, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setitem(benchmark.PAPER, "vision", replace(SMALL, tokens=8))
    monkeypatch.setitem(benchmark.CPU_TOKENS, "vision", 8)
    words = ["--compile", "--shapes", "vision", "--seconds", "0.01", "--threads", "1", "--output", str(tmp_path)]
    command.main(words)
    (result,) = json.loads((tmp_path / "benchmark-compile.json").read_text())["layers"]
    names = [timing["contender"] for timing in result["timings"]]
    assert names == ["dense FFN", "dense FFN, compiled", "UniF-MoE", "UniF-MoE, compiled"] and not result["skipped"]
    with pytest.raises(UserError, match="--compile belongs to --shapes and --models, and neither is given"):
        command.parse(["--compile", "--sweep"])


def test_names_given_twice_count_twice(command):
    options = command.parse("--shapes vision --models --models deit-s --shapes language --models bert-large".split())
    assert options.shapes == ["vision", "language"] and options.models == ["deit-s", "bert-large"]
    assert command.parse([]).shapes is None and command.parse(["--models"]).models == []


def test_gated_layers_have_files_of_their_own(command, tmp_path, monkeypatch):
    shapes = []
    timed = benchmark.run_layer(replace(SMALL, tokens=8), CPU, torch.float32, 0.0, lambda: None, 1e9, brief=True)
    monkeypatch.setattr(benchmark, "run_layer", lambda shape, *args, **more: shapes.append(shape) or timed)
    monkeypatch.setattr(side_by_side, "matmul_rate", lambda *args: 1e9)
    command.main(["--gated", "--shapes", "vision", "--output", str(tmp_path)])
    assert [shape.gated for shape in shapes] == [True] and (tmp_path / "benchmark-gated.md").is_file()
    with pytest.raises(UserError, match="--gated belongs to --shapes and --sweep"):
        command.parse(["--gated", "--models"])


@pytest.mark.parametrize("option", ["--tokens", "--batch", "--seconds", "--threads"])
def test_command_line_refuses(option, command):
    with pytest.raises(UserError, match=f"{option} must be above 0 and finite, not 0"):
        command.parse([option, "0"])
    assert set(command.SHAPES) == benchmark.PAPER.keys() and set(command.MODELS) == benchmark.MODELS.keys()


def test_times_and_folders_that_cannot_be(tmp_path, command):
    for value in ("nan", "inf"):
        with pytest.raises(UserError, match=f"--seconds must be above 0 and finite, not {value}"):
            command.parse(["--seconds", value])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output .*file cannot be used"):
        command.main(["--shapes", "vision", "--output", str(tmp_path / "file")])
