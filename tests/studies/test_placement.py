"""Recorded routing, what crosses between ranks by it, and experts laid out anew: small cases worked by hand."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.scaling.crossings import Crossings, flat_legs, two_level_legs
from unifmoe_dist.studies.scaling.placement import best_order, placement_table, rank_loads
from unifmoe_dist.studies.scaling.recorded_routing import RecordedLayer, read_routing, synthetic_layer, write_routing


def recorded(active: list[list[int]], shared: list[int], blocks: int = 4) -> RecordedLayer:
    """A layer of width 2 from the experts of every token and the number of its shared blocks."""
    return RecordedLayer(
        np.array(active, dtype=bool), np.array([[i < b for i in range(blocks)] for b in shared]), 2, 8, False
    )


def random_layer(tokens: int, experts: int, blocks: int = 9) -> RecordedLayer:
    random = np.random.default_rng(experts)
    return RecordedLayer(random.random((tokens, experts)) > 0.6, random.random((tokens, blocks)) > 0.5, 6, 24, False)


def test_a_file_holds_what_was_recorded(tmp_path):
    layers = {"layer 1": random_layer(21, 6), "layer 3": random_layer(5, 64, 8)}
    write_routing(tmp_path / "routing.npz", layers, "digits")
    task, found = read_routing(tmp_path)
    assert task == "digits"
    for want, got in zip(layers.values(), found, strict=True):
        assert np.array_equal(want.active, got.active) and np.array_equal(want.shared, got.shared)
        assert (got.model_dim, got.hidden_dim, got.gated) == (6, 24, False)
    (tmp_path / "routing.npz").write_bytes(b"no")
    with pytest.raises(UserError, match="holds no recorded routing"):
        read_routing(tmp_path)
    with pytest.raises(UserError, match="does not exist; make it with launch/scale.py --record RUN"):
        read_routing(tmp_path / "other")


def test_loads_worked_by_hand():
    """Two ranks with two experts each; tokens 0 and 1 at home on rank 0, 2 and 3 on rank 1."""
    layer = recorded([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]], shared=[1, 2, 3, 1])
    x = Crossings.of(layer, 2, 1)
    assert x.rows.tolist() == [[2, 1], [1, 1]] and x.gates.tolist() == [[3, 1], [1, 1]]
    assert x.blocks.tolist() == [[3 + 3 + 2, 2], [3, 1]] and x.shared.tolist() == [3, 4]
    tokens, residual, everything, sent = rank_loads(layer, 2).tolist()
    assert tokens == [3, 2] and residual == [11, 3] and everything == [14, 7]
    # counts; a row of 8, a gate, a start and a byte of bits, up to 32; a row home, its gradient; a row and a gate
    assert sent == [16 + 32 + 8 + 8 + 16] * 2


@pytest.mark.parametrize("experts, ranks, per_node", [(8, 4, 2), (16, 8, 4), (12, 6, 2), (8, 8, 1)])
def test_both_exchanges_carry_what_brute_force_counts(experts, ranks, per_node):
    layer, row = random_layer(5 * ranks, experts), 48
    local = experts // ranks
    flat, far, near = np.zeros((3, ranks, ranks), dtype=int)
    for token, home in product(range(len(layer)), range(ranks)):
        if token // 5 != home:
            continue
        for rank in range(ranks):
            if not layer.active[token, rank * local : (rank + 1) * local].any():
                continue
            flat[home, rank] += rank != home
            entry = rank // per_node * per_node + home % per_node  # where it comes into the rank's node
            near[entry, rank] += entry != rank
        for node in range(ranks // per_node):
            there = slice(node * per_node * local, (node + 1) * per_node * local)
            if node != home // per_node and layer.active[token, there].any():
                far[home, node * per_node + home % per_node] += 1
    x = Crossings.of(layer, ranks, per_node)
    home = {name: 0 for name in ("flat", "far", "near", "onward")}
    for leg in (*flat_legs(x, row), *two_level_legs(x, row, per_node)):
        assert not leg.bytes.diagonal().any()
        if leg.name == "home" and not leg.backward:
            home[leg.level] = home[leg.level] + leg.bytes.T / row
    assert np.array_equal(home["flat"], flat)
    assert np.array_equal(home["far"], far) and np.array_equal(home["near"] + home["onward"], near)


def test_the_best_of_four_pairs_is_found():
    """Loads 8, 7, 2, 1 (of one token each) on two ranks: 8 + 1 and 7 + 2, in place of 8 + 7 and 2 + 1."""
    active = np.repeat(np.eye(4, dtype=bool), [8, 7, 2, 1], axis=0)
    layer = RecordedLayer(active, np.zeros((18, 4), dtype=bool), 2, 8, False)
    order = best_order(layer, 2)
    assert {frozenset(order[:2].tolist()), frozenset(order[2:].tolist())} == {frozenset({0, 3}), frozenset({1, 2})}
    assert rank_loads(layer.ordered(order), 2)[0].tolist() == [9, 9]


def test_experts_that_share_their_tokens_come_together():
    """Loads are equal either way, but a token counts once on a rank."""
    layer = recorded([[1, 0, 0, 1], [0, 1, 1, 0]] * 4, shared=[1] * 8)
    order = best_order(layer, 2)
    assert sorted(order[:2].tolist()) in ([0, 3], [1, 2])
    assert rank_loads(layer, 2)[0].tolist() == [8, 8] and rank_loads(layer.ordered(order), 2)[0].tolist() == [4, 4]


def test_a_better_placement_takes_off_the_busiest_rank_and_keeps_every_expert(tmp_path):
    layer = synthetic_layer(32, tokens=1024, skewed=True)
    order = best_order(layer, 4)
    assert sorted(order.tolist()) == list(range(32))
    before, after = rank_loads(layer, 4), rank_loads(layer.ordered(order), 4)
    assert after[1].max() < 0.95 * before[1].max() and after[1].sum() == before[1].sum()
    write_routing(tmp_path / "routing.npz", {"layer 1": layer}, "digits")
    lines = placement_table([tmp_path]).splitlines()
    assert len(lines) == 5 and lines[2].startswith("| digits | 32 | 4 |")  # K = 32 on 4, 8 and 16 ranks
