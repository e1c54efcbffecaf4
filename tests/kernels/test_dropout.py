"""Dropout on hidden channels: its mask, the kernels that make it, and that whatever computes again sees it again."""

from __future__ import annotations

import importlib.util
import json
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from tests.support.kernels_agree import assert_kernels_agree
from tests.support.methods import MOE_LAYERS
from tests.support.ranks import run_ranks
from tests.support.sharded import sharded_layer, whole_layer
from unifmoe_dist import UniFMoEConfig, UniFMoELayer, upcycle
from unifmoe_dist.errors import UserError
from unifmoe_dist.experts import BlockExperts
from unifmoe_dist.kernels import HiddenDropout, reference_block_ffn, use_kernels
from unifmoe_dist.train.build import install_layers
from unifmoe_dist.train.cli import parse_train_config
from unifmoe_dist.upcycling import moe_layers


def draw(rate: float, seed: int = 0) -> HiddenDropout:
    torch.manual_seed(seed)
    return HiddenDropout.draw(rate, torch.device("cpu"))


def mask(dropout: HiddenDropout, tokens: int, experts: int, channels: int) -> torch.Tensor:
    """(tokens, experts, channels), 1 where a channel is kept."""
    token, expert = (t.flatten() for t in torch.meshgrid(torch.arange(tokens), torch.arange(experts), indexing="ij"))
    kept = dropout.kept(token, expert, torch.zeros_like(token), channels, torch.float32)
    return kept.view(tokens, experts, channels)


def test_the_mask_is_the_documented_hash():
    """In Python's whole numbers, one channel after another: what a saved run or another kernel must come to."""

    def shift(x, by):  # of signed numbers: the sign fills up
        return ((x - 2**32 if x >= 2**31 else x) >> by) % 2**32

    def spread(x):
        x = (x ^ shift(x, 16)) * 0x21F0AAAD % 2**32
        return (x ^ shift(x, 15)) * 0x735A2D97 % 2**32

    def mix(x):
        x = spread(x % 2**32)
        return x ^ shift(x, 15)

    dropout = HiddenDropout(0.3, torch.tensor([-5, 2**31 - 3], dtype=torch.int32), first_expert=2)
    seeds = [int(word) % 2**32 for word in dropout.seed]
    tokens, experts, first = [0, 1, 77, 2**31 - 2], [0, 3, 60, 1], [0, 8, 5000, 16]
    got = dropout.kept(*(torch.tensor(t) for t in (tokens, experts, first)), 40, torch.float64)
    for row, (token, expert, channel) in enumerate(zip(tokens, experts, first, strict=True)):
        start = mix(mix(token + seeds[0]) + (expert + 2) * 0x61C88647)
        step = mix(mix(token ^ seeds[1]) + (expert + 2) * 0x7A143595) | 1
        for i in range(40):
            word = spread(((channel + i) * step + start) % 2**32)
            signed = word - 2**32 if word >= 2**31 else word
            assert bool(got[row, i]) == (signed >= round(0.3 * 2**32) - 2**31)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_rate_and_independence(rate):
    """In units of the standard deviation of independent draws; six are exceeded once in half a billion."""
    before = None
    for seed in range(4):
        m = mask(draw(rate, seed), 600, 7, 512).numpy().astype(np.float64) - (1 - rate)
        variance = rate * (1 - rate)

        def deviations(products: np.ndarray, spread: float) -> float:
            return abs(products.sum()) / spread / math.sqrt(products.size)

        assert deviations(m, math.sqrt(variance)) < 6
        pairs = [(m[:, :, :-lag], m[:, :, lag:]) for lag in (1, 2, 64, 192)]  # channels
        pairs += [(m[:-lag], m[lag:]) for lag in (1, 2, 128)] + [(m[:, :-lag], m[:, lag:]) for lag in (1, 2, 6)]
        pairs += [] if before is None else [(m, before)]  # another seed
        for a, b in pairs:
            assert deviations(a * b, variance) < 6
        for axes in ((0, 1), (1, 2), (2,), (0,)):  # sums over rows, tokens and channels spread as they should
            sums = m.sum(axes)
            number = m.size / sums.size
            assert (sums**2).mean() / (number * variance) == pytest.approx(1, abs=6 * math.sqrt(2 / sums.size) + 0.05)
        before = m


def test_rates_at_both_ends():
    assert mask(draw(1e-12), 50, 2, 100).all()
    assert not mask(draw(1 - 1e-12), 50, 2, 100).any()


