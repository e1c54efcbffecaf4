"""FFNs that are found, named or taught by an adapter; models of which none can become experts, with the reason."""

from __future__ import annotations

import logging
import warnings

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

import unifmoe_dist
from tests.support.families import FAMILIES
from tests.support.small_models import WIDTH, B, K, moved
from unifmoe_dist import UniFMoELayer, upcycle
from unifmoe_dist.errors import UserError
from unifmoe_dist.upcycling import ADAPTERS, DenseFFN, moe_layers
from unifmoe_dist.upcycling.families import find_adapter

SMALL = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def tiny(title: str, part: str = "") -> nn.Module:
    return next(family for family in FAMILIES if family.title == title and family.part in ("", part)).build()


class Narrow(nn.Module):
    """A bottleneck, which is not taken for an FFN unless it is named."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.act, self.expand = nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.expand(self.act(self.squeeze(x)))


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Narrow(), Narrow()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(x + self.first(x))


NAMES = ("squeeze", "act", "expand")


def test_ffns_are_named():
    model = Own()
    with pytest.raises(UserError, match=r"Own cannot be upcycled: no stack .* name its parts with ffns="):
        upcycle(model, [0], K, B)
    kept = model.first.squeeze.weight
    upcycle(model, None, K, B, ffns={"first": NAMES, "second": ("squeeze", "relu", "expand")})
    assert list(moe_layers(model)) == ["first", "second"]
    assert torch.equal(model.first.ffn_weights("shared")[0], kept) and model.second.config.activation == "relu"
    assert model(torch.randn(2, 5, WIDTH)).shape == (2, 5, WIDTH)
    model = upcycle(Own(), [1], K, B, ffns={"first": NAMES, "second": NAMES})  # layers counts what is named
    assert list(moe_layers(model)) == ["second"]


@pytest.mark.parametrize(
    ("ffns", "words"),
    [
        ({"third": NAMES}, "ffns names 'third', which Own does not have"),
        ({"first": ("squeeze", "expand")}, r"ffns\['first'\] is .*; give .*\"up\", \"act\", \"down\""),
        ({"first": ("fc1", "act", "fc2")}, "first.fc1 is absent, .* first has squeeze, act, expand"),
        ({"first": ("act", "act", "expand")}, "first.act is a ReLU, where a linear projection was expected"),
        ({"first": ("squeeze", "silu", "expand")}, "first, a Narrow, computes something else"),
        ({"first": ("expand", "act", "squeeze")}, "first, a Narrow, cannot be called with tokens alone"),
        ({"first": ("squeeze", "swoosh", "expand")}, "activation .* is not supported"),
        ({"first": ("squeeze", "swoosh", "expand")}, "activation swoosh is not supported: it is no part of a Narrow"),
        ({"first": ("squeeze", "act", "expand", "expand")}, r"first has squeeze \(32, 16\), expand .* fit no FFN"),
        ({"first": None}, "ffns.* is None; give the names"),
        (["first"], "ffns is .* as in"),
    ],
)
def test_names_that_do_not_fit(ffns, words: str):
    model = Own()
    with pytest.raises(UserError, match=words):
        upcycle(model, None, K, B, ffns=ffns)
    assert not moe_layers(model)


def test_an_ffn_in_two_places_is_refused():
    model = Own()
    model.second = model.first
    with pytest.raises(UserError, match="first is in several places of the model"):
        upcycle(model, None, K, B, ffns={"first": NAMES})


def test_without_layers_and_names_the_layers_are_counted():
    with pytest.raises(UserError, match=r"layers is not given; name those to upcycle, of 0 to 1"):
        upcycle(tiny("Llama"))


def test_named_ffns_reload(tmp_path):
    model = tiny("Llama")
    names = ("gate_proj", "act_fn", "up_proj", "down_proj")
    upcycle(model, None, K, B, ffns={"model.layers.1.mlp": names})
    moved(model).save_pretrained(tmp_path)
    ids = torch.randint(3, 50, (2, 6))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(again(input_ids=ids).logits, expected)
    assert list(moe_layers(again)) == ["model.layers.1.mlp"]
    assert list(moe_layers(transformers.AutoModel.from_pretrained(tmp_path))) == ["layers.1.mlp"]  # the body alone
    upcycle(again, [0], 2, B).save_pretrained(tmp_path / "more")
    twice = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "more")
    assert [layer.config.num_experts for layer in moe_layers(twice).values()] == [2, K]


class OwnAdapter:
    """As an adapter is written in docs/upcycling.md."""

    name = "two narrow FFNs"

    def matches(self, model):
        return isinstance(model, Own)

    def blocks(self, model):
        return [model.first, model.second]

    def read(self, block):
        return DenseFFN.of(block.squeeze, block.act, block.expand)

    def install(self, block, layer):
        block.squeeze, block.act, block.expand = layer, nn.Identity(), nn.Identity()


class Beside(nn.Module):
    """An FFN whose parts lie beside attention, its activation a function."""

    def __init__(self, functional: bool, normed: bool = False) -> None:
        super().__init__()
        self.self_attention = OwnAttention()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        if not functional:
            self.act = torch.relu
        if normed:
            self.norm = nn.LayerNorm(64)
        self.functional = functional

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.self_attention(x))
        return self.down(torch.relu(hidden) if self.functional else self.act(hidden))


class OwnAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_parts_beside_attention_are_replaced_one_by_one():
    model = nn.Sequential(Beside(False))
    upcycle(model, None, K, B, ffns={"0": ("up", "act", "down")})
    assert list(moe_layers(model)) == ["0.up"] and isinstance(model[0].act, nn.Identity)
    x = torch.randn(2, 5, WIDTH)
    torch.testing.assert_close(model(x), model[0].up(x))
    model = nn.Sequential(Beside(True))
    with pytest.raises(UserError, match="0, a Beside, holds attention beside its FFN, and the activation is part of"):
        upcycle(model, None, K, B, ffns={"0": ("up", "relu", "down")})
    assert isinstance(model[0].up, nn.Linear)
    with pytest.raises(UserError, match="and a norm of hidden channels, which blocks cannot have"):
        upcycle(nn.Sequential(Beside(False, normed=True)), None, K, B, ffns={"0": ("up", "act", "down")})


class OwnHead(transformers.LlamaPreTrainedModel):
    def __init__(self, config) -> None:
        super().__init__(config)
        self.model, self.score = transformers.LlamaModel(config), nn.Linear(WIDTH, 3)
        self.post_init()


class OwnBody(transformers.BertPreTrainedModel):
    def __init__(self, config) -> None:
        super().__init__(config)
        self.body = transformers.BertModel(config)
        self.post_init()


def test_a_head_of_ones_own_on_a_found_body_reloads(tmp_path):
    model = moved(upcycle(OwnHead(tiny("Llama").config), [1], K, B))
    model.save_pretrained(tmp_path)
    again = OwnHead.from_pretrained(tmp_path)
    assert list(moe_layers(again)) == ["model.layers.1.mlp"]
    ids = torch.randint(3, 50, (2, 6))
    with torch.no_grad():
        torch.testing.assert_close(again.model(ids)[0], model.model(ids)[0])
    with pytest.raises(UserError, match="OwnBody wraps a BertModel, its .body; upcycle that one"):
        upcycle(OwnBody(tiny("BERT").config), [1], K, B)


def test_an_adapter_is_registered():
    before = list(ADAPTERS)
    with pytest.raises(UserError, match="Own has no name; an adapter has what"):
        unifmoe_dist.register_adapter(Own())
    try:
        unifmoe_dist.register_adapter(OwnAdapter())
        model = upcycle(Own(), [-1], K, B)
        assert list(moe_layers(model)) == ["second.squeeze"] and find_adapter(model).name == "two narrow FFNs"
    finally:
        ADAPTERS[:] = before


def test_what_is_found_is_logged(caplog):
    with caplog.at_level(logging.INFO, "unifmoe_dist"):
        upcycle(tiny("Phi3"), [1], K, B)
    assert "model.layers.1.mlp: an FFN of gate_up_proj, down_proj (gated, silu)" in caplog.text


def moe(name: str) -> nn.Module:
    options = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 32, "vocab_size": 50}
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SMALL, **options))


def vit(**options) -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=WIDTH, num_heads=2, **options)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            lambda: transformers.AlbertModel(transformers.AlbertConfig(**SMALL, vocab_size=50, embedding_size=16)),
            r"AlbertModel cannot be upcycled: all its layers share one FFN, .*\(encoder, of class AlbertTransformer\)",
        ),
        (lambda: moe("Mixtral"), r"already is a mixture of experts \(model.layers.0.\w+, of class Mixtral"),
        (lambda: moe("Qwen3Moe"), "already is a mixture of experts .*Qwen3MoeSparseMoeBlock"),
        (lambda: vit(block_fn=timm.models.vision_transformer.ParallelScalingBlock), "are one fused projection"),
        (lambda: vit(block_fn=timm.models.vision_transformer.ParallelThingsBlock), "several FFNs side by side"),
        (
            lambda: timm.create_model("convnext_tiny", depths=(1, 1, 1, 1), dims=(8, 8, 8, 8), conv_mlp=True),
            "FFNs are convolutions, as stages.0.blocks.0.mlp",
        ),
        (lambda: tiny("T5", "encoder"), r"several stacks of layers, in encoder and decoder; .* upcycle\(model.encoder"),
        (lambda: tiny("BART", "model.encoder"), "in model.encoder and model.decoder"),
        (lambda: tiny("CLIP", "text_model"), r"in text_model.encoder and vision_model.encoder|in text_model"),
        (lambda: nn.DataParallel(tiny("EVA")), "DataParallel wraps a Eva, its .module"),
        (lambda: nn.DataParallel(tiny("Llama")), "DataParallel wraps a LlamaForCausalLM, its .module"),
        (lambda: torch.compile(tiny("Llama")), "OptimizedModule wraps a LlamaForCausalLM, its ._orig_mod"),
    ],
    ids=lambda value: None if callable(value) else value[:30],
)
def test_models_that_cannot_be_upcycled(model, words: str):
    model = model()
    with pytest.raises(UserError, match=words):
        upcycle(model, [0], K, B)
    assert not moe_layers(model)


def test_eva_02_with_a_norm_inside_is_refused():
    model = timm.create_model("eva02_base_patch14_224", img_size=28, embed_dim=WIDTH, depth=2, num_heads=2)
    with pytest.raises(UserError, match=r"blocks.0.mlp, a SwiGLU, .* cannot have its norm \(LayerNorm\)"):
        upcycle(model, [0], K, B)


def bart(**options) -> nn.Module:
    sizes = {"d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "vocab_size": 50}
    return transformers.BartModel(transformers.BartConfig(**sizes, encoder_attention_heads=2, **options))


class Dropping(Narrow):
    """Drops hidden channels by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.25

    def forward(self, x: Tensor) -> Tensor:
        return self.expand(nn.functional.dropout(self.act(self.squeeze(x)), self.dropout, self.training))


