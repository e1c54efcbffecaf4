"""What is made of weights is made once for as long as they stay, and never outlives them."""

from __future__ import annotations

import copy
import io
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

from tests.support.ranks import run_ranks
from unifmoe_dist import UniFMoEConfig, UniFMoELayer, kept, leave_experts_alone
from unifmoe_dist.experts import BlockExperts, ExpertWeights
from unifmoe_dist.kernels import use_kernels

HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def nothing_yet(monkeypatch):
    """As in a process in which nothing has happened."""
    kept._Everything.optimisers.clear()
    kept._Everything.by_holder.clear()


@pytest.fixture
def gpu(monkeypatch):
    """As on a GPU: nobody looks at the weights themselves."""
    monkeypatch.setattr(kept, "_kind", lambda weight: "cuda")


def bank(gated=False, bias=True):
    torch.manual_seed(0)
    made = BlockExperts(3, 32, 64, 4, "silu", bias, gated)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def copies(experts):
    """Those in half precision that a forward pass would compute with."""
    return experts.weights().in_type(HALF)


def is_kept(experts):
    """Whether a second pass takes what the first has made."""
    first, second = copies(experts)["keys"], copies(experts)["keys"]
    return first.data_ptr() == second.data_ptr()


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


# -- only while weights stay ------------------------------------------------------------------------------------------


def step_of(kind, **options):
    def step(experts):
        for parameter in experts.parameters():
            parameter.grad = torch.ones_like(parameter)
        kind(experts.parameters(), **options).step()

    return step


class ThroughData(torch.optim.Optimizer):
    """As engines do that copy a result into the weights: no version is raised."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad)


def in_place(experts):
    with torch.no_grad():
        experts.values.mul_(2)


def trained(experts):
    """A bank, the optimiser of torch that has stepped it, and gradients that have arrived since."""
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.01)
    for steps in (True, False):
        copies(experts)
        for parameter in experts.parameters():
            parameter.grad = torch.ones_like(parameter)
        if steps:
            optimizer.step()
    return experts, optimizer


CHANGES = {
    "in place": in_place,
    "new storage": lambda e: setattr(e.values, "data", e.values.data + 1),
    "new parameter": lambda e: setattr(e, "values", nn.Parameter(e.values.detach() + 1)),
    "a state dict": lambda e: e.load_state_dict({n: t + 1 for n, t in e.state_dict().items()}),
    "an assigned state dict": lambda e: e.load_state_dict({n: t + 1 for n, t in e.state_dict().items()}, assign=True),
    "to and fro": lambda e: (in_place(e.double()), e.float()),
    "sgd": step_of(torch.optim.SGD, lr=0.1),
    "adamw, fused": step_of(torch.optim.AdamW, lr=0.1, fused=True),
    "adamw, foreach": step_of(torch.optim.AdamW, lr=0.1, foreach=True),
    "an optimiser that raises no version": step_of(ThroughData),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_cast_anew(change, gpu):
    experts, optimizer = trained(bank(gated=True))
    assert is_kept(experts)
    CHANGES[change](experts)
    assert_fresh(experts)


def assert_fresh(experts):
    """What a pass takes is of the weights as they are."""
    for name, tensor in copies(experts).items():
        if tensor is not None:
            assert torch.equal(tensor.flatten(), getattr(experts, name).to(HALF).flatten()), name
    assert torch.equal(experts.kept_prototypes(), experts.prototypes())


def writes(name, *index):
    def write(experts):
        getattr(experts, name).data[index] = 7

    return write


@pytest.mark.parametrize(
    "write",
    [
        writes("values"),
        writes("keys", 1, 300),  # one channel, such as pruning clears
        writes("values", 2, slice(None), 5),
        writes("key_bias", 77),
        lambda experts: experts.keys.detach().numpy().__setitem__((0, 511), 7),
    ],
)
def test_writes_that_raise_no_version_are_seen_on_the_cpu(write):
    """Before, one channel of a large matrix could change unseen, with the copies and prototypes as they were."""
    experts = BlockExperts(4, 256, 512, 4, "silu", True)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    copies(experts), experts.kept_prototypes()
    write(experts)
    assert_fresh(experts)


def test_every_single_weight_of_a_small_bank_is_looked_at():
    experts = bank()
    copies(experts), experts.kept_prototypes()
    experts.keys.data[1, 17, 23] += 1
    assert_fresh(experts)


def test_weights_can_be_swapped_while_something_is_kept_of_them():
    """`torch.utils.swap_tensors` refuses tensors to which there is a weak reference, which was ours."""
    experts = bank()
    copies(experts), experts.kept_prototypes()
    torch.utils.swap_tensors(experts.keys, nn.Parameter(experts.keys.detach() * 2))
    assert_fresh(experts)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        experts.load_state_dict({name: t * 2 for name, t in experts.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert_fresh(experts)


def test_on_a_gpu_something_is_kept_in_training_alone_of_what_an_optimiser_has_stepped(gpu):
    """A loop may update weights by hand through .data, and an evaluation exchange them so: nothing tells."""
    other, _ = trained(bank())
    assert not is_kept(bank())
    experts, optimizer = trained(bank())
    assert is_kept(experts)
    with torch.no_grad():
        assert not is_kept(experts)
    assert not is_kept(experts.eval())
    del optimizer
    assert not is_kept(experts.train())


def backward(experts):
    sum(t.float().square().sum() for t in copies(experts).values() if t is not None).backward()


def by_hand(experts):
    for parameter in experts.parameters():
        parameter.data -= 0.1 * parameter.grad
        parameter.grad = None


def perturbed(experts):
    """As minimisers of sharpness do."""
    for parameter in experts.parameters():
        parameter.data.add_(parameter.grad)
    experts.zero_grad()


def average(experts):
    for parameter in experts.parameters():
        parameter.data.lerp_(torch.ones_like(parameter), 0.1)


@pytest.mark.parametrize("change", [by_hand, perturbed])
def test_gradients_that_are_taken_away_tell_of_changes_on_a_gpu(change, gpu):
    """Before, once any optimiser had stepped, such loops trained on what the weights had been at their start."""
    experts, optimizer = trained(bank())
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(3):
        assert_fresh(experts)
        backward(experts)
        change(experts)
    assert_fresh(experts)


@pytest.mark.parametrize("gradients", [torch.enable_grad, torch.no_grad])
def test_averages_that_are_taken_through_data_are_seen_on_a_gpu(gradients, gpu):
    """A teacher in training mode, in a process in which the student's optimiser steps."""
    student, optimizer = trained(bank())
    teacher = copy.deepcopy(student).requires_grad_(False)
    for _ in range(2):
        with gradients():
            assert_fresh(teacher)
        average(teacher)


