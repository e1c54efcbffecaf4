"""Upcycling: exact copies, masks, and everything an upcycled model must still be able to do."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from collections.abc import Callable

import pytest
import timm
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.support.ranks import run_ranks
from unifmoe_dist import UniFMoELayer, upcycle
from unifmoe_dist.errors import UserError
from unifmoe_dist.upcycling import moe_layers
from unifmoe_dist.upcycling.activations import activation_name
from unifmoe_dist.upcycling.token_mask import token_mask_from_attention

K, B, WIDTH, HIDDEN, DEPTH = 3, 4, 32, 64, 3
TEXT = {
    "bert": "Bert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
    "electra": "Electra",
    "distilbert": "DistilBert",
}
VISION = {"vit": "ViT", "deit": "DeiT"}
FAMILIES = ["timm", "timm-distilled", *TEXT, *VISION]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def build(family: str, **options) -> nn.Module:
    """A tiny model with a classification head, random weights, no dropout unless asked for."""
    if family.startswith("timm"):
        name = "deit_tiny_distilled_patch16_224" if family == "timm-distilled" else "vit_tiny_patch16_224"
        sizes = {"embed_dim": WIDTH, "depth": DEPTH, "num_heads": 2, "mlp_ratio": HIDDEN / WIDTH}
        return timm.create_model(name, img_size=32, num_classes=5, **sizes, **options).eval()
    sizes = {
        "hidden_size": WIDTH,
        "num_hidden_layers": DEPTH,
        "num_attention_heads": 2,
        "num_labels": 5,
        "intermediate_size": HIDDEN,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    if family == "distilbert":
        sizes = {
            "dim": WIDTH,
            "n_layers": DEPTH,
            "n_heads": 2,
            "hidden_dim": HIDDEN,
            "num_labels": 5,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "seq_classif_dropout": 0.0,
        }
    if family in TEXT:
        sizes |= {"vocab_size": 50, "max_position_embeddings": 40, "initializer_range": 0.3}
        name = TEXT[family]
        head = "ForSequenceClassification"
    else:
        sizes |= {"image_size": 32, "patch_size": 16, "initializer_range": 0.3}
        name = VISION[family]
        head = "ForImageClassification"
    config = getattr(transformers, f"{name}Config")(**sizes | options)
    return getattr(transformers, f"{name}{head}")(config).eval()


def inputs(family: str, padded: bool = True) -> dict[str, Tensor]:
    """A batch; for language, the second sentence has 4 of 9 tokens."""
    if family in TEXT:
        mask = torch.ones(3, 9, dtype=torch.long)
        if padded:
            mask[1, 4:] = 0
        return {"input_ids": torch.randint(3, 50, (3, 9)), "attention_mask": mask}
    return {"x" if family.startswith("timm") else "pixel_values": torch.randn(3, 3, 32, 32)}


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch)
    return output if isinstance(output, Tensor) else output.logits


def dense_ffns(model: nn.Module) -> list[tuple[nn.Linear, nn.Linear]]:
    """The FFNs' linear maps (up, down) in order of depth, found by shape."""
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    ups = [m for m in linears if m.out_features == HIDDEN]
    downs = [m for m in linears if m.in_features == HIDDEN]
    return list(zip(ups, downs, strict=True))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor], **tolerance: float) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], msg=lambda m, name=name: f"{name}: {m}", **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_expert_is_an_exact_copy(family: str, dtype: torch.dtype):
    model = build(family).to(dtype).train()
    dense = copy.deepcopy(model)
    assert upcycle(model, [0, -1], num_experts=K, num_blocks=B) is model
    layers = list(moe_layers(model).values())
    assert len(layers) == 2
    for layer, (up, down) in zip(layers, [dense_ffns(dense)[0], dense_ffns(dense)[2]], strict=True):
        assert layer.training
        for expert in ("shared", *range(K)):
            expected = (up.weight, up.bias, down.weight, down.bias)
            for got, want in zip(layer.ffn_weights(expert), expected, strict=True):
                assert got.dtype == want.dtype and torch.equal(got, want)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert all(p.requires_grad for p in model.parameters())
    batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs(family).items()}
    loss = logits(model, batch).float().square().mean()
    loss.backward()
    assert loss.isfinite() and layers[0].router.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("family", ["timm", "bert", "distilbert", "vit"])
