"""What is kept of weights is kept only while they stay: whatever changes them is seen, and nothing outlives them."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from tests.support.kept import (
    HALF,
    as_on_a_gpu,  # noqa: F401  the fixture gpu
    bank,
    copies,
    is_kept,
    nothing_yet,  # noqa: F401
)
from unifmoe_dist import kept
from unifmoe_dist.experts import BlockExperts


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
