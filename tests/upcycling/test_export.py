"""Upcycled models for other runtimes: ONNX on onnxruntime, torch.export; AOTInductor is in examples/export.py."""

from __future__ import annotations

import copy

import onnxruntime
import pytest
import timm
import torch
from torch import Tensor, nn

from tests.support.layers import make_layer
from tests.support.small_models import DEPTH, WIDTH, B, K, build, inputs, moved
from unifmoe_dist import upcycle
from unifmoe_dist.upcycling import moe_layers

ANY = torch.export.Dim.DYNAMIC


def upcycled(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "gated":
        sizes = {"embed_dim": WIDTH, "depth": DEPTH, "num_heads": 2, "img_size": 32, "num_classes": 5}
        dense = timm.create_model("vit_tiny_patch16_224", mlp_layer=timm.layers.SwiGLUPacked, **sizes)
    else:
        dense = build(kind)
    model = moved(upcycle(dense, [0, 2], K, B, router_seed=1)).eval().requires_grad_(False)
    if kind == "bert":
        model.config.return_dict = False  # exporters want tensors
    assert {layer.config.gated for layer in moe_layers(model).values()} == {kind == "gated"}
    return model


def batch_of(kind: str, size: int) -> tuple[Tensor, ...]:
    torch.manual_seed(size)
    return tuple(torch.cat([tensor] * 3)[:size] for tensor in inputs("timm" if kind == "gated" else kind).values())


def on_onnxruntime(model: nn.Module, batch: tuple[Tensor, ...]):
    """The model as a function on onnxruntime, of any first size."""
    shapes = tuple({0: ANY} for _ in batch)
    program = torch.onnx.export(model, batch, dynamo=True, verbose=False, dynamic_shapes=shapes)
    assert not {node.domain for node in program.model_proto.graph.node} & {"unifmoe"}
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    names = [given.name for given in session.get_inputs()]

    def run(*batch: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, dict(zip(names, (t.numpy() for t in batch), strict=True)))[0])

    return run


@pytest.mark.parametrize("kind", ["gated", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("timm", "bert"))])
def test_onnx_gives_what_the_model_gives(kind):
    """With padded tokens too, and for batches of other sizes than the one that was traced."""
    model = upcycled(kind)
    run = on_onnxruntime(model, batch_of(kind, 3))
    for size in (3, 1, 7):
        batch = batch_of(kind, size)
        want = model(*batch)
        torch.testing.assert_close(run(*batch), want if isinstance(want, Tensor) else want[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["topk", "mass"])
def test_layers_of_other_methods_in_onnx(method):
    torch.manual_seed(0)
    model = moved(upcycle(build("timm"), [1], K, B, method=method)).eval().requires_grad_(False)
    batch = batch_of("timm", 5)
    torch.testing.assert_close(on_onnxruntime(model, batch_of("timm", 3))(*batch), model(*batch), rtol=1e-4, atol=1e-5)


def test_ties_go_to_the_lower_index_in_onnx():
    """A token of zeros likes all blocks and experts equally; more of either than a small sort keeps in order."""
    layer = make_layer(40, 48, experts=33, blocks=24, spread=3.0).eval().requires_grad_(False)
    x = torch.randn(5, 40)
    run = on_onnxruntime(layer, (x,))
    x[2:] = 0
    routing = layer.route(x)
    assert 1 < routing.expert_count[4] < 33 and 1 < routing.shared_block_count[4] < 24
    assert (routing.gates[4] != 0).long().diff().max() <= 0 and routing.shared_blocks[4].long().diff().max() <= 0
    torch.testing.assert_close(run(x), layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strict", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_model_that_was_exported_is_as_before(strict):
    """It counts no token while it is traced and keeps no tensor without values, and saving takes the program."""
    model, batch = upcycled("timm"), batch_of("timm", 3)
    program = torch.export.export(model, batch, dynamic_shapes=({0: ANY},), strict=strict)
    assert all(layer.usage.totals is None for layer in moe_layers(model).values())
    other = batch_of("timm", 5)
    want = copy.deepcopy(model)(*other)
    torch.testing.assert_close(program.module()(*other), want)
    assert str(program.graph).count("unifmoe.block_ffn") == 2 and "count" not in str(program.graph)
    with torch.no_grad():
        torch.testing.assert_close(copy.deepcopy(program).run_decompositions().module()(*other), want)