def bank(experts: int, bias: bool, activation: str = "gelu", gated: bool = False) -> BlockExperts:
    made = BlockExperts(experts, 8, 15, 3, activation, bias, gated).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(0, 20),
    e=st.integers(1, 5),
    seed=st.integers(0, 1000),
    bias=st.booleans(),
    rate=st.sampled_from([0.1, 0.5, 0.95]),
    kept_ffns=st.sampled_from([0, 3]),
    first=st.integers(0, 3),
    activation=st.sampled_from(["gelu", "identity", "relu_squared"]),
    chunk_rows=st.sampled_from([0, 9, 8192]),
    gated=st.booleans(),
)
def test_grouped_equals_reference(n, e, seed, bias, rate, kept_ffns, first, activation, chunk_rows, gated):
    """Outputs, and gradients against autograd through the definition, in float64, with the same mask."""
    dropout = draw(rate, seed).of_experts(first)
    experts = bank(e, bias, activation, gated)
    x = torch.randn(n, 8, dtype=torch.float64, requires_grad=True)
    gates = (torch.rand(n, e) * (torch.rand(n, e) > 0.5)).double().requires_grad_()
    blocks, grad = torch.rand(n, 3) > 0.5, torch.randn(n, 8, dtype=torch.float64)
    assert_kernels_agree(x, gates, blocks, experts, grad, kept_ffns, chunk_rows, dropout)


def test_the_reference_is_torchs_dropout_with_that_mask():
    torch.manual_seed(0)
    experts, x, dropout = bank(2, True), torch.randn(6, 8, dtype=torch.float64), draw(0.25, 3)
    kept = mask(dropout, 6, 2, 15).double() / 0.75
    gates = torch.rand(6, 2).double()
    want = sum(
        gates[:, e, None]
        * (
            (torch.nn.functional.gelu(x @ experts.keys[e].T + experts.key_bias.view(2, -1)[e]) * kept[:, e])
            @ experts.values[e]
            + experts.value_bias.view(2, -1)[e]
        )
        for e in range(2)
    )
    got = reference_block_ffn(x, gates, torch.ones(6, 3, dtype=torch.bool), experts.weights(), dropout)
    torch.testing.assert_close(got, want)


def make_layer(rate: float = 0.3, **more) -> UniFMoELayer:
    torch.manual_seed(1)
    layer = UniFMoELayer(UniFMoEConfig(16, 24, 3, 4, hidden_dropout=rate, **more))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def test_in_training_only_and_nothing_where_it_is_off():
    dropping, plain, x = make_layer(0.3), make_layer(0.0), torch.randn(9, 16)
    torch.manual_seed(5)
    a, b = dropping(x), dropping(x)
    assert not torch.equal(a, b)  # every pass has its own mask
    torch.manual_seed(5)
    assert torch.equal(dropping(x), a)
    state = torch.get_rng_state()
    assert torch.equal(dropping.eval()(x), plain(x))  # `plain` is training
    assert torch.equal(torch.get_rng_state(), state)  # and draws nothing


def test_shared_and_residual_experts_are_dropped_alike_and_right_on_average():
    layer, x = make_layer(0.3), torch.randn(5, 16)
    want = layer.eval()(x)
    layer.train()
    with torch.no_grad():
        outputs = torch.cat([layer(x.repeat(300, 1)).view(300, 5, 16) for _ in range(10)])  # each token its own mask
    error = outputs.std(0) / math.sqrt(3000)
    assert ((outputs.mean(0) - want).abs() < 6 * error).all()
    for name in ("shared", "experts"):  # with the other part silenced, this one varies
        part = make_layer(0.3)
        other = part.shared if name == "experts" else part.experts
        with torch.no_grad():
            other.values.zero_()
        assert torch.stack([part(x) for _ in range(8)]).std(0).min() > 0


