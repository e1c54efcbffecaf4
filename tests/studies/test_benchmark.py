"""The benchmark measures what it says it does; how fast anything is, no test asserts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.support.benchmarks import CPU, SMALL
from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.studies.benchmark import benchmark_results as results_of
from unifmoe_dist.studies.benchmark import layers_and_models as benchmark
from unifmoe_dist.studies.benchmark.layers_and_models import dense_ffn
from unifmoe_dist.studies.benchmark.peers import reason
from unifmoe_dist.studies.meters import kept_for_backward


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


# -- whole models, sweeps -------------------------------------------------------------------------------------------


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
