"""Warm-ups with Triton's kernels, and ranks of which one's kernels fail."""

from __future__ import annotations

import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.ranks import run_ranks
from tests.support.sharded import sharded_layer, whole_layer
from tests.support.triton import (
    DEVICE,
    make_layer,
    random,
    without_tuning,  # noqa: F401
)
from unifmoe_dist import UniFMoEConfig, UniFMoELayer, warm_up
from unifmoe_dist.kernels import select, self_test
from unifmoe_dist.kernels.triton import ffn as triton_ffn
from unifmoe_dist.methods.topk import TopKConfig, TopKLayer


@pytest.fixture
def in_triton(monkeypatch):
    """As on a device, with nothing tried yet."""
    monkeypatch.setattr(select, "_wants_triton", lambda x: True)
    monkeypatch.setattr(self_test, "_verdicts", {})


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sizes", [dict(hidden_dropout=0.2), dict(gated=True, activation="silu")])
def test_a_warm_up_tries_what_will_run_and_leaves_no_trace(sizes, training, in_triton, recwarn):
    layer = make_layer(**sizes).train(training)
    calls, before = [], {name: p.detach().clone() for name, p in layer.named_parameters()}
    for module in layer.modules():
        module.register_forward_hook(lambda *_: calls.append("forward"))
    for parameter in layer.parameters():
        parameter.register_hook(lambda grad: calls.append("backward"))
        parameter.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    state = torch.get_rng_state()
    warm_up(torch.nn.Sequential(layer, layer), [15])
    assert torch.equal(torch.get_rng_state(), state) and not calls and layer.usage.totals is None
    for name, parameter in layer.named_parameters():
        assert parameter.grad is None and torch.equal(parameter, before[name])
    tried = dict(self_test._verdicts)
    assert len(tried) == 2 and all(tried.values())
    with torch.set_grad_enabled(training):
        y = layer(random(3, 5, 32))
    if training:
        y.sum().backward()
    assert self_test._verdicts == tried
    assert not [w for w in recwarn if "Triton" in str(w.message)]  # a driver may have words of its own


def test_a_warm_up_of_complete_experts_in_half_precision(in_triton):
    layer = TopKLayer(TopKConfig(32, 64, 3, 4)).to(DEVICE).bfloat16()
    warm_up(layer, 9)
    tried = dict(self_test._verdicts)
    assert tried and all(case.dtype == torch.bfloat16 for case in tried)
    layer(random(9, 32, dtype=torch.bfloat16)).sum().backward()
    assert self_test._verdicts == tried


def one_rank_fails(rank, world, how):
    """Warm up a spread layer on ranks of which rank 1 cannot: its warnings, cases, and a step of the layer."""
    layer = sharded_layer(whole_layer(UniFMoEConfig(16, 32, 4, 2)), dist.group.WORLD, "alltoall")
    right, run = triton_ffn.triton_block_ffn, []

    def kernel(x, *given, **more):
        if rank == 1 and how == "kernel":
            raise RuntimeError("broken on purpose")
        if rank == 1 and how == "memory" and x.shape[0] == 6:
            raise torch.OutOfMemoryError("no memory left")
        run.append(x.shape[0])
        return right(x, *given, **more)

    with (
        patch.object(select, "_wants_triton", lambda x: True),
        patch.object(self_test, "_verdicts", {}),
        patch.object(triton_ffn, "triton_block_ffn", kernel),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        error = None
        try:
            warm_up(layer, 6)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        verdicts = {str(case): passed for case, passed in self_test._verdicts.items()}
        run.clear()
        if error is None:
            layer(torch.randn(6 * rank, 16, requires_grad=True)).sum().backward()  # rank 0 has no tokens
    return [str(w.message) for w in said if "Triton" in str(w.message)], verdicts, error, run


def test_a_kernel_that_fails_on_one_rank_is_used_on_none():
    (said, verdicts, error, run), (unsaid, others, other_error, _) = run_ranks(2, one_rank_fails, "kernel")
    assert error is None and other_error is None and run == [] and unsaid == []
    experts = {name for name in verdicts if "experts" in name and "routing" not in name}
    assert experts and not any(verdicts[name] for name in experts)
    assert {name for name, passed in verdicts.items() if passed} == {n for n in verdicts if n not in experts}
    assert {name: others[name] for name in verdicts if name in others} == {
        name: passed for name, passed in verdicts.items() if name in others
    }
    assert len(said) == len(experts)
    assert all(text.endswith("since on rank 1: RuntimeError: broken on purpose") for text in said)


def test_a_rank_that_runs_out_of_memory_leaves_no_other_waiting():
    (_, _, error, _), (_, _, own, _) = run_ranks(2, one_rank_fails, "memory")
    assert own == "OutOfMemoryError: no memory left"
    assert error == "RuntimeError: warm_up failed on rank 1: OutOfMemoryError: no memory left"


def sharded_by_fsdp(rank, world):
    """Cases that a warm-up has tried, before and after a step."""
    layer = UniFMoELayer(UniFMoEConfig(16, 32, 4, 2), expert_group=dist.group.WORLD)
    fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    with patch.object(select, "_wants_triton", lambda x: True), patch.object(self_test, "_verdicts", {}):
        warm_up(layer, 6)
        tried = dict(self_test._verdicts)
        layer(torch.randn(6, 16)).sum().backward()
        return len(tried), self_test._verdicts == tried, all(tried.values())


def test_weights_that_come_and_go_are_stood_for():
    assert run_ranks(2, sharded_by_fsdp) == [(3, True, True)] * 2  # routing, exchange, experts
