"""The exchange between nodes and inside them equals one rank that holds everything: 2 x 2, 4 x 2 and 2 x 4 ranks."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from tests.support.ranks import run_ranks
from tests.support.sharded import CLOSE, assert_equals_whole, dense_parameters, sharded_layer, whole_layer
from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.methods.topk import TopKConfig, TopKLayer


def tokens(counts: list[int], dim: int, seed: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, dim, generator=generator) for n in counts]


def over_nodes(whole: UniFMoELayer, width: int, group: dist.ProcessGroup | None = None, chunks: int = 1):
    return sharded_layer(whole, group or dist.group.WORLD, "two_level", ranks_per_node=width, dispatch_chunks=chunks)


def random_shapes(rank: int, world: int, width: int, chunks: int, examples: int) -> None:
    """Uneven, empty and all-empty ranks; masks of 1 to 3 bytes; every second layer gated."""
    choose = random.Random(world * width)
    for example in range(examples):
        experts, blocks = world * choose.randint(1, 3), choose.randint(2, 17)
        dim, hidden = experts + 1 + choose.randint(0, 9), blocks * choose.randint(1, 4)
        config = UniFMoEConfig(dim, hidden, experts, blocks, gated=example % 2 == 1)
        whole = whole_layer(config, seed=example)
        with torch.no_grad():
            whole.router.weight.mul_(choose.choice([0.1, 1.0, 5.0]))
        parts = tokens([choose.choice([0, 1, 2, 11]) if example else 0 for _ in range(world)], dim, example)
        layer = over_nodes(whole, width, chunks=chunks)
        assert_equals_whole(layer, whole, parts, rank, dist.group.WORLD, rtol=2e-4, atol=5e-5)


def one_expert_and_nan(rank: int, world: int, width: int) -> None:
    config = UniFMoEConfig(30, 24, 2 * world, 6)
    whole = whole_layer(config)
    parts = tokens([3] * world, 30)
    parts[0][0, 0] = float("nan")
    assert_equals_whole(over_nodes(whole, width), copy.deepcopy(whole), parts, rank, dist.group.WORLD, **CLOSE)
    with torch.no_grad():
        whole.router.weight[1:] = 0
        whole.router.weight[-1] = 3.0
    parts = [part.abs() for part in tokens([4] * world, 30)]
    layer = over_nodes(whole, width)
    assert_equals_whole(layer, whole, parts, rank, dist.group.WORLD, **CLOSE)


def frozen(rank: int, world: int, width: int) -> None:
    """Whatever is frozen on whichever rank, ranks do the same collectives, and gradients are those of one rank."""
    config = UniFMoEConfig(30, 24, 2 * world, 6)
    parts = tokens([3 + r % 2 for r in range(world)], 30)
    for case in range(5):
        whole = whole_layer(config)
        layer = over_nodes(whole, width)
        x, everything = parts[rank].clone(), torch.cat(parts)
        if case in (1, 2):  # no expert is trained; none but the last rank's
            layer.experts.requires_grad_(case == 2 and rank == world - 1)
        if case in (3, 4):
            layer.router.requires_grad_(False)
        x.requires_grad_(case != 3 and (case != 4 or rank == 0))
        with torch.set_grad_enabled(True):
            everything.requires_grad_()
            want, got = whole(everything), layer(x)
        want.square().sum().backward()
        got.square().sum().backward()
        sizes = [len(part) for part in parts]
        torch.testing.assert_close(got, want.split(sizes)[rank], **CLOSE)
        if x.requires_grad:
            torch.testing.assert_close(x.grad, everything.grad.split(sizes)[rank], **CLOSE)
        own = whole.experts.keys.grad[layer.first_expert :][: layer.num_local_experts]
        if layer.experts.keys.requires_grad:
            torch.testing.assert_close(layer.experts.keys.grad, own, **CLOSE)


def repeated(rank: int, world: int, width: int) -> None:
    """Steps repeat bit for bit, dropout and recomputation included; evaluation too, in bfloat16."""
    config = UniFMoEConfig(30, 24, 2 * world, 6, hidden_dropout=0.3)
    layer = over_nodes(whole_layer(config), width, chunks=2)
    (x,) = tokens([9 + rank], 30, rank)
    steps = []
    for recompute in (False, False, True):
        layer.zero_grad()
        torch.manual_seed(rank)
        leaf = x.clone().requires_grad_()
        y = checkpoint(layer, leaf, use_reentrant=False) if recompute else layer(leaf)
        y.square().sum().backward()
        steps.append([y, leaf.grad, *(p.grad for p in layer.parameters())])
    for again in steps[1:]:
        assert all(torch.equal(a, b) for a, b in zip(steps[0], again, strict=True))
    layer.eval().bfloat16()
    with torch.no_grad():
        half = x.bfloat16()
        torch.testing.assert_close(layer(half).float(), layer.float()(half.float()), rtol=0.1, atol=0.1)


def sgd(rank: int, world: int, width: int) -> None:
    """SGD shows gradients that are scaled; losses are one rank's."""
    config = UniFMoEConfig(30, 24, 2 * world, 6)
    whole = whole_layer(config)
    layer, parts, losses = over_nodes(whole, width), tokens([2 + r % 3 for r in range(world)], 30), []
    for model, x in ((whole, torch.cat(parts)), (layer, parts[rank])):
        losses.append([])
        for _ in range(5):
            model.zero_grad()
            loss = model(x).square().sum() / 32
            loss.backward()
            total = loss.detach().clone()
            if model is layer:
                dist.all_reduce(total)
                for parameter in dense_parameters(layer):
                    dist.all_reduce(parameter.grad)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
            losses[-1].append(float(total))
    assert losses[0][-1] < 0.9 * losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def other_method(rank: int, world: int, width: int) -> None:
    config = TopKConfig(30, 24, 2 * world, 6, top_k=2)
    torch.manual_seed(0)
    whole, layer = TopKLayer(config), TopKLayer(config, dist.group.WORLD, "two_level", ranks_per_node=width)
    layer.load_state_dict(
        {n: t if "experts" not in n else t.chunk(world)[rank] for n, t in whole.state_dict().items()}, strict=False
    )
    parts = tokens([3] * world, 30)
    torch.testing.assert_close(layer.eval()(parts[rank]), whole.eval()(torch.cat(parts)).chunk(world)[rank], **CLOSE)


