"""Predicted steps: a case worked by hand, what must grow or shrink with what, and the bytes of real exchanges."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from launch import scale
from tests.support.ranks import run_ranks
from unifmoe_dist.dispatch.alltoall import AllToAllDispatcher
from unifmoe_dist.dispatch.nodes import nodes_of
from unifmoe_dist.dispatch.two_level import TwoLevelDispatcher
from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.scaling.cards import CARDS, card_model
from unifmoe_dist.studies.scaling.cost_model import CostModel, Workload
from unifmoe_dist.studies.scaling.crossings import Crossings, Leg, flat_legs, two_level_legs
from unifmoe_dist.studies.scaling.prediction import Model
from unifmoe_dist.studies.scaling.recorded_routing import RecordedLayer, synthetic_layer, write_routing
from unifmoe_dist.studies.scaling.simulator import Job, Links, group_size, simulate
from unifmoe_dist.studies.scaling.volume import counting_bytes

RATES = CostModel(
    {
        "experts": [1e-3, 0.0],
        "route": [2.0, 0.5],
        "dense": [1.0, 0.0, 0.0],
        "exchange": [0.0, 0.0, 0.0, 1.0],
        "all_reduce": [0.0, 0.0],
        "optimizer": [0.0, 0.1, 0.0],
    }
)


def test_a_step_worked_by_hand():
    """Two ranks of one node with an expert of 2 x 4 and a token each, of 4 blocks of one channel; all use expert 0."""
    layer = RecordedLayer(np.array([[1, 0], [1, 0]], bool), np.array([[1, 0, 0, 0]] * 2, bool), 2, 4, False)
    job = Job([layer], tokens=1, dense_parameters=10, itemsize=4)
    links = Links(2, 8e-9, 1.0, node_latency=0.25, message=0.5)  # a byte takes a second
    (step,) = simulate(job, 2, RATES, Links(2, math.inf, 1.0, copying=links), ["alltoall"])
    assert (step.experts, step.expert_parallel) == (2, 2)
    block = 1e-3 * 4 * 2  # seconds forward: a channel of width 2
    found = step.seconds
    assert found["routing"] == 2 + 0.5 and found["rest"] == 1
    assert found["shared"] == pytest.approx(block)  # b = 1
    assert found["residual"] == pytest.approx(3 * block)  # rank 0 computes 6 blocks, rank 1 none
    assert found["waiting"] == pytest.approx(3 * block * 14 / 4)
    assert found["backward"] == pytest.approx((1 + 3) * block * 10 / 4)
    # rank 1's token: counts 16; 8 + 4 + 4 + 1 up to 32 bytes there; a row of 8 home; 8 there; 8 + 4 up to 16 home
    assert found["near"] == pytest.approx(5 * (0.25 + 0.5) + 16 + 32 + 8 + 8 + 16) and found["far"] == 0
    assert step.near_bytes == 16 + 32 + 8  # that rank 1 sends: counts, its token, and the gradient of what came back
    assert found["all_reduce"] == 0  # what copying takes was measured, here 0
    assert found["optimizer"] == pytest.approx(0.1 * (10 / 2 + 16))
    assert step.memory == 8 * (10 + 16) + 8 * (10 / 2 + 16) + 2 * 8 * 2 + 32
    assert step.tokens_per_second == pytest.approx(2 / step.total)
    (hidden,) = simulate(job, 2, RATES, links, ["alltoall"])
    assert found["near"] - hidden.seconds["near"] == pytest.approx(block * (1 + 10 / 4))  # the shared expert, both ways
    ring = 4 * 10 * 1 / 2  # bytes of a round; ZeRO gathers after two of them; experts have no replicas
    assert hidden.seconds["all_reduce"] == pytest.approx(3 * (0.25 + ring))


def test_what_a_slow_link_adds_to_copying():
    """Two nodes of a rank each; and of two, which share a link twice as fast."""
    layer = RecordedLayer(np.array([[0, 1], [1, 0]], bool), np.array([[1, 0, 0, 0]] * 2, bool), 2, 4, False)
    job, copied = Job([layer], tokens=1, dense_parameters=10, itemsize=4), Links(4, 8e-9, 8e-9)
    found, alone = (
        simulate(job, 2, RATES, Links(1, math.inf, gbps, shared=True, copying=copied), ["alltoall"])[0].seconds
        for gbps in (4e-9, math.inf)
    )
    # counts 16, a token 32 there, 8 home, 8 there, 16 home, at half the speed, beside which the shared expert computes
    assert found["far"] == pytest.approx(2 * (16 + 32 + 8 + 8 + 16) - 1e-3 * 8 * (1 + 10 / 4))
    assert found["near"] == alone["near"] == 16 + 32 + 8 + 8 + 16 and alone["far"] == 0
    assert found["all_reduce"] == pytest.approx(2 * 3 * 4 * 10 / 2)
    sent = np.zeros((4, 4))
    sent[0, 2:] = 8  # rank 0 has all the bytes for the other node
    assert Links(2, math.inf, 4e-9, shared=True).seconds(Leg("there", "flat", False, sent)) == (0, 16)
    # of groups that are less than a node, or end within one
    assert Links(4, math.inf, 4e-9, shared=True).seconds(Leg("there", "flat", False, np.ones((2, 2)))) == (0, 0)
    assert Links(2, math.inf, 4e-9, shared=True).seconds(Leg("there", "flat", False, np.ones((3, 3)))) == (0, 2)


def test_what_crosses_between_nodes_in_a_ring_is_spread_over_their_links():
    sizes: dict = dict(layers=1, tokens=1, flops=0, extra_flops=0, groups=0, collectives=0, messages=0, bytes=0)
    load = Workload(8, 2, 1.0, **sizes, dense_parameters=8, expert_parameters=4, gradient_bytes=1, zero=0)
    assert [ring.sent for ring in load.rings] == [2 * 7, 2 * 3]
    # four links for the dense ring; of the ring of every second rank two are on a node
    assert Links(4, math.inf, 8e-9).rings(load) == pytest.approx(2 * 7 / 4 + 2 * 3 / 2)
    assert Links(8, 8e-9, 1e-30).rings(load) == pytest.approx(2 * 7 + 2 * 3)


def predicted(links: Links, ranks: int = 16, card: str = "h200", gated: bool = False, experts: int = 32, **model):
    layer = synthetic_layer(experts, tokens=1024, skewed=True)
    job = Model(**{"width": 256, "depth": 4, "gated": gated, "tokens": 64, **model}).job([layer])
    flat, levels = simulate(job, ranks, card_model(CARDS[card], job), links)
    return flat, levels


LINKS = Links(4, 3600.0, 100.0, 3e-6, 1e-5, 1e-6)


def test_what_grows_and_shrinks_with_what():
    flat, levels = predicted(LINKS)
    assert levels.far_bytes < flat.far_bytes and levels.near_bytes > flat.near_bytes  # rows change at the rail
    slow, slow_levels = predicted(replace(LINKS, link_gbps=1.0))
    assert slow.total > flat.total and slow_levels.total > levels.total
    assert slow_levels.total / slow.total < levels.total / flat.total < 1
    assert predicted(replace(LINKS, link_latency=1e-3))[0].total > flat.total
    slower = predicted(LINKS, card="rtx3090")[0]
    assert slower.seconds["residual"] > flat.seconds["residual"] and slower.far_bytes == flat.far_bytes
    gated = predicted(LINKS, gated=True)[0]
    assert gated.seconds["residual"] == pytest.approx(1.5 * flat.seconds["residual"])
    assert gated.seconds["backward"] == pytest.approx((22 - 6) / (14 - 4) * flat.seconds["backward"])
    assert gated.memory > flat.memory and predicted(LINKS, tokens=128)[0].memory > flat.memory
    wide = predicted(LINKS, ranks=64)[0]
    assert wide.expert_parallel == 32 and wide.tokens_per_second > flat.tokens_per_second


def test_on_one_node_both_exchanges_are_one():
    flat, levels = predicted(replace(LINKS, ranks_per_node=16))
    assert flat.far_bytes == levels.far_bytes == 0 and flat.seconds == levels.seconds


@pytest.mark.parametrize(
    "experts, ranks, per_node, size", [(64, 16, 8, 16), (6, 16, 8, 2), (24, 48, 8, 24), (1, 4, 2, 1)]
)
def test_experts_lie_over_whole_nodes_or_within_one(experts, ranks, per_node, size):
    assert group_size(experts, ranks, per_node) == size


def exchange_bytes(rank, world):
    """Of both exchanges, bytes that this rank hands to collectives, and those of its legs."""
    layer = synthetic_layer(16, tokens=40 * world, blocks=9, skewed=True)
    mine = next(x for i, x in enumerate(layer.dealt(world, 40)) if i == rank)
    gates, blocks = torch.from_numpy(layer.active[mine]).float().requires_grad_(), torch.from_numpy(layer.shared[mine])
    crossings, result = Crossings.of(layer, world, 2), []
    for dispatcher, legs in (
        (AllToAllDispatcher(dist.group.WORLD), flat_legs(crossings, 40)),
        (TwoLevelDispatcher(nodes_of(dist.group.WORLD, 2)), two_level_legs(crossings, 40, 2)),
    ):
        with counting_bytes() as count:
            exchange = dispatcher.dispatch(torch.randn(40, 10, requires_grad=True), gates, ~blocks)
            exchange.compute(lambda arrived: arrived.x * arrived.gates.sum(1, keepdim=True))
            exchange.total().sum().backward()
        result.append((count.bytes, int(sum(leg.bytes.sum(1)[rank] for leg in legs))))
    return result


def test_bytes_are_those_that_real_exchanges_send():
    for result in run_ranks(4, exchange_bytes):
        for counted, predicted in result:
            assert counted == predicted


def test_the_command_predicts_and_draws(tmp_path, capsys):
    layers = {"layer 1": synthetic_layer(8, tokens=64), "layer 3": synthetic_layer(8, tokens=64, skewed=True)}
    write_routing(tmp_path / "routing.npz", layers, "digits")
    words = "--drawn 16 --nodes 1 2 --gpus-per-node 4 --rank-tokens 32 --model-width 64 --model-depth 4 --gated".split()
    scale.main(["--predict", str(tmp_path), *words, "--output", str(tmp_path / "made")])
    printed = capsys.readouterr().out
    assert "measured on an H200" in printed and "| digits, K = 8 | 8 | 8 | two_level |" in printed
    assert printed.count("| drawn, K = 16 |") == 4
    assert (tmp_path / "made" / "prediction.png").stat().st_size > 20_000


@pytest.mark.parametrize(
    "words, message",
    [
        ("--predict", "needs the folder of a run whose routing was recorded, or --drawn K"),
        ("--predict --drawn 4 0", "--drawn must be at least 1, not 0"),
        ("--predict --drawn 4 --nodes 0", "--nodes must be at least 1, not 0"),
        ("--predict --drawn 4 --link-gbps 0", "link_gbps must be above 0, not 0"),
        ("--predict --drawn 4 --rank-tokens 0", "tokens must be at least 1, not 0"),
        ("--predict --drawn 4 --experts 4", "--experts would change nothing"),
        ("--nodes 4", "--nodes belongs to --predict RUN"),
        ("--predict --drawn 4 --nodes 1 --output /dev/null/x", "--output /dev/null/x cannot be used"),
        ("--record runs/mine --tokens 0", "--tokens must be at least 1, not 0"),
    ],
)
def test_what_cannot_be_predicted_is_one_sentence(words, message):
    with pytest.raises(UserError, match=message):
        scale.main(words.split())


def test_the_command_knows_every_card():
    (action,) = (a for a in scale.parser()._actions if a.dest == "card")
    assert action.choices is not None and set(action.choices) == set(CARDS)
