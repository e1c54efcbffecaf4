"""Passes that are lent memory, as CUDA graphs are: theirs are the results of passes that take their own."""

from __future__ import annotations

import pytest
import torch

from tests.support.triton import (
    DEVICE,
    bank,
    random,
    random_gates,
    without_tuning,  # noqa: F401
)
from unifmoe_dist.kernels.scratch import Scratch, lending
from unifmoe_dist.kernels.triton.ffn import TritonOptions, triton_block_ffn


class OnePass:
    """Forward and backward of experts over some tokens, and what they must give."""

    def __init__(self, tokens, gated, options):
        self.experts, self.shared = (bank(count, 32, 96, 2, gated=gated) for count in (3, 1))
        self.x, self.gates = random(tokens, 32).requires_grad_(), random_gates(tokens, 4).requires_grad_()
        self.blocks, self.grad, self.options = random(tokens, 2) > 0, random(tokens, 32), options
        self.leaves = [self.x, self.gates, *self.experts.parameters(), *self.shared.parameters()]
        self.forward()
        self.want = [self.y.detach().clone(), *self.backward()]

    def forward(self):
        banks = self.experts.weights(), self.shared.weights()
        self.y = triton_block_ffn(self.x, self.gates, self.blocks, *banks, self.options)

    def backward(self):
        return torch.autograd.grad(self.y, self.leaves, self.grad)

    def check(self):
        got = [self.y.detach(), *self.backward()]
        assert all(torch.equal(one, other) for one, other in zip(got, self.want, strict=True))


def test_what_no_trial_has_told_is_ones_own():
    """A capture that asks for more than its trial did has memory of its own graph for it."""
    scratch, device = Scratch(held := {}), torch.device(DEVICE)
    scratch.take("rows", (2, 3), torch.float32, device)
    scratch.hold(device)
    few = scratch.take("rows", (3,), torch.float32, device)
    assert few.data_ptr() == held["rows"].data_ptr()
    for name, shape in (("rows", (5, 3)), ("total", (2,))):
        other = scratch.take(name, shape, torch.float32, device)
        assert other.shape == shape and other.data_ptr() != held["rows"].data_ptr()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("options", [TritonOptions(), TritonOptions(workspace_bytes=8_000)], ids=["whole", "overflow"])
def test_passes_share_what_they_are_lent(gated, options):
    torch.manual_seed(0)
    passes, held, scratches = [OnePass(tokens, gated, options) for tokens in (40, 70)], {}, []
    for one in passes:
        scratch = Scratch(held)
        with lending(scratch):
            one.forward()  # tells how much it takes
        one.backward()
        scratch.hold(torch.device(DEVICE))
        scratches.append(scratch)
    assert {"rows", "total", "hidden"} <= {*held} and all(buffer.numel() for buffer in held.values())
    for order in ((0, 1), (1, 0)):
        for one, scratch in zip(passes, scratches, strict=True):
            with lending(scratch):
                one.forward()
        for number in order:  # one's backward pass comes after the other's, which has written over what it is lent
            for buffer in held.values():
                buffer.fill_(255)  # NaN
            passes[number].check()
