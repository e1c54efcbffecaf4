"""What is made of weights is made once a step, and for nobody whose weights come and go."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.support.kept import (
    HALF,
    as_on_a_gpu,  # noqa: F401  the fixture gpu
    bank,
    copies,
    is_kept,
    nothing_yet,  # noqa: F401
)
from tests.support.ranks import run_ranks
from unifmoe_dist import UniFMoEConfig, UniFMoELayer, kept, leave_experts_alone
from unifmoe_dist.experts import BlockExperts, ExpertWeights
from unifmoe_dist.kernels import use_kernels

# -- once a step ------------------------------------------------------------------------------------------------------


class Casts(TorchDispatchMode):
    """Counts casts to half precision, by the shape of what is cast."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is HALF:
            self.counts[tuple(args[0].shape)] += 1
        return func(*args, **kwargs)


def train(steps, reentrant=False, gated=False, keeps=True, monkeypatch=None, counted=None):
    """Parameters after steps of four checkpointed micro-batches under autocast."""
    if not keeps:
        monkeypatch.setattr("unifmoe_dist.experts.kept", lambda *_: None)
    torch.manual_seed(0)
    layer = UniFMoELayer(UniFMoEConfig(32, 64, num_experts=3, num_blocks=4, gated=gated, hidden_dropout=0.1))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    for step in range(steps):
        with counted if counted is not None and step == steps - 1 else torch.enable_grad():
            for _ in range(4):
                x = torch.randn(20, 32, requires_grad=True)
                with torch.autocast("cpu", HALF):
                    y = checkpoint(layer, x, use_reentrant=reentrant)
                (y.float().square().mean() + layer.diversity_loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return layer


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_weights_are_cast_once_a_step(reentrant, gated, monkeypatch):
    """Before, each micro-batch and each recomputation cast them all."""
    counted = Casts()
    train(2, reentrant, gated, counted=counted)
    matrices = 3 if gated else 2
    assert counted.counts[(3, 64, 32)] == counted.counts[(1, 64, 32)] == matrices
    assert counted.counts[(3, 64)] == counted.counts[(1, 64)] == matrices - 1
    counted = Casts()
    train(2, reentrant, gated, False, monkeypatch, counted)
    assert counted.counts[(3, 64, 32)] == counted.counts[(1, 64, 32)] == matrices * 4 * 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_weights_are_cast_once_a_step_on_a_gpu(reentrant, gpu):
    """But for passes without gradients, of which reentrant checkpointing has one a micro-batch."""
    counted = Casts()
    train(2, reentrant, counted=counted)
    assert counted.counts[(3, 64, 32)] == counted.counts[(1, 64, 32)] == 2 * (4 * reentrant + 1)


@pytest.mark.parametrize("gated", [False, True])
def test_results_are_those_of_casts_in_every_call(gated, monkeypatch):
    got = train(3, gated=gated)
    want = train(3, gated=gated, keeps=False, monkeypatch=monkeypatch)
    for (name, mine), other in zip(got.named_parameters(), want.parameters(), strict=True):
        assert torch.equal(mine, other), name


def test_prototypes_are_averaged_once_a_step(monkeypatch):
    calls = []
    average = BlockExperts.prototypes
    monkeypatch.setattr(BlockExperts, "prototypes", lambda self: (calls.append(0), average(self))[1])
    train(2)
    assert len(calls) == 2


def test_gradients_arrive_in_the_type_of_the_weights():
    experts = bank()
    experts.values.requires_grad_(False)
    made = copies(experts)
    assert made["keys"].requires_grad and not made["values"].requires_grad  # frozen: no kernel computes for it
    made["keys"].float().square().sum().backward()
    assert experts.keys.grad.dtype == torch.float32 and experts.values.grad is None
    assert torch.equal(experts.keys.grad, (2 * experts.keys.detach().to(HALF).float()).to(HALF).float())


def test_each_pass_is_differentiated_for_itself():
    experts = bank()
    first, second = copies(experts)["keys"], copies(experts)["keys"]
    first.float().sum().backward()
    (second.float() * 2).sum().backward()
    assert torch.equal(experts.keys.grad, torch.full_like(experts.keys, 3.0))


# -- not for everybody ------------------------------------------------------------------------------------------------


def sharded(experts):
    experts._is_fsdp_managed_module = True
    return experts


def offloaded(experts):
    experts._hf_hook = object()
    return experts


def partitioned(experts):
    experts.values.ds_status = "available"
    return experts


def parametrised(experts):
    torch.nn.utils.parametrize.register_parametrization(experts, "values", nn.Tanh())
    return experts


def replicated(experts):
    """As DataParallel's replicas have it, and FSDP 1: no parameter."""
    values = experts.values.detach()
    del experts.values
    experts.values = values
    return experts


@pytest.mark.parametrize("who", [sharded, offloaded, partitioned, parametrised, replicated])
def test_weights_that_come_and_go_are_cast_in_every_call(who):
    assert is_kept(bank())
    assert not is_kept(who(bank()))


def test_a_capture_casts_for_itself(monkeypatch):
    experts = bank()
    before = copies(experts)["keys"]
    monkeypatch.setattr(kept, "_captured", lambda weight: True)
    assert not is_kept(experts)
    monkeypatch.undo()
    assert copies(experts)["keys"].data_ptr() == before.data_ptr()


def test_tracers_leave_nothing_behind():
    experts = bank()
    with FakeTensorMode(allow_non_fake_inputs=True):
        copies(experts)
    torch.func.grad(lambda x: (copies(experts)["keys"].float() * x).sum())(torch.tensor(1.0))
    torch.func.functional_call(experts, {"keys": experts.keys * 2}, (torch.ones(1),), {"use": lambda e, x: copies(e)})
    torch.compile(lambda x: x * copies(experts)["keys"], backend="eager")(torch.ones(1))
    assert len(kept._Everything.by_holder) == 0
    assert copies(experts)["keys"].dtype == HALF


def test_replaced_tensors_are_cast_for_themselves():
    """Gradients of changed weights are theirs, and not the bank's."""
    from dataclasses import replace

    weights = bank().weights()
    other = replace(weights, keys=weights.keys.detach() + 1)
    assert isinstance(other, ExpertWeights) and other.copies is None
    assert torch.equal(other.in_type(HALF)["keys"], (weights.keys + 1).to(HALF))


@pytest.mark.timeout(300)
def test_a_compiled_step_is_noticed(gpu):
    experts = bank()
    for parameter in experts.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.1)
    copies(experts)
    torch.compile(optimizer.step, backend="aot_eager")()
    assert torch.equal(copies(experts)["keys"], experts.keys.to(HALF))