def test_blocks_sum_to_the_dense_ffn(family: str):
    """With all coefficients summing to one dense FFN, the whole model's output is the dense one."""
    model = build(family)
    batch = inputs(family, padded=False)
    dense = logits(model, batch)
    upcycle(model, [0, 1, 2], num_experts=K, num_blocks=B)
    for layer in moe_layers(model).values():
        layer.forward = lambda x, token_mask=None, layer=layer: sum_of_blocks(layer, x)
    torch.testing.assert_close(logits(model, batch), dense, rtol=1e-4, atol=1e-5)


def sum_of_blocks(layer: UniFMoELayer, x: Tensor) -> Tensor:
    """Blocks 0..B-1 of the shared and the residual experts in turn, plus one down bias."""
    output, size = 0, HIDDEN // B
    for block in range(B):
        up, up_bias, down, down_bias = layer.ffn_weights("shared" if block == 0 else block % K)
        channels = slice(block * size, (block + 1) * size)
        hidden = nn.functional.gelu(nn.functional.linear(x, up[channels], up_bias[channels]))
        output = output + hidden @ down[:, channels].T
    return output + down_bias


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", TEXT)
def test_padding_reaches_the_layer_and_changes_nothing(family: str, attention: str):
    try:
        model = build(family, attn_implementation=attention)
    except ValueError:
        pytest.skip(f"this Transformers has no {attention} attention for {family}")  # ELECTRA before version 5
    upcycle(model, [0, 2], K, B)
    seen: list[Tensor] = []
    for layer in moe_layers(model).values():
        layer.register_forward_hook(lambda module, args, output: seen.append(output))
    batch = inputs(family)
    batched = logits(model, batch)
    real = batch["attention_mask"].bool()
    assert len(seen) == 2
    for output in seen:
        assert (output[~real] == 0).all() and (output[real].abs().sum(-1) > 0).all()
    short = {name: value[1:2, :4] for name, value in batch.items()}
    torch.testing.assert_close(batched[1:2], logits(model, short), rtol=1e-4, atol=1e-5)
    full = inputs(family, padded=False)  # without padding right after: nothing of the old mask is left
    seen.clear()
    logits(model, {"input_ids": full["input_ids"]})
    assert all((output.abs().sum(-1) > 0).all() for output in seen)
    assert seen[0].shape == (3, 9, WIDTH)


def test_forms_of_attention_masks():
    real = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    square = real[:, None, None, :].expand(2, 1, 3, 3)
    additive = torch.zeros(2, 1, 3, 3).masked_fill(~square, torch.finfo(torch.float32).min)
    causal = square & torch.ones(3, 3).tril().bool()
    half = torch.zeros(2, 2, 3, 3, dtype=torch.float16).masked_fill(~square, float("-inf"))
    least = [torch.where(square, 0.25, value) for value in (-10000.0, -1e9)]  # BERT's own, and what is often used
    biased = additive + torch.linspace(-200, 0, 9).view(3, 3)
    for mask in (
        real,
        real.long(),
        real.float(),
        square,
        square[:, 0],
        additive,
        causal,
        half,
        *least,
        least[0].bfloat16(),
        biased,
    ):
        assert torch.equal(token_mask_from_attention(mask, 2, 3), real)
    assert torch.equal(token_mask_from_attention(square[1:], 2, 3), real[1:].expand(2, 3))
    assert token_mask_from_attention(None, 2, 3) is None
    assert token_mask_from_attention(square, 2, 1) is None  # keys from a cache beside the tokens
    from torch.nn.attention.flex_attention import create_block_mask

    flex = create_block_mask(lambda b, h, q, kv: real[b, kv], 2, None, 3, 3, device="cpu", BLOCK_SIZE=128)
    assert torch.equal(token_mask_from_attention(flex, 2, 3), real)


