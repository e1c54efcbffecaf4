"""Which projections and activations can be copied, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.support.small_models import HIDDEN, WIDTH, B, K, build
from unifmoe_dist import upcycle
from unifmoe_dist.errors import UserError
from unifmoe_dist.upcycling import moe_layers
from unifmoe_dist.upcycling.dense_ffn import activation_name


class _Packed(nn.Linear):
    """As quantisers keep weights: two numbers in a byte."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HIDDEN)
        self.weight = nn.Parameter(torch.zeros(WIDTH * HIDDEN // 2, 1, dtype=torch.uint8), requires_grad=False)


class _Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class _WithAdapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_layer, self.weight = nn.Linear(WIDTH, HIDDEN), nn.Parameter(torch.zeros(HIDDEN, WIDTH))


def _patched() -> nn.Linear:
    linear = nn.Linear(WIDTH, HIDDEN)
    linear.forward = lambda x: nn.functional.linear(x, linear.weight)
    return linear


_WithAdapter.__name__ = _WithAdapter.__qualname__ = "Linear"


@pytest.mark.parametrize(
    "projection,words",
    [
        (lambda: nn.Bilinear(WIDTH, WIDTH, HIDDEN), "linear.Bilinear, where upcycling needs torch.nn.Linear"),
        (_WithAdapter, r"test_projections.Linear, which carries an adapter; merge .*merge_and_unload"),
        (_Packed, r"_Packed, whose weights are quantised \(Parameter of uint8\); load .* without quantisation"),
        (_Scaled, "_Scaled, which computes more than a linear map in a forward of its own"),
        (_patched, "linear.Linear, which computes more than a linear map in a forward of its own"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, HIDDEN)), "weight is computed from other"),
        (lambda: prune.l1_unstructured(nn.Linear(WIDTH, HIDDEN), "weight", 3), "weight is computed from other"),
    ],
    ids=["other", "adapter", "packed", "forward", "patched", "weight-norm", "pruned"],
)
def test_projections_that_are_no_plain_linear_maps(projection: Callable[[], nn.Module], words: str):
    """Each is refused by name; copied, it would be wrong without a word."""
    model = build("bert")
    model.bert.encoder.layer[1].intermediate.dense = projection()
    with pytest.raises(UserError, match=r"^bert.encoder.layer.1.intermediate.dense is a .*" + words):
        upcycle(model, [1], K, B)
    assert not moe_layers(model)


@pytest.mark.parametrize(
    "name", ["gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "silu", "swish", "tanh"]
)
def test_activations_compute_what_their_names_say(name: str):
    module = transformers.activations.ACT2FN[name]
    model = build("bert", hidden_act=name)
    upcycle(model, [0], K, B)
    (layer,) = moe_layers(model).values()
    assert layer.config.activation == activation_name(module)
    x = torch.linspace(-3, 3, 50)
    known = {
        "gelu": nn.GELU(),
        "gelu_tanh": nn.GELU(approximate="tanh"),
        "relu": nn.ReLU(),
        "silu": nn.SiLU(),
        "tanh": nn.Tanh(),
        "relu_squared": lambda x: x.relu().square(),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    }
    torch.testing.assert_close(module(x), known[activation_name(module)](x), rtol=1e-5, atol=1e-6)


def test_a_vision_transformer_may_have_narrow_ffns():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=2, num_heads=2, mlp_ratio=0.5)
    up = model.blocks[0].mlp.fc1.weight
    upcycle(model, [0], K, B)
    assert torch.equal(model.blocks[0].mlp.ffn_weights(0)[0], up)


def test_ffn_without_bias():
    model = build("timm")
    for block in model.blocks:
        block.mlp.fc1 = nn.Linear(WIDTH, HIDDEN, bias=False)
    up, down = model.blocks[0].mlp.fc1, model.blocks[0].mlp.fc2
    upcycle(model, [0], K, B)
    got = model.blocks[0].mlp.ffn_weights(0)
    assert torch.equal(got[0], up.weight) and torch.equal(got[3], down.bias) and not got[1].any()