def four_ranks(rank: int, world: int) -> str:
    random_shapes(rank, world, 2, 1, 6)
    random_shapes(rank, world, 2, 3, 4)
    one_expert_and_nan(rank, world, 2)
    frozen(rank, world, 2)
    repeated(rank, world, 2)
    sgd(rank, world, 2)
    other_method(rank, world, 2)
    return type(over_nodes(whole_layer(UniFMoEConfig(30, 24, 4, 6)), 2).dispatcher).__name__


def test_two_nodes_of_two_ranks():
    assert run_ranks(4, four_ranks) == ["TwoLevelDispatcher"] * 4


def eight_ranks(rank: int, world: int) -> bool:
    for width in (2, 4):
        random_shapes(rank, world, width, 1, 3)
        one_expert_and_nan(rank, world, width)
        sgd(rank, world, width)
    halves = [dist.new_group(ranks) for ranks in ([0, 1, 2, 3], [4, 5, 6, 7])]
    whole = whole_layer(UniFMoEConfig(30, 24, 4, 6))
    layer = over_nodes(whole, 2, halves[rank // 4])
    assert_equals_whole(layer, whole, tokens([3, 0, 4, 1], 30), rank % 4, halves[rank // 4], **CLOSE)
    return True


def test_eight_ranks_as_four_nodes_and_as_two():
    """And two groups, of two nodes each, beside each other."""
    assert all(run_ranks(8, eight_ranks))