def test_dropout_by_a_function_is_told():
    with pytest.warns(UserWarning, match="Dropout 0.25 on the hidden channels of 0 is left out"):
        upcycle(nn.Sequential(Dropping()), None, K, B, ffns={"0": NAMES})


def test_dropout_on_the_output_is_kept_and_on_hidden_channels_is_the_layers():
    gpt2 = transformers.GPT2Model(transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_inner=64, resid_pdrop=0.3))
    starcoder = transformers.Starcoder2Model(transformers.Starcoder2Config(**SMALL, residual_dropout=0.3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in (gpt2, starcoder):
            place = next(iter(moe_layers(upcycle(model, [1], K, B))))
            layer, dropout = model.get_submodule(place.rpartition(".")[0])
            assert isinstance(layer, UniFMoELayer) and isinstance(dropout, nn.Dropout) and dropout.p == 0.3
        upcycle(bart(activation_dropout=0.2).encoder, [0], K, B, hidden_dropout=0.2)
    with pytest.warns(UserWarning, match=r"Dropout 0.2 on the hidden channels of layers.0 .* give hidden_dropout=0.2"):
        model = upcycle(bart(activation_dropout=0.2).encoder, [0], K, B)
    assert model.layers[0].activation_dropout == 0.0 and isinstance(model.layers[0].fc2, nn.Identity)
    t5 = transformers.T5Config(d_model=WIDTH, d_ff=64, num_layers=1, num_heads=2, vocab_size=50, dropout_rate=0.1)
    with pytest.warns(UserWarning, match="Dropout 0.1 on the hidden channels of .*DenseReluDense"):
        upcycle(transformers.T5EncoderModel(t5), [0], K, B)