def test_an_address_that_is_taken_again_is_another_weight(gpu):
    """An allocator gives the memory of a weight that is gone to the one that follows."""
    experts, optimizer = trained(bank())
    copies(experts)
    seen = kept._Everything.by_holder[experts][f"copies in {HALF}"][0][0]
    place = experts.keys.data_ptr()
    buffer = torch.frombuffer(bytearray(1 << 16), dtype=torch.float32)[: experts.keys.numel()]
    experts.keys.data = buffer.view_as(experts.keys)
    object.__setattr__(seen, "place", kept._place(experts.keys))
    assert place != experts.keys.data_ptr() and not seen.holds(experts.keys)


def test_a_closure_computes_with_the_weights_that_it_has(gpu):
    experts, seen = bank(), []
    optimizer = torch.optim.LBFGS([experts.keys], max_iter=3)

    def closure():
        optimizer.zero_grad()
        keys = copies(experts)["keys"]
        seen.append(torch.equal(keys, experts.keys.to(HALF)))
        loss = keys.float().square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(seen) > 2 and all(seen)


def test_a_step_lets_go_of_the_copies():
    """They would stand beside what an optimiser makes."""
    experts, held = bank(), []
    made = copies(experts)
    sum(t.float().sum() for t in made.values() if t is not None).backward()
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: held.append(len(kept._Everything.by_holder)))
    optimizer.step()
    assert held == [0] and len(kept._Everything.by_holder) == 0


def test_copies_go_with_their_weights_and_travel_with_nobody():
    experts = bank()
    copies(experts)
    file = io.BytesIO()
    torch.save(copy.deepcopy(experts), file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert len(kept._Everything.by_holder) == 1 and list(again.state_dict()) == list(experts.state_dict())
    assert torch.equal(copies(again)["keys"], copies(experts)["keys"])
    assert len(kept._Everything.by_holder) == 2
    again.to(torch.float64)
    del experts
    assert len(kept._Everything.by_holder) == 0


def test_a_pass_of_inference_leaves_what_training_can_use():
    experts = bank()
    with torch.inference_mode():
        copies(experts)
    copies(experts)["keys"].float().square().sum().backward()
    assert experts.keys.grad is not None


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
