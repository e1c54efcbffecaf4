"""Bytes between ranks: the formulas against counts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from unifmoe_dist.studies.scaling.volume import (
    Traffic,
    alltoall_volume,
    counting_bytes,
    measure_volume,
    minimum_volume,
    tutel_volume,
)

# -- volumes ------------------------------------------------------------------------------------------------


def random_gates(tokens: int, experts: int) -> torch.Tensor:
    gates = torch.rand(tokens, experts) * (torch.rand(tokens, experts) > 0.6)
    gates[0, 0] = float("nan")
    gates[1] = 0
    return gates


@pytest.mark.parametrize("experts,size,rank,blocks", [(6, 2, 1, 8), (12, 4, 0, 9), (64, 2, 0, 33), (4, 1, 0, 8)])
def test_volumes_equal_brute_force(experts, size, rank, blocks):
    torch.manual_seed(experts)
    gates, row = random_gates(20, experts), 24
    local = experts // size
    forward = backward = ours = 0
    for token in range(20):
        for other in range(size):
            here = sum(bool(g != 0) for g in gates[token, other * local : (other + 1) * local])
            if other == rank or not here:
                continue
            forward += row + -(-blocks // 8) + 4 * here + row
            backward += row + row + 4 * here
            ours += -(-(blocks + local) // 8) - -(-blocks // 8)
    traffic = Traffic.of(gates, blocks, row, size, rank)
    minimum, sent = minimum_volume(traffic), alltoall_volume(traffic)
    assert (minimum.forward, minimum.backward) == (forward, backward)
    starts = traffic.crossings * 4 / 128
    assert (sent.forward, sent.backward) == (pytest.approx(forward + ours + starts + 16 * (size - 1)), backward)
    assert traffic.largest_load == max(sum(bool(g != 0) for g in gates[:, e]) for e in range(experts))
    padded = torch.zeros(experts, 5, row, dtype=torch.uint8)  # (K, capacity, D) of a rank, one way
    assert tutel_volume(traffic, 5).forward == 2 * (padded.numel() - padded[:local].numel())


def volumes(rank, world, *args):
    return measure_volume(*args)


@pytest.mark.parametrize("world,experts,skewed", [(2, 64, False), (2, 6, True), (4, 16, True)])
def test_alltoall_sends_the_formula_and_at_most_the_minimum_plus_5_percent(world, experts, skewed):
    values = run_ranks(world, volumes, experts, skewed, 1, 100, 384, 8)[0]
    aligning = (values["group_size"] - 1) * (21 + 17) / 100  # at most, per token
    assert values["formula"] <= values["alltoall"] <= values["formula"] + aligning
    assert values["minimum"] < values["alltoall"] <= 1.05 * values["minimum"]
    assert values["tutel"] > values["alltoall"]
    assert (values["load_imbalance"] > 1.5) == skewed


@pytest.mark.parametrize("experts,skewed", [(16, True), (64, False)])
def test_two_level_sends_at_most_the_least_plus_5_percent_between_nodes(experts, skewed):
    values = run_ranks(4, volumes, experts, skewed, 2, 100, 384, 8)[0]
    telling = 4 * 2 * 2 / 100  # of what goes to each rank of the node, int32 and per token
    aligning = (21 + 17) / 100
    assert values["formula"] <= values["two_level"] - telling <= values["formula"] + aligning
    assert values["minimum"] < values["two_level"] <= 1.05 * values["minimum"]
    assert values["tutel"] > values["alltoall"] > 1.2 * values["two_level"]


def tutel_bytes(rank, world):
    """Bytes that Tutel's exchange hands to the collective, and its padded volume by the formula."""
    from unifmoe_dist.dispatch.tutel import TutelDispatcher

    torch.manual_seed(rank)
    x, gates = torch.randn(50, 384, requires_grad=True), random_gates(50, 6).nan_to_num(0.5).requires_grad_()
    traffic = Traffic.of(gates, 8, 4 * 384, world, rank)
    capacity = torch.tensor(traffic.largest_load)
    dist.all_reduce(capacity, op=dist.ReduceOp.MAX)
    with counting_bytes() as count:
        exchange = TutelDispatcher(dist.group.WORLD).dispatch(x, gates, torch.rand(50, 8) > 0.5)
        exchange.compute(lambda rows: rows.x * rows.gates.sum(1, keepdim=True))
        exchange.total().sum().backward()
    return count.bytes, tutel_volume(traffic, int(capacity)).total


@pytest.mark.tutel
def test_padded_volume_is_what_tutel_sends():
    for counted, formula in run_ranks(2, tutel_bytes):
        assert formula < counted < 1.01 * formula  # the block masks travel beside what Tutel would send
