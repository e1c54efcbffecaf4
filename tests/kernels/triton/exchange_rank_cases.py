"""Layers whose experts are spread over gloo ranks that pack in Triton's interpreter, against one rank."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.dispatch import test_exchange, test_expert_parallel
from tests.support.host_waits import host_waits
from tests.support.ranks import run_ranks
from tests.support.sharded import CLOSE, assert_equals_whole, sharded_layer, whole_layer
from unifmoe_dist import UniFMoEConfig, kept
from unifmoe_dist.kernels import select, use_kernels


def packed_by_triton(rank, world, ranks, function, *args):
    """A function of another test on ranks of which those in `ranks` pack in Triton; experts stay in plain torch."""
    with patch.object(select, "_triton_carries", lambda *_: rank in ranks):
        return function(rank, world, *args)


SLOW = pytest.mark.slow  # ranks that interpret; they run with -m slow


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "world,ranks", [(2, [1]), *(pytest.param(*case, marks=SLOW) for case in [(1, [0]), (2, [0, 1]), (4, [0, 1, 2, 3])])]
)
def test_random_shapes(world, ranks):
    """Widths, blocks and experts that are no multiples of anything, ranks without tokens, plain and gated experts."""
    examples = 8 // world
    results = run_ranks(world, packed_by_triton, ranks, test_expert_parallel.random_shapes, "alltoall", examples)
    assert all(results)


@pytest.mark.parametrize("ranks", [[0, 1], pytest.param([0], marks=SLOW)])
@pytest.mark.parametrize(
    "counts,case", [([3, 4], "nan"), ([0, 6], "plain"), pytest.param([4, 4], "skewed", marks=SLOW)]
)
def test_the_same_bits_whatever_packs(counts, case, ranks):
    """Outputs and every gradient, against ranks that all pack in plain torch."""
    function, given = test_expert_parallel.sharded_step, ("alltoall", counts, case)
    results = [run_ranks(2, packed_by_triton, some, function, *given) for some in (ranks, [])]
    for fused, plain in zip(*results, strict=True):
        for got, want in zip([*fused[:2], *fused[2], *fused[3]], [*plain[:2], *plain[2], *plain[3]], strict=True):
            assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)) and torch.equal(got.isnan(), want.isnan())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("function", [test_exchange.differing_needs, test_exchange.odd_graphs])
def test_backward_passes_that_could_leave_a_rank_waiting(function):
    assert all(run_ranks(2, packed_by_triton, [0, 1], function, "alltoall"))


@SLOW
def test_activation_checkpointing():
    assert all(run_ranks(2, packed_by_triton, [0, 1], test_exchange.two_layers, "alltoall", False, True))


@SLOW
def test_half_precision():
    assert all(run_ranks(2, packed_by_triton, [0, 1], test_expert_parallel.half_precision, "alltoall"))


def fused_layer(rank, world, config):
    """Everything in Triton: one step against a whole layer, and where the host waits in another with masked tokens."""
    whole, width = whole_layer(config), config.model_dim
    parts = [torch.randn(n, width, generator=torch.Generator().manual_seed(n)) for n in (5, 3)]
    # On a device no weights are compared to see whether they have changed.
    with use_kernels("triton"), patch.object(kept, "_sample", lambda weight: None):
        layer = sharded_layer(whole, dist.group.WORLD, "alltoall")
        assert_equals_whole(layer, whole, parts, rank, dist.group.WORLD, **CLOSE)
        x, mask = torch.randn(2, 3, width, requires_grad=True), torch.tensor([[1, 0, 1], [0, 0, 0]]) * (1 - rank)
        with host_waits() as forward:
            y = layer(x, mask)
        with host_waits() as backward:
            y.square().sum().backward()
    with host_waits() as plain:
        layer(x, mask)
    assert "nonzero" in plain  # on the CPU, where nothing waits for a device
    assert not y[mask == 0].any() and not x.grad[mask == 0].any()
    return forward, backward


@pytest.mark.timeout(300)
@pytest.mark.parametrize("config", [UniFMoEConfig(16, 64, 4, 4), UniFMoEConfig(20, 63, 2, 9, gated=True)], ids=str)
def test_one_wait_in_a_forward_pass_and_none_in_a_backward_pass(config):
    """Where all tokens of a rank are masked too, a rank has one expert, and nothing is a multiple of 8."""
    for forward, backward in run_ranks(2, fused_layer, config):
        assert forward == ["tolist"] and backward == []