@pytest.mark.parametrize("kernels", ["grouped", "reference"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_activation_checkpointing_sees_the_same_mask(reentrant, autocast, kernels):
    with use_kernels(kernels):
        check_recomputation(reentrant, autocast)


def check_recomputation(reentrant, autocast):
    layer, results = make_layer(0.5), []
    for recompute in (False, True):
        torch.manual_seed(3)
        layer.zero_grad()
        x = torch.randn(7, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            hidden = x * 1.0
            for _ in range(2):  # two layers, so that the second mask depends on the first having been drawn
                hidden = checkpoint(layer, hidden, use_reentrant=reentrant) if recompute else layer(hidden)
        torch.rand(3)  # the generator has gone on when the backward pass comes
        hidden.square().sum().backward()
        results.append([hidden.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())])
    for plain, again in zip(*results, strict=True):
        assert torch.equal(plain, again)


def test_token_masks_edges_and_bad_rates():
    layer, x = make_layer(0.5), torch.randn(4, 16)
    y = layer(x, torch.tensor([1, 0, 1, 0]))
    assert (y[1::2] == 0).all() and (y[::2] != 0).any()
    assert layer(x[:0]).shape == (0, 16)
    x[1, 2] = float("nan")
    assert layer(x).isnan().all(-1).tolist() == [False, True, False, False]
    for rate in (1, 1.0, -0.1, float("nan"), "0.1", True):
        words = "a number" if isinstance(rate, (str, bool)) else "(finite and )?at least 0 and below 1"
        with pytest.raises(UserError, match=f"hidden_dropout must be {words}"):
            UniFMoEConfig(16, 24, 3, 4, hidden_dropout=rate)


def bert(**more) -> torch.nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    shape = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **more,
    )
    return BertForSequenceClassification(shape).train()


@pytest.mark.parametrize("method", ["unif", *MOE_LAYERS])
def test_upcycled_models_of_every_method_drop_and_reload(method, tmp_path):
    """The experts alone: a dense twin drops nothing. Configs note the rate, and older ones, which do not, mean 0."""
    ids = torch.arange(12).view(2, 6)

    def varies(model: torch.nn.Module) -> bool:
        router_noise = [layer for layer in moe_layers(model).values() if hasattr(layer, "gate_noise")]
        for layer in router_noise:
            layer.gate_noise = 0.0
        return not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)

    def converted(rate: float) -> torch.nn.Module:
        return upcycle(bert(), [1], 4, 4, method=method, hidden_dropout=rate)

    model = converted(0.5)
    assert varies(model) and not varies(converted(0.0)) and not varies(bert())
    assert not varies(model.eval())
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert [layer.config.hidden_dropout for layer in moe_layers(again).values()] == [0.5]
    assert varies(again.train())
    noted = json.loads((tmp_path / "config.json").read_text())
    del noted["unif_moe"][0]["hidden_dropout"]
    (tmp_path / "config.json").write_text(json.dumps(noted))
    older = type(model).from_pretrained(tmp_path)
    assert [layer.config.hidden_dropout for layer in moe_layers(older).values()] == [0.0]


def test_a_timm_model_is_told_what_it_loses():
    def vit() -> torch.nn.Module:
        return timm.create_model("test_vit", proj_drop_rate=0.25)

    with pytest.warns(UserWarning, match=r"is left out .* hidden_dropout=0.25"):
        upcycle(vit(), [1], 4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = upcycle(vit(), [1], 4, 4, hidden_dropout=0.25)
    assert [layer.config.hidden_dropout for layer in moe_layers(model).values()] == [0.25]


@pytest.mark.parametrize("method", ["unif", "gmoe", "mass"])
def test_the_option_reaches_the_layers(method):
    words = ["--data.task", "digits", "--model.moe", method, "--model.hidden_dropout", "0.2", "--model.layers", "[1]"]
    config = parse_train_config(words)
    config.validate(1)
    layers = moe_layers(install_layers(config, timm.create_model("test_vit")))
    assert [layer.config.hidden_dropout for layer in layers.values()] == [0.2]


SHAPE = UniFMoEConfig(12, 40, 4, 10)
COUNTS = [([5, 9], 7), ([0, 6], 8), ([0, 0], 9)]


def dropped_on_ranks(rank, world):
    """For every dispatcher and load: the fast kernel against the definition, and a recomputation against itself."""
    for dispatcher in ["alltoall", *(["tutel"] if importlib.util.find_spec("tutel") else [])]:
        for counts, seed in COUNTS:
            layer = sharded_layer(whole_layer(SHAPE), dist.group.WORLD, dispatcher)
            layer.config = replace(SHAPE, hidden_dropout=0.4)
            tokens = torch.randn(counts[rank], 12, generator=torch.Generator().manual_seed(seed + rank))
            results = []
            for kernel, recompute in (("reference", False), ("grouped", False), ("grouped", True)):
                torch.manual_seed(100 * seed + rank)
                layer.zero_grad()
                x = tokens.clone().requires_grad_()
                with use_kernels(kernel):
                    y = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
                    (y * torch.linspace(-1, 1, 12)).sum().backward()
                results.append([y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)])
            for want, got, again in zip(*results, strict=True):
                torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
                assert torch.equal(got, again)
            if counts[rank]:
                assert not torch.equal(layer(tokens), results[0][0])
            else:
                layer(tokens)
    return True


def test_every_dispatcher_on_uneven_and_empty_ranks():
    """The rank that computes decides the mask; with the same generators it decides the same again."""
    assert all(run_ranks(2, dropped_on_ranks))