def test_decoding_with_a_cache_equals_decoding_without():
    """With a cache, keys outnumber tokens: nothing may be taken for padding by its place."""
    config = build("bert", is_decoder=True).config
    model = upcycle(transformers.BertLMHeadModel(config).eval(), [0, 1], K, B)
    ids, mask = torch.randint(3, 50, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(ids, **options, use_cache=True, eos_token_id=None)
    assert torch.equal(cached, model.generate(ids, **options, use_cache=False, eos_token_id=None))


def test_ffn_chunking_does_not_upset_the_mask():
    for family in ("bert", "distilbert"):
        chunked = upcycle(build(family, chunk_size_feed_forward=3), [1], K, B, router_seed=1)
        whole = upcycle(build(family), [1], K, B, router_seed=1)
        whole.load_state_dict(chunked.state_dict())
        batch = inputs(family)
        torch.testing.assert_close(logits(chunked, batch), logits(whole, batch))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["timm", "bert", "distilbert", "vit"])
def test_gradient_checkpointing_recomputes_with_its_own_mask(family: str, reentrant: bool):
    model = upcycle(build(family), [0, 2], K, B).train()
    first, second = inputs(family), inputs(family, padded=False)

    def step() -> dict[str, Tensor]:
        model.zero_grad()
        loss = logits(model, first).square().sum()
        other = logits(model, second)  # another forward, with another mask, before the backward
        (loss + other.sum()).backward()
        counted.append([layer.usage.snapshot() for layer in moe_layers(model).values()])
        for layer in moe_layers(model).values():
            layer.usage.reset()
        return gradients(model)

    counted: list[list[Tensor]] = []
    plain = step()
    if family == "timm":
        model.set_grad_checkpointing()
    else:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads() if family in TEXT else pytest.skip("pixels carry no gradient")
    assert_same(plain, step())
    torch.testing.assert_close(counted[1], counted[0])  # what the backward pass repeats is not counted again


@pytest.mark.parametrize("family", ["bert", "timm"])
def test_deepcopy_and_torch_save(family: str, tmp_path):
    model = upcycle(build(family), [0, 2], K, B)
    batch = inputs(family)
    expected = logits(model, batch)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    copied = copy.deepcopy(model)
    for twin in (loaded, copied):
        assert torch.equal(logits(twin, batch), expected)
        own = {id(p) for p in twin.parameters()}
        assert not own & {id(p) for p in model.parameters()}
    with torch.no_grad():  # a twin's mask goes to the twin's layers, whatever becomes of the original
        for p in model.parameters():
            p.fill_(float("nan"))
    del model
    assert torch.equal(logits(copied, batch), expected)
    if family == "bert":
        for twin in (loaded, copied):
            seen: list[Tensor] = []
            for layer in moe_layers(twin).values():
                layer.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output))
            logits(twin, batch)
            assert all((output[1, 4:] == 0).all() for output in seen) and len(seen) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_state_dict_fits_a_newly_upcycled_model(family: str):
    model = upcycle(build(family), [0, 2], K, B)
    torch.manual_seed(5)
    other = upcycle(build(family), [0, 2], K, B)
    batch = inputs(family)
    assert not torch.equal(logits(other, batch), logits(model, batch))
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other, batch), logits(model, batch))


