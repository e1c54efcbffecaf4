"""Sharded experts on real gloo ranks equal one rank that holds everything, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.dispatch.alltoall import _pack_bits, _unpack_bits
from unifmoe_dist.errors import UserError

CONFIG = UniFMoEConfig(12, 40, 4, 10)


def full_layer() -> UniFMoELayer:
    torch.manual_seed(1)
    layer = UniFMoELayer(CONFIG)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return layer


def shard(full: UniFMoELayer, group) -> UniFMoELayer:
    layer = UniFMoELayer(CONFIG, expert_group=group, dispatcher="alltoall")
    layer.router.load_state_dict(full.router.state_dict())
    for expert in ["shared", *range(CONFIG.num_experts)]:
        layer.load_ffn(expert, *full.ffn_weights(expert))
    return layer


def tokens(counts: list[int], case: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    parts = [torch.randn(n, CONFIG.model_dim, generator=generator) for n in counts]
    if case == "skewed":
        return [p.abs() for p in parts]
    if case == "nan":
        parts[0][0, 0] = float("nan")
    return parts


def prepare(case: str) -> UniFMoELayer:
    full = full_layer()
    if case == "skewed":
        with torch.no_grad():
            full.router.weight[1:] = 0
            full.router.weight[4] = 3.0
    return full


def sharded_step(rank, world, counts, case):
    layer = shard(prepare(case), dist.group.WORLD)
    x = tokens(counts, case)[rank].requires_grad_()
    y = layer(x)
    (y * torch.linspace(-1, 1, CONFIG.model_dim)).sum().backward()
    dense = [p.grad for p in (*layer.router.parameters(), *layer.shared.parameters())]
    for grad in dense:
        dist.all_reduce(grad)
    return y.detach(), x.grad, dense, [p.grad for p in layer.experts.parameters()]


@pytest.mark.parametrize(
    "world,counts,case",
    [
        (2, [5, 9], "plain"), (2, [0, 6], "plain"), (2, [0, 0], "plain"), (2, [4, 4], "skewed"),
        (4, [3, 0, 7, 1], "plain"), (1, [6], "plain"), (2, [3, 4], "nan"),
    ],
)  # fmt: skip
def test_sharded_equals_one_rank(world, counts, case):
    results = run_ranks(world, sharded_step, counts, case)
    full = prepare(case)
    x = torch.cat(tokens(counts, case)).requires_grad_()
    y = full(x)
    (y * torch.linspace(-1, 1, CONFIG.model_dim)).sum().backward()
    close = dict(rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(torch.cat([r[0] for r in results]), y.detach(), **close)
    torch.testing.assert_close(torch.cat([r[1] for r in results]), x.grad, **close)
    want_dense = [p.grad for p in (*full.router.parameters(), *full.shared.parameters())]
    for got, want in zip(results[0][2], want_dense, strict=True):
        torch.testing.assert_close(got, want, **close)
    for index, want in enumerate(p.grad for p in full.experts.parameters()):
        torch.testing.assert_close(torch.cat([r[3][index] for r in results]), want, **close)


def half_precision(rank, world):
    layer = shard(full_layer(), dist.group.WORLD).bfloat16()
    x = torch.randn(6, 12, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    return x.grad.dtype, bool(x.grad.isfinite().all())


def test_half_precision_crosses():
    assert run_ranks(2, half_precision) == [(torch.bfloat16, True)] * 2


def read_any(rank, world):
    layer = shard(full_layer(), dist.group.WORLD)
    return [t for t in layer.ffn_weights((rank + 1) % 2 * 3)]  # rank 0 asks for expert 3, rank 1 for expert 0


def test_any_rank_reads_any_expert():
    full = full_layer()
    results = run_ranks(2, read_any)
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
        bits = _pack_bits(mask)
        assert bits.shape == (7, (blocks + 7) // 8) and torch.equal(_unpack_bits(bits, blocks), mask)
    assert _unpack_bits(_pack_bits(torch.zeros(0, 5, dtype=torch.bool)), 5).shape == (0, 5)
