"""What travels between ranks, packed by Triton and by plain torch, on every mixture of ranks with either."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.support.drawn import given, settings, st
from tests.support.triton import DEVICE
from unifmoe_dist.kernels import select, self_test
from unifmoe_dist.kernels.exchange import TorchPacking
from unifmoe_dist.kernels.exchange_trial import Rank, journey
from unifmoe_dist.kernels.triton import exchange as triton_exchange
from unifmoe_dist.kernels.triton.exchange import TritonPacking


def ranks_of(counts, experts, blocks, dim, dtype=torch.float32, kept=0.4, seed=0) -> list[Rank]:
    """Tokens with random gates, of which one is NaN and those of every fifth token are all 0."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.rand(shape, generator=generator)

    made = []
    for n in counts:
        gates = draw(n, experts * len(counts)) * (draw(n, experts * len(counts)) < kept)
        gates[::5] = 0
        if n > 2:
            gates[1, 0] = float("nan")
        wide = torch.cat([draw(n, 1), gates], dim=1).to(DEVICE)  # as routing makes them: a view
        x, grad = ((draw(n, dim) - 0.5).to(DEVICE, dtype) for _ in range(2))
        made.append(Rank(x, wide[:, 1:], (draw(n, blocks) > 0.5).to(DEVICE), grad))
    return made


def expected(ranks: list[Rank], experts: int) -> list[list[torch.Tensor]]:
    """`journey` from its definition, token by token."""
    made = []
    for place in range(len(ranks)):
        own = slice(place * experts, (place + 1) * experts)
        here = [(r, (r.gates[:, own] != 0).any(1)) for r in ranks]
        rows = [(r.x[at], r.gates[at][:, own], r.blocks[at]) for r, at in here]
        made.append([torch.cat(parts) for parts in zip(*rows, strict=True)])
    for place, r in enumerate(ranks):
        total, grad_x, grad_gates = torch.zeros_like(r.x, dtype=torch.float32), *map(torch.zeros_like, (r.x, r.gates))
        grad_x = grad_x.float()
        for other in range(len(ranks)):
            own = slice(other * experts, (other + 1) * experts)
            active = r.gates[:, own] != 0
            weight = r.gates[:, own].nan_to_num(2.0).sum(1, keepdim=True).to(r.x.dtype) * active.any(1, keepdim=True)
            total += (r.x * weight).float()
            grad_x += (r.grad * weight).float()
            grad_gates[:, own] = torch.where(active, (r.grad.float() * r.x.float()).sum(1, keepdim=True), 0)
        made[place] += [total.to(r.x.dtype), grad_x.to(r.x.dtype), grad_gates]
    return made


def check(counts, experts, blocks, dim, dtype, kept=0.4, seed=0):
    ranks = ranks_of(counts, experts, blocks, dim, dtype, kept, seed)
    size, want = len(ranks), expected(ranks, experts)
    cut = dtype == torch.bfloat16 and DEVICE == "cpu"  # the interpreter cuts float32 off where devices round
    mixed = [TritonPacking if rank % 2 else TorchPacking for rank in range(size)]
    for kinds in ([TritonPacking] * size, [TorchPacking] * size, mixed):
        for got, expect in zip(journey(kinds, ranks), want, strict=True):
            for mine, its in zip(got, expect, strict=True):
                torch.testing.assert_close(mine, its, rtol=8e-3 if cut else 1e-5, atol=1e-6, equal_nan=True)
    both = zip(*(journey([kind] * size, ranks) for kind in (TritonPacking, TorchPacking)), strict=True)
    for fused, plain in [] if cut else both:
        assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(fused, plain, strict=True))


@pytest.mark.parametrize(
    "counts,experts,blocks,dim,dtype",
    [
        ([5], 3, 4, 16, torch.float32),
        ([0, 0], 2, 3, 8, torch.float32),
        ([300, 0], 1, 9, 12, torch.bfloat16),
        ([7, 150, 1, 64], 3, 8, 20, torch.float16),
        ([3, 2], 17, 16, 13, torch.float16),
        ([40, 9], 255, 256, 24, torch.float32),
        ([290, 270, 4], 2, 5, 7, torch.bfloat16),
    ],
)
def test_both_packings_are_the_definition(counts, experts, blocks, dim, dtype):
    check(counts, experts, blocks, dim, dtype)


def test_more_spans_than_are_summed_at_once(monkeypatch):
    monkeypatch.setattr(triton_exchange, "_TILE", 16)
    monkeypatch.setattr(triton_exchange, "_SPANS", 4)
    check([90, 3], 4, 3, 5, torch.float32, kept=0.3)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(2, 17),
    st.integers(1, 40),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.integers(0, 99),
)
def test_any_shape(counts, experts, blocks, dim, dtype, kept, seed):
    check(counts, experts, blocks, dim, dtype, kept, seed)


def test_a_trial_finds_a_wrong_sum(monkeypatch, recwarn):
    """Plain torch then packs, and every rank reads it."""
    monkeypatch.setattr(self_test, "_verdicts", {})
    monkeypatch.setattr(select, "_wants_triton", lambda x: True)
    (r, _) = ranks_of([9, 9], 2, 4, 16)
    given = r.x, r.gates, r.blocks, 2, [1, 1]
    assert isinstance(select.pack_tokens(*given), TritonPacking)
    right = TritonPacking._sum_rows
    monkeypatch.setattr(self_test, "_verdicts", {})
    monkeypatch.setattr(TritonPacking, "_sum_rows", lambda self, rows: right(self, rows).mul_(1.1))
    assert isinstance(select.pack_tokens(*given), TorchPacking)
    assert "the exchange of torch.float32 tokens of width 16 between 2 ranks" in str(recwarn.pop(UserWarning).message)


def test_kernels_are_launched_on_the_device_of_their_tokens(monkeypatch):
    """Triton launches on the current device, whatever the tensors are on."""
    inside, launched = [0], []

    @contextlib.contextmanager
    def device_of(tensor):
        inside[0] += 1
        yield
        inside[0] -= 1

    class Watched:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            launched.append(inside[0])
            return self.kernel[grid]

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for name in [name for name in vars(triton_exchange) if name.endswith("_kernel")]:
        monkeypatch.setattr(triton_exchange, name, Watched(getattr(triton_exchange, name)))
    journey([TritonPacking] * 2, ranks_of([9, 9], 2, 4, 16))
    assert launched == [1] * 2 * 8
