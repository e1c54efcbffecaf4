"""int8 experts by torchao: the layer computes with what the weights then are, and what cannot work says so."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.support.small_models import B, K, build, inputs, logits, moved
from unifmoe_dist import UniFMoEConfig, UniFMoELayer, upcycle
from unifmoe_dist.errors import UserError
from unifmoe_dist.kernels import use_kernels
from unifmoe_dist.upcycling import moe_layers

torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
INT8 = torchao.FqnToConfig({r"re:.*(experts|shared)\.(keys|values|gate_keys)": torchao.Int8WeightOnlyConfig()})


def quantised(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    torchao.quantize_(model, INT8, filter_fn=None)
    return model


def like(layer: UniFMoELayer, weights: UniFMoELayer) -> UniFMoELayer:
    """The layer with the expert weights of another, in float."""
    layer = copy.deepcopy(layer)
    for expert in ("shared", *range(layer.config.num_experts)):
        layer.load_ffn(expert, *weights.ffn_weights(expert))
    return layer


def file_size(module: nn.Module) -> int:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    return file.tell()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tokens", [5, 200])  # the compiled path of few tokens, and that of many
def test_int8_experts_compute_as_their_weights_say(tokens, gated):
    torch.manual_seed(0)
    config = UniFMoEConfig(64, 128, num_experts=4, num_blocks=8, activation="silu" if gated else "gelu", gated=gated)
    layer = moved(UniFMoELayer(config)).eval()
    int8, x = quantised(layer), torch.randn(tokens, 64)
    exact = like(layer, int8)
    for kernels in ("auto", "grouped", "reference"):
        with use_kernels(kernels):
            one, other = (x.clone().requires_grad_() for _ in range(2))
            torch.testing.assert_close(int8(one), exact(other))
            int8(one).square().sum().backward()
            exact(other).square().sum().backward()
            torch.testing.assert_close(one.grad, other.grad)
            with torch.no_grad():
                torch.testing.assert_close(int8(x), exact(x))
    compiled = torch.compile(int8, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), exact(x))
    assert file_size(int8) < 0.4 * file_size(layer)


@torch.no_grad()
def test_the_error_of_int8_is_that_of_rounding():
    """Each weight is off by half a step of its channel at most, and so outputs by a hundredth where blocks stay."""
    torch.manual_seed(0)
    layer = moved(UniFMoELayer(UniFMoEConfig(64, 256, num_experts=4, num_blocks=8))).eval()
    int8, x = quantised(layer), torch.randn(500, 64)
    for expert in ("shared", 0, 3):
        up, _, down, _ = layer.ffn_weights(expert)
        got_up, _, got_down, _ = int8.ffn_weights(expert)
        for weight, got in ((up, got_up), (down.T, got_down.T)):
            step = weight.abs().amax(dim=1, keepdim=True) / 127
            assert ((weight - got).abs() <= 0.51 * step).all() and not torch.equal(weight, got)
    same = (layer.route(x).shared_blocks == int8.route(x).shared_blocks).all(dim=1)
    assert same.float().mean() > 0.9  # the others were nearly ties
    want, got = layer(x)[same], int8(x)[same]
    assert float((got - want).norm() / want.norm()) < 0.01


def test_what_cannot_be_done_with_quantised_weights_says_so(tmp_path):
    dense = build("bert")
    torchao.quantize_(dense, torchao.Int8WeightOnlyConfig())
    with pytest.raises(UserError, match=r"layer.0.intermediate.dense is a .* are quantised \(\w+Tensor of float32\)"):
        upcycle(dense, [0], K, B)
    model = quantised(upcycle(build("bert"), [0], K, B))
    (layer,) = moe_layers(model).values()
    with pytest.raises(UserError, match="load_ffn cannot write into experts that are quantised; load weights before"):
        layer.load_ffn(0, *layer.ffn_weights(1))
    with pytest.raises(
        UserError, match=r"cannot write the quantised experts of bert\S+; save the model before quantize_"
    ):
        model.save_pretrained(tmp_path)


@pytest.mark.skipif(transformers.__version__ < "5", reason="Transformers 4 quantises linear maps alone")
@torch.no_grad()
def test_transformers_quantises_while_loading(tmp_path):
    model, batch = moved(upcycle(build("bert"), [0, 2], K, B)), inputs("bert")
    model.save_pretrained(tmp_path / "float")
    expected = logits(quantised(model), batch)
    config = transformers.TorchAoConfig(INT8)
    loaded = type(model).from_pretrained(tmp_path / "float", quantization_config=config)
    torch.testing.assert_close(logits(loaded, batch), expected)
    loaded.save_pretrained(tmp_path / "int8")
    again = type(model).from_pretrained(tmp_path / "int8")
    keys: Tensor = next(iter(moe_layers(again).values())).experts.keys
    assert type(keys).__name__ == "Int8Tensor"
    torch.testing.assert_close(logits(again, batch), expected)
