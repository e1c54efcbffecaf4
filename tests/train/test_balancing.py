"""Experts that move between ranks: the same outputs, losses and files, and less for the busiest rank."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from tests.support.sharded import CLOSE, EXCHANGES, assert_equals_whole, sharded_layer, whole_layer
from tests.support.training import make_config
from unifmoe_dist import UniFMoEConfig, full_state_dict, load_full_state_dict
from unifmoe_dist.errors import UserError
from unifmoe_dist.routing import Router
from unifmoe_dist.runtime.ranks import running_ranks
from unifmoe_dist.studies.records import read_metrics
from unifmoe_dist.train import balancing
from unifmoe_dist.train.trainer import Trainer

# -- a layer ------------------------------------------------------------------------------------------------------

ORDER = (5, 0, 3, 7, 1, 6, 2, 4)


def laid_out(rank, world, dispatcher, counts, **nodes):
    config = UniFMoEConfig(12, 40, 8, 10)
    whole, group = whole_layer(config), dist.group.WORLD
    layer = sharded_layer(whole, group, dispatcher, **nodes)
    layer.lay_out(ORDER)
    for expert in range(8):
        layer.load_ffn(expert, *whole.ffn_weights(expert))
    assert list(layer.held) == [*ORDER[rank * 8 // world :][: 8 // world]]
    assert_equals_whole(layer, whole, [torch.randn(n, 12) for n in counts], rank, group, **CLOSE)
    asked = (rank + 3) % 8
    assert all(torch.equal(*pair) for pair in zip(layer.ffn_weights(asked), whole.ffn_weights(asked), strict=True))
    state, want = full_state_dict(layer), whole.state_dict()
    assert rank or (state.keys() == want.keys() and all(torch.equal(state[name], want[name]) for name in want))
    optimizer = torch.optim.AdamW(layer.parameters())
    optimizer.step()
    kept, moments = layer.experts.keys.detach().clone(), optimizer.state[layer.experts.keys]["exp_avg"].clone()
    saved = layer.state_dict(), optimizer.state_dict()
    load_full_state_dict(layer, want)
    for expert in range(8):
        assert torch.equal(layer.ffn_weights(expert)[0], whole.ffn_weights(expert)[0])
    layer.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert torch.equal(layer.experts.keys, kept)
    assert torch.equal(optimizer.state[layer.experts.keys]["exp_avg"], moments)
    layer.lay_out(range(8))
    assert layer.columns is None and list(layer.held) == [*range(rank * 8 // world, (rank + 1) * 8 // world)]


@pytest.mark.parametrize("dispatcher", EXCHANGES)
def test_a_layer_in_any_order_is_the_same_layer(dispatcher):
    run_ranks(2, laid_out, dispatcher, (5, 0))
    run_ranks(4, laid_out, dispatcher, (3, 0, 7, 1))


def test_in_any_order_between_nodes():
    run_ranks(4, laid_out, "two_level", (3, 0, 7, 1), ranks_per_node=2, dispatch_chunks=2)


# -- a run --------------------------------------------------------------------------------------------------------


def skew() -> None:
    """Have the first half of the experts, which lie together, get most tokens."""
    start = Router.reset_parameters

    def skewed(router: Router) -> None:
        start(router)
        with torch.no_grad():
            router.weight[1 : 1 + len(router.weight) // 2] *= 8

    Router.reset_parameters = skewed


@pytest.mark.parametrize("size, held, other", [(1, "all", "larger"), (4, "one", "smaller")])
def test_nothing_to_move_is_refused(size, held, other):
    config = make_config("run", expert_parallel_size=size, expert_placement="balanced")
    with pytest.raises(UserError, match=f"{size} each rank holds {held}; choose a {other} one, or near.$"):
        config.validate(4)
    replace(config, model=replace(config.model, moe="none")).validate(4)


def losses_of(ranks, folder, placement, stop=8, resume=False, moe="unif", **options):
    """Losses of a run of 8 steps, saved after 4 and 8, up to step `stop`; and whether experts of a layer had moved."""
    size = 1 if ranks.expert_group is None else dist.get_world_size(ranks.expert_group)
    parallel = dict(expert_placement=placement, expert_parallel_size=size)
    config = make_config(folder, steps=8, eval_every=4, resume=resume, **parallel, **options)
    config.model = replace(config.model, num_experts=8, moe=moe)
    config.optim = replace(config.optim, momentum=0.9)  # for SGD
    config.validate(ranks.world_size)
    trainer, losses = Trainer(config, ranks, folder), []
    while trainer.step < stop:
        loss = trainer.train_step().sums["task_loss"]
        losses.append(float(ranks.all_sum(loss)) / ranks.world_size)
        if trainer.step % 4 == 0:
            trainer._save(0.0, better=True, last=trainer.step == 8)
    return losses, any(layer.columns is not None for layer in trainer.layers.values())


def copied(ranks, folder, name):
    if ranks.rank == 0:
        shutil.copytree(folder, folder.parent / name)
    ranks.barrier()


def balanced_runs(rank, world, place, size, kinds, gain=balancing.GAIN):
    """Losses of runs at several ZeRO stages are those without `balanced`; the first is cut off and resumed.

    `kinds` are options and their stages. Returns the last kind's losses without `balanced`.
    """
    skew()
    balancing.GAIN = gain
    with running_ranks(size) as ranks:
        for number, (options, first, *stages) in enumerate(kinds):
            folder, resumed = Path(place) / str(number), dict(zero_stage=first, resume=True, **options)
            want, moved = losses_of(ranks, folder / "near", "near", **options)
            assert not moved
            start, moved = losses_of(ranks, folder / "cut", "balanced", stop=6, zero_stage=first, **options)
            assert moved and start == pytest.approx(want[:6], abs=1e-5), options
            copied(ranks, folder / "cut", "copy")
            rest, moved = losses_of(ranks, folder / "cut", "balanced", **resumed)
            assert moved and rest[:2] == start[4:], options  # bit by bit: it lies as it did
            assert rest == pytest.approx(want[4:], abs=1e-5), options
            for stage in stages:
                found, moved = losses_of(ranks, folder / f"{stage}", "balanced", zero_stage=stage, **options)
                assert moved and found == pytest.approx(want, abs=1e-5), (options, stage)
    return want


def goes_on(rank, world, folder, want, size, saved, **options):
    """A run that others began goes on as it would have; whether as `saved`, the order is taken up."""
    with running_ranks(size) as ranks:
        placement = "balanced" if size > 1 else "near"
        rest, moved = losses_of(ranks, Path(folder), placement, resume=True, **options)
        assert moved == saved and rest == pytest.approx(want[4:], abs=1e-5)


def test_losses_stay_and_the_busiest_rank_computes_less(tmp_path):
    options = dict(optimizer="adamw")
    want = run_ranks(2, balanced_runs, str(tmp_path), 2, [(options, 2, 0)], fresh=True)[0]
    records = [record for record in read_metrics(tmp_path / "0/0") if record["kind"] == "busiest_rank"]
    before, after = (r["blocks.1.mlp"] + r["blocks.3.mlp"] for r in records)
    assert [r["step"] for r in records] == [4, 8] and after < 0.9 * before
    run_ranks(1, goes_on, str(tmp_path / "0/copy"), want, 1, False, **options, fresh=True)


NODES = dict(dispatcher="two_level", ranks_per_node=2)


@pytest.mark.slow
@pytest.mark.parametrize("size, saved, more", [(2, True, {}), (4, False, NODES)])
def test_a_run_goes_on_on_four_ranks(size, saved, more, tmp_path):
    """In two groups of two, which lie as saved, and in one of four, on two nodes."""
    want = run_ranks(2, balanced_runs, str(tmp_path), 2, [({}, 1, 0, 2)], fresh=True)[0]
    run_ranks(4, goes_on, str(tmp_path / "0/copy"), want, size, saved, **more, fresh=True)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [{}, NODES, pytest.param(dict(dispatcher="tutel"), marks=pytest.mark.tutel)])
def test_losses_stay_on_four_ranks(exchange, tmp_path):
    kinds = [(exchange, 0, 1), (dict(optimizer="adamw", **exchange), 1, 2)]
    run_ranks(4, balanced_runs, str(tmp_path), 4, kinds, timeout=400, fresh=True)


@pytest.mark.slow
def test_losses_of_other_layers_stay(tmp_path):
    """They are loaded evenly, so anything better will do; EMoE's gate follows its experts, MASS rewrites some."""
    kinds = [(dict(moe=moe), 1) for moe in ("topk", "emoe", "mass", "dynmoe")]
    run_ranks(2, balanced_runs, str(tmp_path), 2, kinds, gain=0.0, timeout=400, fresh=True)
