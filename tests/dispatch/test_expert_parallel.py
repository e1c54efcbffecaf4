"""Sharded experts on real gloo ranks equal one rank that holds everything, forward and backward."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from tests.support.sharded import CLOSE, EXCHANGES, assert_equals_whole, dense_parameters, sharded_layer, whole_layer
from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.errors import UserError
from unifmoe_dist.kernels.bits import pack_bits, unpack_bits

CONFIG = UniFMoEConfig(12, 40, 4, 10)
WEIGHTS = torch.linspace(-1, 1, CONFIG.model_dim)


def tokens(counts: list[int], case: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    parts = [torch.randn(n, CONFIG.model_dim, generator=generator) for n in counts]
    if case == "skewed":
        return [p.abs() for p in parts]
    if case == "nan":
        parts[0][0, 0] = float("nan")
    return parts


def prepare(case: str) -> UniFMoELayer:
    full = whole_layer(CONFIG)
    if case == "skewed":
        with torch.no_grad():
            full.router.weight[1:] = 0
            full.router.weight[4] = 3.0
    return full


def sharded_step(rank, world, dispatcher, counts, case):
    layer = copy.deepcopy(sharded_layer(prepare(case), dist.group.WORLD, dispatcher))
    x = tokens(counts, case)[rank].requires_grad_()
    y = layer(x)
    (y * WEIGHTS).sum().backward()
    dense = [p.grad for p in dense_parameters(layer)]
    for grad in dense:
        dist.all_reduce(grad)
    return y.detach(), x.grad, dense, [p.grad for p in layer.experts.parameters()]


@pytest.mark.parametrize("dispatcher", EXCHANGES)
@pytest.mark.parametrize(
    "world,counts,case",
    [
        (2, [5, 9], "plain"),
        (2, [0, 6], "plain"),
        (2, [0, 0], "plain"),
        (2, [4, 4], "skewed"),
        (4, [3, 0, 7, 1], "plain"),
        (1, [6], "plain"),
        (2, [3, 4], "nan"),
    ],
)
def test_sharded_equals_one_rank(world, counts, case, dispatcher):
    results = run_ranks(world, sharded_step, dispatcher, counts, case)
    full = prepare(case)
    x = torch.cat(tokens(counts, case)).requires_grad_()
    y = full(x)
    (y * WEIGHTS).sum().backward()
    torch.testing.assert_close(torch.cat([r[0] for r in results]), y.detach(), **CLOSE)
    torch.testing.assert_close(torch.cat([r[1] for r in results]), x.grad, **CLOSE)
    for got, want in zip(results[0][2], [p.grad for p in dense_parameters(full)], strict=True):
        torch.testing.assert_close(got, want, **CLOSE)
    for index, want in enumerate(p.grad for p in full.experts.parameters()):
        torch.testing.assert_close(torch.cat([r[3][index] for r in results]), want, **CLOSE)


def random_shapes(rank, world, dispatcher, examples):
    choose = random.Random(world)
    for example in range(examples):
        experts, blocks = world * choose.randint(1, 3), choose.randint(2, 17)
        width, hidden, bias = experts + 1 + choose.randint(0, 9), blocks * choose.randint(1, 4), choose.random() < 0.7
        config = UniFMoEConfig(width, hidden, experts, blocks, bias=bias, gated=example % 2 == 1)
        whole = whole_layer(config, seed=example)
        with torch.no_grad():
            whole.router.weight.mul_(choose.choice([0.1, 1.0, 5.0]))
        parts = [torch.randn(choose.choice([0, 1, 2, 11]), config.model_dim) for _ in range(world)]
        layer = sharded_layer(whole, dist.group.WORLD, dispatcher)
        assert_equals_whole(layer, whole, parts, rank, dist.group.WORLD, rtol=2e-4, atol=5e-5)
    return True


@pytest.mark.parametrize("dispatcher", EXCHANGES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_random_shapes(world, dispatcher):
    """K equal to the number of ranks, one expert, no tokens, one token, masks of 1 to 3 bytes."""
    assert all(run_ranks(world, random_shapes, dispatcher, 12))


def half_of_the_world(rank, world, dispatcher, groups):
    made = [dist.new_group(ranks) for ranks in groups]
    mine = next(i for i, ranks in enumerate(groups) if rank in ranks)
    whole = whole_layer(CONFIG)
    parts = [torch.randn(3 + r, 12, generator=torch.Generator().manual_seed(r)) for r in groups[mine]]
    layer = sharded_layer(whole, made[mine], dispatcher)
    assert_equals_whole(layer, whole, parts, groups[mine].index(rank), made[mine], **CLOSE)
    return True


@pytest.mark.parametrize("dispatcher", EXCHANGES)
def test_groups_smaller_than_the_world(dispatcher):
    """Every collective, those of the backward pass included, must stay inside its group."""
    assert all(run_ranks(4, half_of_the_world, dispatcher, [[0, 2], [1, 3]]))


def train(layer, x, target, group, steps):
    losses = []
    for _ in range(steps):
        loss = (layer(x) - target).square().sum() / 16
        total = loss.detach().clone()
        layer.zero_grad()
        loss.backward()
        if group is not None:
            dist.all_reduce(total, group=group)
            for parameter in dense_parameters(layer):
                dist.all_reduce(parameter.grad, group=group)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter -= 0.05 * parameter.grad
        losses.append(float(total))
    return losses


def sharded_training(rank, world, dispatcher, x, target):
    layer = sharded_layer(whole_layer(CONFIG), dist.group.WORLD, dispatcher)
    return train(layer, x.split([5, 11])[rank], target.split([5, 11])[rank], dist.group.WORLD, 12)


@pytest.mark.parametrize("dispatcher", EXCHANGES)
def test_sgd_losses_equal_one_rank(dispatcher):
    """SGD shows expert gradients that are scaled; Adam would hide them."""
    torch.manual_seed(3)
    x, target = torch.randn(16, 12), torch.randn(16, 12)
    want = train(whole_layer(CONFIG), x, target, None, 12)
    assert want[-1] < 0.8 * want[0]
    for losses in run_ranks(2, sharded_training, dispatcher, x, target):
        assert losses == pytest.approx(want, rel=1e-4)


def half_precision(rank, world, dispatcher):
    """An odd width makes the packed gates start at any byte, and one row or none hides that from contiguous()."""
    for dtype, tolerance in ((torch.bfloat16, 0.05), (torch.float16, 0.01)):
        for counts in ([6, 3], [1, 0]):
            whole = whole_layer(UniFMoEConfig(13, 40, 4, 10)).to(dtype)
            parts = [torch.randn(n, 13, generator=torch.Generator().manual_seed(n)).to(dtype) for n in counts]
            layer = sharded_layer(whole, dist.group.WORLD, dispatcher).to(dtype)
            assert_equals_whole(layer, whole, parts, rank, dist.group.WORLD, rtol=tolerance, atol=4 * tolerance)
    return True


@pytest.mark.parametrize("dispatcher", EXCHANGES)
def test_half_precision_crosses(dispatcher):
    assert all(run_ranks(2, half_precision, dispatcher))


def read_any(rank, world, dispatcher, config):
    layer = sharded_layer(whole_layer(config), dist.group.WORLD, dispatcher)
    return [t for t in layer.ffn_weights((rank + 1) % 2 * 3)]  # rank 0 asks for expert 3, rank 1 for expert 0


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dispatcher", EXCHANGES)
def test_any_rank_reads_any_expert(dispatcher, gated):
    config = replace(CONFIG, gated=gated)
    full = whole_layer(config)
    results = run_ranks(2, read_any, dispatcher, config)
    for got, expert in zip(results, (3, 0), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, full.ffn_weights(expert), strict=True))


def uneven_experts(rank, world):
    with pytest.raises(UserError, match="4.*3|3.*4"):
        UniFMoELayer(CONFIG, expert_group=dist.group.WORLD)
    with pytest.raises(UserError, match="local"):
        UniFMoELayer(UniFMoEConfig(12, 40, 3, 10), expert_group=dist.group.WORLD, dispatcher="local")
    return True


def test_group_errors():
    assert all(run_ranks(3, uneven_experts))


def test_block_masks_survive_packing():
    for blocks in (2, 8, 9, 16, 33):
        mask = torch.rand(7, blocks) > 0.5
        bits = pack_bits(mask)
        assert bits.shape == (7, (blocks + 7) // 8) and torch.equal(unpack_bits(bits, blocks), mask)
    assert unpack_bits(pack_bits(torch.zeros(0, 5, dtype=torch.bool)), 5).shape == (0, 5)


def other_ranks_group(rank, world):
    groups = [dist.new_group([0]), dist.new_group([1])]
    with pytest.raises(UserError, match="expert_group"):
        UniFMoELayer(UniFMoEConfig(12, 40, 4, 10), expert_group=groups[1 - rank])
    return True


def test_a_group_of_other_ranks_is_refused():
    assert all(run_ranks(2, other_ranks_group))
