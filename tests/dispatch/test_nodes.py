"""Which ranks are on which node: found from host names, given for a layer, or for a whole job."""

from __future__ import annotations

import os
import socket
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.support.ranks import run_ranks
from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.config import ModelConfig, ParallelConfig, TrainConfig
from unifmoe_dist.dispatch.nodes import ranks_on_each
from unifmoe_dist.errors import UserError

CONFIG = UniFMoEConfig(12, 40, 4, 10)


def test_nodes_have_equally_many_ranks_that_stand_together():
    assert ranks_on_each(["a", "a", "b", "b"]) == 2
    assert ranks_on_each(["a", "b", "c"]) == 1
    assert ranks_on_each(["a"] * 4) == 4
    with pytest.raises(UserError, match="equally many ranks of expert_group, but it has 2 on a, 1 on b; start"):
        ranks_on_each(["a", "a", "b"])
    with pytest.raises(UserError, match="must stand together in expert_group, but it has rank 0 on a, rank 1 on b"):
        ranks_on_each(["a", "b", "a", "b"])


@pytest.mark.parametrize(
    "world,size,placement,width,want",
    [
        (8, 4, "near", 2, 2),
        (8, 4, "near", 4, 4),
        (8, 4, "near", 8, 4),
        (8, 2, "near", 1, 1),
        (8, 4, "far", 4, 2),
        (8, 2, "far", 4, 1),
        (8, 2, "far", 2, 1),
        (8, 8, "near", None, None),
        (12, 4, "near", 6, "leaves groups of parallel.expert_parallel_size 4 with different numbers of ranks"),
        (12, 4, "far", 4, "leaves groups of parallel.expert_parallel_size 4 with different numbers of ranks"),
        (8, 4, "near", 3, "parallel.ranks_per_node 3 does not divide the world size 8"),
    ],
)
def test_nodes_of_a_job(world, size, placement, width, want):
    """Each group's ranks on a node, counted one by one where the numbers fit."""
    parallel = ParallelConfig(expert_parallel_size=size, expert_placement=placement, ranks_per_node=width)
    config = TrainConfig(parallel=parallel, model=ModelConfig(num_experts=8))
    if isinstance(want, str):
        with pytest.raises(UserError, match=want):
            config.group_ranks_per_node(world)
        return
    assert config.group_ranks_per_node(world) == want
    if width is not None:
        stride = 1 if placement == "near" else world // size
        firsts = range(0, world, size) if placement == "near" else range(stride)
        for first in firsts:
            assert ranks_on_each([rank // width for rank in range(first, first + size * stride, stride)]) == want


def dispatchers(rank, world, hosts, name, given, told=None):
    environment = {"LOCAL_WORLD_SIZE": told or "unknown"}
    with patch.object(socket, "gethostname", lambda: hosts[rank]), patch.dict(os.environ, environment):
        try:
            made = UniFMoELayer(CONFIG, dist.group.WORLD, name, ranks_per_node=given[rank])
        except UserError as error:
            return str(error)
    return type(made.dispatcher).__name__


def all_dispatchers(rank, world, cases):
    return [dispatchers(rank, world, *case) for case in cases]


def test_what_auto_and_two_level_take():
    nowhere, two, uneven = [None] * 4, ["a", "a", "b", "b"], ["a", "a", "a", "b"]
    cases = {
        "two nodes": (two, "auto", nowhere),
        "two nodes, asked for": (two, "two_level", nowhere),
        "one node": (["a"] * 4, "auto", nowhere),
        "one node, asked for": (["a"] * 4, "two_level", nowhere),
        "a rank on each": (["a", "b", "c", "d"], "auto", nowhere),
        "uneven": (uneven, "auto", nowhere),
        "uneven, asked for": (uneven, "two_level", nowhere),
        "given": (["a"] * 4, "auto", [2] * 4),
        "one node, says the launcher": (two, "auto", nowhere, "4"),
        "not two": (two, "alltoall", nowhere),
        "no divisor": (two, "auto", [3] * 4),
        "ranks differ": (two, "two_level", [2, 2, 2, 1]),
    }
    ranks = run_ranks(4, all_dispatchers, list(cases.values()))
    assert all(rank == ranks[0] for rank in ranks)
    found = dict(zip(cases, ranks[0], strict=True))
    two_level = ("two nodes", "two nodes, asked for", "given")
    flat = ("one node", "one node, asked for", "one node, says the launcher", "a rank on each", "uneven", "not two")
    assert {found.pop(case) for case in two_level} == {"TwoLevelDispatcher"}
    assert {found.pop(case) for case in flat} == {"AllToAllDispatcher"}
    assert "3 on a, 1 on b" in found["uneven, asked for"]
    assert "ranks_per_node 3 must divide the 4 ranks of expert_group" in found["no divisor"]
    assert "must be the same on all ranks of expert_group, but it is 2, 2, 2, 1 by rank" in found["ranks differ"]
