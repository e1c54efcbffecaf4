"""The optional capacity limit: what it drops, what that does to outputs and gradients, and where it is reported."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.equations import layer_output
from tests.support.ranks import run_ranks
from tests.support.sharded import CLOSE, EXCHANGES, sharded_layer, whole_layer
from unifmoe_dist import UniFMoEConfig, UniFMoELayer, upcycle
from unifmoe_dist.config import DataConfig, ModelConfig, OptimConfig, TrainConfig
from unifmoe_dist.dispatch import limit_load
from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime.ranks import running_ranks
from unifmoe_dist.train.trainer import Trainer
from unifmoe_dist.upcycling import moe_layers
from unifmoe_dist.usage import UsageSummary


def limited_layer(capacity_factor, experts=4, seed=1, spread=1.0, d=10) -> UniFMoELayer:
    layer = whole_layer(UniFMoEConfig(d, 24, experts, 6, capacity_factor=capacity_factor), seed)
    with torch.no_grad():
        layer.router.weight.mul_(spread)
    return layer


def expected_drops(gates: torch.Tensor, capacity_factor: float) -> frozenset[tuple[int, int]]:
    """(token, expert) pairs beyond the limit, expert by expert, from the definition."""
    chosen = [[t for t in range(len(gates)) if gates[t, e] != 0] for e in range(gates.shape[1])]
    places = math.ceil(capacity_factor * sum(map(len, chosen)) / len(chosen))
    return frozenset(
        (t, e)
        for e, tokens in enumerate(chosen)
        for t in sorted(tokens, key=lambda t: (-float(gates[t, e]), t))[places:]
    )


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 12),
    experts=st.integers(1, 5),
    factor=st.sampled_from([0.01, 0.3, 0.75, 1.0, 1.3]),
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
)
def test_outputs_and_gradients_match_the_equations(n, experts, factor, seed, spread):
    layer = limited_layer(factor, experts, seed, spread)
    x = torch.randn(n, 10, requires_grad=True)
    dropped = expected_drops(layer.route(x).gates.detach(), factor)
    layer.usage.reset()
    y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)

    x64 = x.detach().double().requires_grad_()
    router = layer.router.weight.detach().double().requires_grad_()
    ffns = [tuple(t.double().requires_grad_() for t in layer.ffn_weights(e)) for e in ["shared", *range(experts)]]
    want = layer_output(x64, router, ffns, 6, dropped=dropped)
    leaves = [x64, router, *(ffn[3] for ffn in ffns)]
    wants = torch.autograd.grad(want, leaves, grad.double(), allow_unused=True, materialize_grads=True)
    close = dict(rtol=2e-5, atol=2e-4)
    torch.testing.assert_close(y.double(), want, **close)
    torch.testing.assert_close(x.grad.double(), wants[0], **close)
    torch.testing.assert_close(layer.router.weight.grad.double(), wants[1], **close)
    torch.testing.assert_close(layer.shared.value_bias.grad.double(), wants[2], **close)
    torch.testing.assert_close(layer.experts.value_bias.grad.double(), torch.cat(wants[3:]), **close)

    summary = UsageSummary.from_totals(layer.usage.totals, experts)
    chosen = int((layer.route(x).gates != 0).sum())
    assert summary.dropped == pytest.approx(len(dropped) / max(chosen, 1))
    assert summary.expert_count * n == pytest.approx(chosen - len(dropped))
    assert sum(summary.expert_load) * n == pytest.approx(chosen - len(dropped))
    residual = (6 - layer.route(x).shared_block_count).tolist()
    computed = sum(residual[t] for t, e in (layer.route(x).gates != 0).nonzero().tolist() if (t, e) not in dropped)
    assert summary.block_compute * n == pytest.approx(computed + sum(6 - r for r in residual))


def test_evaluation_applies_no_limit():
    limited, free = limited_layer(0.3).eval(), limited_layer(None).eval()
    x = torch.randn(20, 10)
    assert torch.equal(limited(x), free(x))
    torch.testing.assert_close(limited(x)[3:4], limited(x[3:4]))  # a token alone decides
    assert not torch.equal(limited.train()(x), free(x))


def test_a_large_factor_equals_dropless_bit_for_bit():
    results = []
    for factor in (None, 4.0, 1e9):
        layer = limited_layer(factor, spread=3.0)
        torch.manual_seed(3)
        x = torch.randn(50, 10, requires_grad=True)
        y = layer(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in layer.parameters())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_ties_go_to_the_lower_token():
    layer = limited_layer(1.0)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[2, 0] = 5.0
    routing = layer.route(torch.ones(98, 10))  # all choose expert 1: 98 assignments, 25 places
    kept = limit_load(routing, 1.0)
    assert (kept.gates != 0).nonzero().tolist() == [[t, 1] for t in range(25)]
    assert kept.expert_count.tolist() == [1] * 25 + [0] * 73 and kept.dropped.tolist() == [0] * 25 + [1] * 73


def test_a_nan_token_gives_way_and_stays_alone():
    layer = limited_layer(1.0)
    x = torch.randn(9, 10)
    x[0, 0] = float("nan")
    x.requires_grad_()
    gates = layer.route(x).gates
    load = (gates != 0).sum(0)
    crowded = load > math.ceil(int(load.sum()) / 4)
    kept = limit_load(layer.route(x), 1.0).gates[0] != 0
    assert crowded.any() and not crowded.all() and torch.equal(kept, ~crowded)  # the first token, yet not served first
    y = layer(x)
    y.sum().backward()
    assert y[0].isnan().all() and y[1:].isfinite().all() and x.grad[1:].isfinite().all()


def sharded_and_limited(rank, world, dispatcher):
    whole = limited_layer(0.8, seed=4)
    layer = sharded_layer(whole, dist.group.WORLD, dispatcher)
    x = torch.randn([7, 12][rank], 10, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    twin = x.detach().clone().requires_grad_()
    layer(x).square().sum().backward()
    whole(twin).square().sum().backward()  # the limit is counted per rank, so one rank's tokens are the yardstick
    assert int(layer.usage.totals[5]) == int(whole.usage.totals[5]) > 0
    torch.testing.assert_close(x.grad, twin.grad, **CLOSE)
    torch.testing.assert_close(layer.router.weight.grad, whole.router.weight.grad, **CLOSE)
    return True


@pytest.mark.parametrize("dispatcher", EXCHANGES)
def test_every_dispatcher_drops_the_same(dispatcher):
    assert all(run_ranks(2, sharded_and_limited, dispatcher))


@pytest.mark.parametrize("factor", [0, -1.0, float("nan"), float("inf"), True, "1"])
def test_bad_factors(factor):
    with pytest.raises(UserError, match=f"capacity_factor.*{factor}"):
        UniFMoEConfig(16, 24, 3, 4, capacity_factor=factor)
    with pytest.raises(UserError, match=f"model.capacity_factor.*{factor}"):
        TrainConfig(model=ModelConfig(capacity_factor=factor)).validate(1)


def test_saved_models_keep_the_limit_and_old_notes_still_load(tmp_path):
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = upcycle(transformers.BertModel(config), [1], 3, 4, capacity_factor=0.9)
    model.save_pretrained(tmp_path)
    (layer,) = moe_layers(transformers.BertModel.from_pretrained(tmp_path)).values()
    assert layer.config.capacity_factor == 0.9
    saved = json.loads((tmp_path / "config.json").read_text())
    del saved["unif_moe"][0]["capacity_factor"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    (layer,) = moe_layers(transformers.BertModel.from_pretrained(tmp_path)).values()
    assert layer.config.capacity_factor is None
    dropless = upcycle(transformers.BertModel(config), [1], 3, 4)
    assert "capacity_factor" not in dropless.config.unif_moe[0]


def limited_run(rank, world, folder):
    config = TrainConfig(
        output=folder,
        steps=4,
        eval_every=4,
        log_every=2,
        baseline=False,
        progress=False,
        model=ModelConfig(layers=[3], num_experts=4, capacity_factor=0.7),
        data=DataConfig(batch_size=2),
        optim=OptimConfig(warmup_steps=1),
    )
    config.validate(world)
    with running_ranks(1) as ranks:
        return Trainer(config, ranks, Path(folder)).fit()


def test_a_run_reports_what_it_dropped(tmp_path):
    summary = run_ranks(1, limited_run, str(tmp_path))[0]
    assert 0 < summary["dropped_fraction"] < 1
    assert json.loads((tmp_path / "summary.json").read_text())["dropped_fraction"] == summary["dropped_fraction"]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    name, *_ = records[0]["layers"]
    for record in records:  # the limit is one of training
        dropped = record["layers"][name]["dropped"]
        assert 0 < dropped < 1 if record["kind"] == "train" else dropped == 0
    (events,) = (tmp_path / "tensorboard").rglob("events*")
    scalars = EventAccumulator(str(events.parent))
    scalars.Reload()
    assert [e.value for e in scalars.Scalars(f"train/{name}/dropped")] == pytest.approx(
        [r["layers"][name]["dropped"] for r in records if r["kind"] == "train"]
    )
