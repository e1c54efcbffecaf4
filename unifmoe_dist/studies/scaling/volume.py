"""Bytes that one UniF-MoE layer moves between ranks: the least possible, ours, and Tutel's for the same routing.

All figures count what leaves a rank for another one; what stays is free. Formulas attribute bytes to the rank whose
tokens cause them, so summing over the ranks of an expert-parallel group gives what all of them send.

The least that any exchange of whole tokens must send, for each token and each remote rank that holds at least one of
its active experts:

    forward    model_dim * itemsize      the token
               ceil(B / 8)               its block mask
               4 * (active experts there)    their float32 gates
               model_dim * itemsize      one summed row back
    backward   model_dim * itemsize      gradient of the row
               model_dim * itemsize      gradient of the token
               4 * (active experts there)    gradients of the gates

Saying which experts the gates belong to, and how many rows come, is not part of this minimum: it counts against us.

Between nodes the same holds of nodes in the place of ranks: for each token and each other node with one of its experts.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from unifmoe_dist.dispatch import alltoall
from unifmoe_dist.dispatch.alltoall import AllToAllDispatcher
from unifmoe_dist.dispatch.nodes import nodes_of
from unifmoe_dist.dispatch.protocol import Dispatcher
from unifmoe_dist.dispatch.two_level import TwoLevelDispatcher
from unifmoe_dist.kernels.exchange import CHUNK, COUNTS
from unifmoe_dist.routing import Router, Routing
from unifmoe_dist.runtime.local_ranks import run_local_ranks
from unifmoe_dist.runtime.ranks import Ranks, running_ranks, world_size_from_environment
from unifmoe_dist.studies.records import markdown

GATE_BYTES = 4
_COUNT_BYTES = 4 * COUNTS  # what alltoall announces to each peer, int32


@dataclass(frozen=True)
class Volume:
    """Bytes to other ranks in the forward and in the backward pass."""

    forward: float = 0
    backward: float = 0

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Traffic:
    """What one rank's tokens ask of an exchange between ranks, or between nodes, each of which counts as one rank."""

    crossings: float  # (token, remote rank) pairs with at least one active expert
    gates: float  # active (token, expert) pairs on remote ranks
    num_experts: int  # K over all ranks
    num_blocks: int  # B
    group_size: int  # ranks of the expert-parallel group
    row_bytes: int  # model_dim * itemsize
    largest_load: float  # tokens of this rank at the most loaded expert

    @staticmethod
    def of(gates: Tensor, num_blocks: int, row_bytes: int, group_size: int, rank: int) -> Traffic:
        """Traffic of the tokens at home on `rank` of a group, from their (N, K) gates; NaN gates are active."""
        tokens, num_experts = gates.shape
        active = (gates != 0).view(tokens, group_size, num_experts // group_size)
        remote = torch.arange(group_size, device=gates.device) != rank
        crossings, beyond = int(active.any(-1)[:, remote].sum()), int(active[:, remote].sum())
        largest_load = int((gates != 0).sum(0).max())
        return Traffic(crossings, beyond, num_experts, num_blocks, group_size, row_bytes, largest_load)


def minimum_volume(traffic: Traffic) -> Volume:
    """The least bytes for this traffic, as the module defines it."""
    rows = 2 * traffic.crossings * traffic.row_bytes
    gates = GATE_BYTES * traffic.gates
    return Volume(rows + gates + traffic.crossings * math.ceil(traffic.num_blocks / 8), rows + gates)


def alltoall_volume(traffic: Traffic) -> Volume:
    """Bytes of the alltoall dispatcher: the minimum, bits for the active experts, where gates start, and the counts.

    What aligns a peer's run is not in it: at most 21 bytes in the forward pass and 17 in the backward pass.
    """
    minimum = minimum_volume(traffic)
    local = traffic.num_experts // traffic.group_size
    bits = math.ceil((traffic.num_blocks + local) / 8) - math.ceil(traffic.num_blocks / 8)
    counts = _COUNT_BYTES * (traffic.group_size - 1)
    return Volume(minimum.forward + traffic.crossings * (bits + 4 / CHUNK) + counts, minimum.backward)


def tutel_volume(traffic: Traffic, capacity: float) -> Volume:
    """Bytes of Tutel's padded exchange: (K, capacity, model_dim) out and back, forward and backward.

    Gates stay at home there, and block masks, which Tutel does not know, are not counted. The capacity drops nothing:
    it is the largest `largest_load` over the ranks of the group.
    """
    remote = traffic.num_experts - traffic.num_experts // traffic.group_size
    one_way = remote * capacity * traffic.row_bytes
    return Volume(2 * one_way, 2 * one_way)


def padded_volume(traffic: Traffic, ranks: Ranks) -> Volume:
    """`tutel_volume` at the capacity that drops nothing; collective over the expert-parallel group."""
    capacity = torch.tensor(traffic.largest_load, device=ranks.device)
    if ranks.expert_group is not None:
        dist.all_reduce(capacity, op=dist.ReduceOp.MAX, group=ranks.expert_group)
    return tutel_volume(traffic, int(capacity))


@contextmanager
def counting_bytes(ranks_per_node: int = 1) -> Iterator[Any]:
    """Count what this rank hands to exchanges (`start_runs`, torch.distributed.all_to_all_single) for other nodes.

    Yields running totals: `bytes`, `collectives`, and `messages`, one per peer and collective.
    """
    count = SimpleNamespace(bytes=0, collectives=0, messages=0)
    single, runs = dist.all_to_all_single, alltoall.start_runs

    def counted(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(single).bind(*args, **kwargs).arguments
        count_one(given["input"], given.get("input_split_sizes"), given.get("group"))
        return single(*args, **kwargs)

    def counted_runs(arrived: Tensor, sent: Tensor, outputs: list[int], inputs: list[int], group: Any) -> Any:
        count_one(sent, inputs, group)
        with patch.object(dist, "all_to_all_single", single):  # which may do it
            return runs(arrived, sent, outputs, inputs, group)

    def count_one(sent: Tensor, splits: list[int] | None, group: Any) -> None:
        peers, node = dist.get_process_group_ranks(group or dist.group.WORLD), dist.get_rank() // ranks_per_node
        splits = splits or [len(sent) // len(peers)] * len(peers)
        away = [rows for peer, rows in zip(peers, splits, strict=True) if peer // ranks_per_node != node]
        count.bytes += sent.element_size() * math.prod(sent.shape[1:]) * sum(away)
        count.collectives += 1
        count.messages += len(away)

    with patch.object(dist, "all_to_all_single", counted), patch.object(alltoall, "start_runs", counted_runs):
        yield count


# -- the comparison on synthetic routing -------------------------------------------------------------------------


def synthetic_tokens(tokens: int, router_weight: Tensor, skewed: bool, generator: torch.Generator) -> Tensor:
    """(tokens, model_dim) tokens for a router (K + 1, model_dim) with orthonormal rows.

    Standard normal tokens give every expert the same expected load. Skewed ones lean towards expert i by the logarithm
    of a Zipf popularity, 1 / (i' + 1) with i' a random place: orthonormal rows add exactly that to its logit.
    """
    num_experts, dim = router_weight.shape[0] - 1, router_weight.shape[1]
    x = torch.randn(tokens, dim, generator=generator)
    if skewed:
        place = torch.randperm(num_experts, generator=torch.Generator().manual_seed(0))
        x = x - torch.log(place + 1.0) @ router_weight[1:].detach()
    return x


def measure_volume(
    experts: int, skewed: bool, ranks_per_node: int, tokens: int, model_dim: int, num_blocks: int
) -> dict[str, float]:
    """Run on every rank of a job: one forward and backward of dispatchers over synthetic routing, bytes counted.

    With several ranks on a node, of bytes between nodes alone.

    Returns:
        The same on every rank: bytes per token, forward and backward, at the least, counted at the collective
        ("alltoall", and "two_level" between nodes), by `alltoall_volume` ("formula", without what `two_level` tells a
        rail of its node) and of Tutel's padded exchange; mean k, and the loads.
    """
    size = math.gcd(experts, world_size_from_environment())
    with running_ranks(size) as ranks:
        torch.manual_seed(0)
        router = Router(model_dim, experts)
        prototypes = torch.randn(num_blocks, model_dim)
        x = synthetic_tokens(tokens, router.weight, skewed, torch.Generator().manual_seed(1 + ranks.rank))
        routing = router.decide(x.requires_grad_(), prototypes)
        row_bytes, node = model_dim * x.element_size(), ranks.expert_rank // ranks_per_node
        traffic = Traffic.of(routing.gates, num_blocks, row_bytes, size // ranks_per_node, node)
        counted = {"alltoall": 0.0}
        if group := ranks.expert_group:
            counted["alltoall"] = _counted(AllToAllDispatcher(group), x, routing, ranks_per_node)
            if ranks_per_node > 1:
                dispatcher = TwoLevelDispatcher(nodes_of(group, ranks_per_node))
                counted["two_level"] = _counted(dispatcher, x, routing, ranks_per_node)
        found = {
            "experts_per_token": routing.expert_count.sum(),
            "minimum": minimum_volume(traffic).total,
            "tutel": padded_volume(traffic, ranks).total,
            "formula": alltoall_volume(traffic).total,
            **counted,
        }
        totals = ranks.all_sum(torch.tensor([tokens, *found.values()], dtype=torch.float64))
        load = ranks.all_sum((routing.gates != 0).sum(0))
        result = dict(zip(found, (totals[1:] / totals[0]).tolist(), strict=True))
        return {**result, "group_size": size, "load_imbalance": float(load.max() / load.mean())}


def _counted(dispatcher: Dispatcher, x: Tensor, routing: Routing, ranks_per_node: int) -> float:
    with counting_bytes(ranks_per_node) as count:
        exchange = dispatcher.dispatch(x, routing.gates, ~routing.shared_blocks)
        exchange.compute(lambda arrived: arrived.x * arrived.gates.sum(1, keepdim=True))
        exchange.total().sum().backward(retain_graph=True)
    return count.bytes


_SIZES = 2048, 384, 8  # tokens, model_dim and num_blocks


def volume_table(experts: Sequence[int] = (6, 16, 64), ranks: Sequence[int] = (2, 4)) -> str:
    """Markdown table of volumes in KB (1,000 bytes) per token and layer, forward and backward, on ranks started here.

    Routing is uniform and skewed, numbers are float32, with 2,048 tokens per rank.
    """

    def row(world: int, routing: str, k: int) -> dict[str, object]:
        r, *_ = run_local_ranks(world, measure_volume, k, routing == "skewed", 1, *_SIZES)
        return {
            "ranks": world,
            "expert-parallel size": r["group_size"],
            "routing": routing,
            "K": k,
            "mean k": f"{r['experts_per_token']:.2f}",
            "busiest expert / mean": f"{r['load_imbalance']:.2f}",
            "minimum (KB/token)": f"{r['minimum'] / 1e3:.3f}",
            "alltoall (KB/token)": f"{r['alltoall'] / 1e3:.3f}",
            "alltoall / minimum": f"{r['alltoall'] / r['minimum']:.4f}",
            "Tutel, padded (KB/token)": f"{r['tutel'] / 1e3:.3f}",
            "Tutel / alltoall": f"{r['tutel'] / r['alltoall']:.2f}",
        }

    return markdown([row(*case) for case in product(ranks, ("uniform", "skewed"), experts)], left=("routing",))


def node_volume_table(
    experts: Sequence[int] = (16, 64), layouts: Sequence[tuple[int, int]] = ((2, 2), (2, 4), (4, 2))
) -> str:
    """As `volume_table`, of what crosses between nodes; layouts are nodes and ranks on each."""

    def row(layout: tuple[int, int], routing: str, k: int) -> dict[str, object]:
        nodes, width = layout
        r, *_ = run_local_ranks(nodes * width, measure_volume, k, routing == "skewed", width, *_SIZES)
        return {
            "nodes x ranks": f"{nodes} x {width}",
            "routing": routing,
            "K": k,
            "mean k": f"{r['experts_per_token']:.2f}",
            "minimum (KB/token)": f"{r['minimum'] / 1e3:.3f}",
            "two_level (KB/token)": f"{r['two_level'] / 1e3:.3f}",
            "two_level / minimum": f"{r['two_level'] / r['minimum']:.4f}",
            "alltoall (KB/token)": f"{r['alltoall'] / 1e3:.3f}",
            "alltoall / two_level": f"{r['alltoall'] / r['two_level']:.2f}",
            "Tutel, padded (KB/token)": f"{r['tutel'] / 1e3:.3f}",
            "Tutel / two_level": f"{r['tutel'] / r['two_level']:.2f}",
        }

    return markdown(
        [row(*case) for case in product(layouts, ("uniform", "skewed"), experts)], left=("nodes x ranks", "routing")
    )