@pytest.mark.parametrize("family", [*TEXT, *VISION])
def test_from_pretrained_rebuilds_the_layers(family: str, tmp_path, caplog):
    model = upcycle(upcycle(build(family), [0], K, B), [-1], 2, 8)
    with torch.no_grad():  # experts that no longer equal each other
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    batch = inputs(family)
    expected = logits(model, batch)
    model.save_pretrained(tmp_path)
    automatic = "AutoModelForSequenceClassification" if family in TEXT else "AutoModelForImageClassification"
    for cls in (type(model), getattr(transformers, automatic)):
        with caplog.at_level(logging.WARNING):
            again, report = cls.from_pretrained(tmp_path, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
        assert not again.training and [m.config.num_experts for m in moe_layers(again).values()] == [K, 2]
        assert_same(dict(again.named_parameters()), dict(model.named_parameters()), rtol=0, atol=0)
        # Weights that lie unaligned in a mapped file may round differently in the last bit; a copy does not.
        torch.testing.assert_close(logits(again, batch), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(logits(copy.deepcopy(again), batch), expected)
    assert "newly initialized" not in caplog.text
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert len(moe_layers(base)) == 2
    half = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    again.save_pretrained(tmp_path / "again")  # and once more
    twice = type(model).from_pretrained(tmp_path / "again")
    assert torch.equal(logits(copy.deepcopy(twice), batch), expected)


def test_config_carries_the_layers_without_touching_dense_twins():
    dense = build("bert")
    config = dense.config
    moe = upcycle(type(dense)(config), [1], K, B)
    assert not hasattr(config, "unif_moe") and moe.bert.config is moe.config
    assert not moe_layers(type(dense)(config))
    # New weights, same structure:
    fresh = transformers.AutoModelForSequenceClassification.from_config(moe.config)
    (layer,) = moe_layers(fresh).values()
    assert torch.equal(layer.ffn_weights(0)[0], layer.ffn_weights("shared")[0])


def test_from_pretrained_with_fewer_layers(tmp_path):
    """Transformers leaves out the layers above; so do the rebuilt ones."""
    model = upcycle(build("bert"), [0, 2], K, B)
    model.save_pretrained(tmp_path)
    shallow = type(model).from_pretrained(tmp_path, num_hidden_layers=1)
    assert list(moe_layers(shallow)) == ["bert.encoder.layer.0.intermediate"]
    (layer,) = moe_layers(shallow).values()
    assert torch.equal(layer.ffn_weights(1)[0], next(iter(moe_layers(model).values())).ffn_weights(1)[0])
    shallow.save_pretrained(tmp_path / "again")
    assert len(moe_layers(type(model).from_pretrained(tmp_path / "again"))) == 1


def test_sharded_save_is_refused_on_reload(tmp_path):
    model = upcycle(build("bert"), [1], K, B)
    model.config.unif_moe[0]["expert_parallel_size"] = 2
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="spread over 2 ranks"):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize("family", ["bert", "timm"])
def test_torch_compile(family: str):
    depth = {"num_hidden_layers": 2} if family == "bert" else {}
    model = upcycle(build(family, **depth), [1], K, B).train()
    body = model.bert if family == "bert" else model
    batches = [inputs(family), inputs(family, padded=False)]

    def run(function: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        model.zero_grad()
        output = function(**batch)
        # All hidden states, padding included: without the mask, padded positions would differ.
        output = output if isinstance(output, Tensor) else output.last_hidden_state
        output.square().sum().backward()
        return gradients(model) | {"output": output.detach()}

    expected = [run(body, batch) for batch in batches]
    torch._dynamo.reset()
    compiled = torch.compile(body, backend="eager")
    for turn in (0, 1, 0):
        assert_same(run(compiled, batches[turn]), expected[turn], rtol=1e-3, atol=1e-4)


def test_timm_dropout_follows_the_layer():
    model = build("timm", proj_drop_rate=0.25)
    with pytest.warns(UserWarning, match="left out"):
        upcycle(model, [1], K, B)
    layer, dropout = model.blocks[1].mlp
    assert isinstance(layer, UniFMoELayer) and dropout.p == 0.25
    assert isinstance(upcycle(build("timm"), [1], K, B).blocks[1].mlp, UniFMoELayer)


def test_frozen_ffns_stay_frozen_and_modes_are_kept():
    model = build("bert").requires_grad_(False)
    upcycle(model, [1], K, B)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == ["bert.encoder.layer.1.intermediate.router.weight"]
    assert not any(m.training for m in model.modules())


def test_router_seed():
    def routers(seed: int | None) -> list[Tensor]:
        model = upcycle(build("bert"), [0, 1], K, B, router_seed=seed)
        return [layer.router.weight for layer in moe_layers(model).values()]

    one, two = routers(7), routers(7)
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1]) and not torch.equal(one[0], one[1])
    assert not torch.equal(routers(None)[0], one[0])
    model, before = build("timm"), torch.get_rng_state()
    upcycle(model, [0], K, B, router_seed=7)
    assert torch.equal(torch.get_rng_state(), before)  # a seed of its own leaves the global generator alone
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert routers(7)[0].dtype == torch.bfloat16
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(default)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([3], "index 3 is out of range.*0 to 2"),
        ([-4], "index -4 is out of range"),
        ([1, -2], "Layer 1 is named twice"),
        ([], "empty"),
        (2, "must be a list"),
        ([1.0], "holds 1.0"),
        ([True], "holds True"),
    ],
)
@pytest.mark.parametrize("family", ["timm", "bert"])
def test_layer_errors(family: str, layers, message: str):
    model = build(family)
    with pytest.raises(UserError, match=message):
        upcycle(model, layers, K, B)
    assert not moe_layers(model)