def test_the_definition_under_autocast_is_as_before(monkeypatch):
    torch.manual_seed(0)
    layer, x = UniFMoELayer(UniFMoEConfig(32, 64, num_experts=3, num_blocks=4)), torch.randn(20, 32)
    with use_kernels("reference"), torch.autocast("cpu", HALF):
        got = layer(x)
        monkeypatch.setattr("unifmoe_dist.experts.kept", lambda *_: None)
        assert torch.equal(got, layer(x))


# -- over ranks -------------------------------------------------------------------------------------------------------


def train_spread(rank, world, keeps):
    """Weights of this rank after steps in DDP under autocast, experts spread, the second micro-batch averaged."""
    with patch("unifmoe_dist.experts.kept", kept.kept if keeps else lambda *_: None):
        torch.manual_seed(0)
        layer = UniFMoELayer(UniFMoEConfig(32, 64, num_experts=4, num_blocks=4), expert_group=dist.group.WORLD)
        module = nn.Sequential(layer, nn.Linear(32, 2))
        leave_experts_alone(module)
        model = DDP(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        torch.manual_seed(rank)
        for _ in range(2):
            for last in (False, True):
                with nullcontext() if last else model.no_sync(), torch.autocast("cpu", HALF):
                    model(torch.randn(12 + rank, 32)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]


def test_spread_experts_train_as_with_casts_in_every_call():
    for got, want in zip(run_ranks(2, train_spread, True), run_ranks(2, train_spread, False), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.gpu
def test_keeping_waits_for_no_device():
    """Steps of two micro-batches on a device cast once, as on the CPU, and the host looks at no weight."""
    torch.manual_seed(0)
    layer = UniFMoELayer(UniFMoEConfig(64, 128, num_experts=3, num_blocks=4)).cuda()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    mode = torch.cuda.get_sync_debug_mode()
    try:
        for step in range(3):
            counted = Casts()
            with counted if step == 2 else nullcontext():
                for _ in range(2):
                    with torch.autocast("cuda", HALF):
                        y = layer(torch.randn(100, 64, device="cuda"))
                    y.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.set_sync_debug_mode("error")  # once kernels are compiled, tuned and proven
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert counted.counts[(3, 128, 64)] == counted.counts[(1, 128, 64)] == 2
