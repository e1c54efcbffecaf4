"""Upcycling: exact copies, masks, and everything an upcycled model must still be able to do."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import timm
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from tests.support.ranks import run_ranks
from tests.support.small_models import FAMILIES, HIDDEN, TEXT, B, K, assert_same, build, gradients, inputs, logits
from unifmoe_dist import UniFMoELayer, upcycle
from unifmoe_dist.errors import UserError
from unifmoe_dist.upcycling import moe_layers


def dense_ffns(model: nn.Module) -> list[tuple[nn.Linear, nn.Linear]]:
    """The FFNs' linear maps (up, down) in order of depth, found by shape."""
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    ups = [m for m in linears if m.out_features == HIDDEN]
    downs = [m for m in linears if m.in_features == HIDDEN]
    return list(zip(ups, downs, strict=True))


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
    compiled = torch.compile(body, fullgraph=True, backend="eager")
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
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 2))
    with pytest.raises(UserError, match=r"Sequential cannot be upcycled.* write an adapter.*docs/upcycling.md"):
        upcycle(network, [0], K, B)
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
    with pytest.raises(UserError, match=r"SwiGLU, computes something else .* cannot have its norm \(LayerNorm\)"):
        upcycle(build("timm", mlp_layer=timm.layers.SwiGLU, scale_mlp_norm=True), [0], K, B)


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


def refuse_ddp(rank, world):
    ddp = nn.parallel.DistributedDataParallel(build("bert"))
    fsdp = FullyShardedDataParallel(build("bert"), device_id=torch.device("cpu"))
    for wrapped, name in ((ddp, "module"), (torch.compile(ddp), "_orig_mod.module"), (fsdp, "_fsdp_wrapped_module")):
        words = rf"{type(wrapped).__name__} wraps a BertForSequenceClassification, its .{name}; .* model.{name}\.$"
        with pytest.raises(UserError, match=words):
            upcycle(wrapped, [0], K, B)
    named = {"module.bert.encoder.layer.0": ("intermediate.dense", "gelu", "output.dense")}
    with pytest.raises(UserError, match=r"pass the inner model, model.module\.$"):
        upcycle(ddp, num_experts=K, num_blocks=B, ffns=named)
    with pytest.raises(UserError, match="spread over ranks; upcycle the model before FSDP"):
        upcycle(fully_shard(build("bert")), [0], K, B)


def test_a_model_under_ddp_or_with_adapters_names_the_one_inside():
    run_ranks(1, refuse_ddp)
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(build("bert"), peft.LoraConfig(target_modules=["query"]))
    with pytest.raises(UserError, match=r"wraps a BertForSequenceClassification, its .base_model.model"):
        upcycle(wrapped, [0], K, B)
    with pytest.raises(UserError, match=r"pass the inner model, model.merge_and_unload\(\), or"):
        upcycle(wrapped, [0], K, B)
    with pytest.raises(UserError, match=r"layer.0.attention.self.query is a peft\.\S+ which carries an adapter"):
        upcycle(wrapped.get_base_model(), [0], K, B)
    assert len(moe_layers(upcycle(wrapped.merge_and_unload(), [0], K, B))) == 1


def test_import_leaves_transformers_and_timm_alone():
    code = (
        "import sys, unifmoe_dist, unifmoe_dist.upcycling\n"
        "assert 'transformers' not in sys.modules and 'timm' not in sys.modules\n"
        "from transformers import PreTrainedModel\n"
        "for name in ('post_init', 'save_pretrained', 'from_pretrained'):\n"
        "    assert getattr(PreTrainedModel, name).__code__.co_filename.endswith('modeling_utils.py'), name\n"
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