def test_other_errors():
    with pytest.raises(UserError, match="Linear cannot be upcycled.*timm.*BERT.*DistilBERT"):
        upcycle(nn.Linear(2, 2), [0], K, B)
    gpt = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=10, n_positions=8)
    with pytest.raises(UserError, match=r"GPT2Model cannot be upcycled.* write an .*Adapter.*docs/upcycling.md"):
        upcycle(transformers.GPT2Model(gpt), [0], K, B)
    model = build("bert")
    with pytest.raises(UserError, match="not divisible by num_blocks 7"):
        upcycle(model, [0, 1], K, 7)
    assert not moe_layers(model) and not hasattr(model.config, "unif_moe")
    upcycle(model, [1], K, B)
    with pytest.raises(UserError, match="Layer 1 already is"):
        upcycle(model, [0, 1], K, B)
    assert len(moe_layers(model)) == 1
    with pytest.raises(UserError, match="Mish"):
        upcycle(build("bert", hidden_act="mish"), [0], K, B)
    with pytest.raises(UserError, match="SwiGLU"):
        upcycle(build("timm", mlp_layer=timm.layers.SwiGLU), [0], K, B)


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
        (_WithAdapter, r"test_upcycling.Linear, which carries an adapter; merge .*merge_and_unload"),
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


def test_a_wrapped_model_names_the_one_inside():
    class Lightning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = build("timm")

    class Tagger(transformers.PreTrainedModel):
        config_class, _supports_sdpa = transformers.BertConfig, True

        def __init__(self, config) -> None:
            super().__init__(config)
            self.body = transformers.BertModel(config)
            self.post_init()

    upcycled = upcycle(build("bert"), [0], K, B).config
    assert len(moe_layers(Tagger(upcycled))) == 1  # its body makes them
    for wrapped, words in (
        (Tagger(build("bert").config), "Tagger wraps a BertModel, its .body; upcycle that one"),
        (nn.DataParallel(build("bert")), "DataParallel wraps a BertForSequenceClassification, its .module"),
        (torch.compile(build("bert")), "OptimizedModule wraps a BertForSequenceClassification, its ._orig_mod"),
        (Lightning(), "Lightning wraps a VisionTransformer, its .net; upcycle that one, before it is wrapped"),
    ):
        with pytest.raises(UserError, match=words):
            upcycle(wrapped, [0], K, B)


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


def test_ffn_without_bias():
    model = build("timm")
    for block in model.blocks:
        block.mlp.fc1 = nn.Linear(WIDTH, HIDDEN, bias=False)
    up, down = model.blocks[0].mlp.fc1, model.blocks[0].mlp.fc2
    upcycle(model, [0], K, B)
    got = model.blocks[0].mlp.ffn_weights(0)
    assert torch.equal(got[0], up.weight) and torch.equal(got[3], down.bias) and not got[1].any()


def test_import_leaves_transformers_and_timm_alone():
    code = (
        "import sys, unifmoe_dist; assert 'transformers' not in sys.modules and 'timm' not in sys.modules\n"
        "from transformers import PreTrainedModel; assert PreTrainedModel.post_init.rebuilds_unif_moe\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def sharded_equals_whole(rank: int, world: int) -> bool:
    """Run on every rank: a model with experts spread over ranks gives the outputs of one that holds all."""
    for family in ("bert", "timm"):
        torch.manual_seed(0)
        dense, batch = build(family), inputs(family)
        whole = upcycle(copy.deepcopy(dense), [0, 2], 4, B, router_seed=3)
        sharded = upcycle(dense, [0, 2], 4, B, router_seed=3, expert_group=dist.group.WORLD)
        for one, all_ in zip(moe_layers(sharded).values(), moe_layers(whole).values(), strict=True):
            assert sum(p.numel() for p in one.experts.parameters()) * world == sum(
                p.numel() for p in all_.experts.parameters()
            )
            for expert in ("shared", *range(4)):
                for got, want in zip(one.ffn_weights(expert), all_.ffn_weights(expert), strict=True):
                    assert torch.equal(got, want)
        torch.testing.assert_close(logits(sharded, batch), logits(whole, batch), rtol=1e-4, atol=1e-5)
        if family == "bert":
            assert sharded.config.unif_moe[0]["expert_parallel_size"] == world
    return True


def test_experts_spread_over_ranks():
    assert run_ranks(2, sharded_equals_whole) == [True, True]
