"""Upcycled models compile as one graph, with the outputs and gradients of eager mode."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.small_models import B, K, assert_same, build, gradients, inputs, logits, moved
from unifmoe_dist import upcycle
from unifmoe_dist.upcycling import moe_layers

SIZES = {"img_size": 32, "num_classes": 5, "embed_dim": 32, "depth": 3, "num_heads": 2}


def llama() -> nn.Module:
    """Gated; its mask is padded on the left in `batch_of`."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=50, use_cache=False))


MAKE = {
    "timm": lambda: build("timm"),
    "timm, gated": lambda: timm.create_model("vit_tiny_patch16_224", mlp_layer=timm.layers.SwiGLUPacked, **SIZES),
    "bert": lambda: build("bert"),
    "llama": llama,
}


@pytest.mark.parametrize(
    "kind", ["timm", "llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("timm, gated", "bert"))]
)
def test_a_whole_model_is_one_graph(kind):
    torch.manual_seed(0)
    model = moved(upcycle(MAKE[kind](), [0, 2], K, B, router_seed=1))
    batch = inputs("bert" if kind == "llama" else kind.partition(",")[0])
    if kind == "llama":
        batch = {name: tensor.flip(1) for name, tensor in batch.items()}
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for training in (False, True):
        model.train(training)
        found = []
        for run in (model, compiled):
            model.zero_grad()
            output = logits(run, batch)
            output.square().mean().backward()
            found.append((output.detach(), gradients(model)))
        torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-5)
        assert_same(found[1][1], found[0][1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", ["topk", "gmoe", "emoe"])  # the others change between steps
def test_layers_of_other_methods_are_one_graph_and_count(method):
    torch.manual_seed(0)
    ffn = nn.ModuleDict({"up": nn.Linear(16, 32), "act": nn.GELU(), "down": nn.Linear(32, 16)})
    ffn.forward = lambda x: ffn["down"](ffn["act"](ffn["up"](x)))
    model = nn.Sequential(ffn)
    model = moved(upcycle(model, num_experts=4, num_blocks=4, method=method, ffns={"0": ("up", "act", "down")}))
    (layer,) = moe_layers(model).values()
    torch._dynamo.reset()
    compiled, x, found = torch.compile(model, fullgraph=True, backend="aot_eager"), torch.randn(7, 16), []
    for run in (model, compiled):
        layer.usage.reset()
        model.zero_grad()
        torch.manual_seed(1)  # noise of gates
        output = run(x)
        output.square().mean().backward()
        found.append((output.detach(), layer.usage.snapshot(), gradients(model)))
    assert found[1][1][0] == 7
    torch.testing.assert_close(found[1][:2], found[0][:2])
    assert_same(found[1][2], found[0][2], rtol=1e-3, atol=1e-5)
