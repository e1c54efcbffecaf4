"""Experts spread over ranks in other people's loops: what several ranks find is what one rank finds."""

from __future__ import annotations

import contextlib
import functools
import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.methods import MOE_LAYERS
from tests.support.own_loops import (
    CLIP,
    Trained,
    assert_as_on_one_rank,
    on_one_rank,
    own_places,
    spread_model,
    train,
    whole_model,
)
from tests.support.ranks import run_ranks
from unifmoe_dist import clip_grad_norm_, full_state_dict, load_full_state_dict
from unifmoe_dist.errors import UserError


def ours(model):
    return clip_grad_norm_(model, CLIP)


def torchs(model):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)


def checkpointed(model, reentrant):
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    block = type(model.blocks[0])
    apply_activation_checkpointing(
        model, functools.partial(checkpoint_wrapper, checkpoint_impl=kind), lambda module: isinstance(module, block)
    )
    return model


def groups_of(world):
    """Ways to hold the experts: none spread, over all ranks, over pairs of ranks."""
    yield "replicated", None
    yield f"over {world}", dist.group.WORLD
    if world == 4:
        yield "over 2 of 4", init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "expert"))["expert"]


def model_over(group):
    return whole_model() if group is None else spread_model(group)


def ddp_equals_one_rank(rank, world, few):
    wanted = {gram: on_one_rank(world, gram)[1] for gram in (0.0, 0.1)}
    ways = itertools.product(groups_of(world), (ours, torchs), (None, False, True))
    for (where, group), clip, save in list(ways)[:: 5 if few else 1]:  # of every fifth, each value
        gram = 0.0 if save else 0.1  # a second gradient of the routers, which reentrant checkpointing refuses
        bare = model_over(group)
        model = DistributedDataParallel(bare if save is None else checkpointed(bare, save))
        waits = lambda last, m=model: contextlib.nullcontext() if last else m.no_sync()  # noqa: E731
        waiting = waits if clip is ours else lambda last: contextlib.nullcontext()
        found = train(model, own_places(rank), clip, waiting, gram=gram)
        assert_as_on_one_rank(found, wanted[gram], model, f"{where} {clip.__name__} checkpointed: {save}")
    return True


def fsdp2_equals_one_rank(rank, world, few):
    wanted = on_one_rank(world)[1]
    ways = itertools.product(groups_of(world), ((False, False), (False, True), (True, True)))
    for (where, group), (save, blocks) in list(ways)[:: 4 if few else 1]:  # of every fourth, each value
        model = model_over(group)
        if save:
            checkpointed(model, False)
        for block in model.blocks if blocks else ():
            fully_shard(block)
        fully_shard(model)
        waiting = lambda last, m=model: m.set_requires_gradient_sync(last) or contextlib.nullcontext()  # noqa: E731
        found = train(model, own_places(rank), ours, waiting)
        assert_as_on_one_rank(found, wanted, model, f"{where} checkpointed: {save} blocks: {blocks}")
    return True


def other_methods_equal_one_rank(rank, world, few):
    wraps = functools.partial(DistributedDataParallel, find_unused_parameters=True), fully_shard
    for number, method in enumerate(MOE_LAYERS):
        wanted = on_one_rank(world, 0.0, method=method)[1]
        for wrap in wraps[number % 2 :][:1] if few else wraps:
            model = wrap(spread_model(dist.group.WORLD, method=method))
            found = train(model, own_places(rank), ours, gram=0.0)
            assert_as_on_one_rank(found, wanted, model, f"{method} {wrap}")
    return True


FEW = pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["few", "all"])


@FEW
@pytest.mark.parametrize("world", [2, 4])
def test_ddp(world, few):
    assert all(run_ranks(world, ddp_equals_one_rank, few, timeout=280))


@FEW
@pytest.mark.parametrize("world", [2, 4])
def test_fsdp2(world, few):
    assert all(run_ranks(world, fsdp2_equals_one_rank, few, timeout=280))


@FEW
def test_other_methods(few):
    assert all(run_ranks(2, other_methods_equal_one_rank, few, fresh=True))


# -- files ------------------------------------------------------------------------------------------------------------

PLACES = 4


def adam(model):
    """With a small epsilon rounding would decide where gradients are next to nothing."""
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def wrapped(kind, group):
    model = model_over(group)
    if kind == "DDP":
        return DistributedDataParallel(model)
    if kind == "FSDP 2":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model


@functools.cache
def whole_run():
    model = whole_model()
    return train(model, list(range(PLACES)), torchs, optimizer=adam(model))


def steps_on(model, optimizer, steps, rank=0, world=1):
    """Steps of training; what is averaged over ranks is compared, where there are several."""
    share = PLACES // world
    return train(model, list(range(rank * share, (rank + 1) * share)), ours, optimizer=optimizer, steps=steps)


def save_midway(rank, world, folder, few):
    ways = list(itertools.product(("DDP", "FSDP 2"), groups_of(world)))
    for kind, (where, group) in ways[:: {2: 3, 4: 2}[world]] if few else ways:  # each value is among them
        model = wrapped(kind, group)
        optimizer = adam(model)
        steps_on(model, optimizer, range(2), rank, world)
        names, states = get_state_dict(model, optimizer)
        dcp.save({"model": names, "optimizer": states}, checkpoint_id=f"{folder}/{kind} {where}")
    return True


def goes_on(model, path, rank=0, world=1):
    """A run that was saved after two steps, resumed: its third step is that of one that was not stopped."""
    optimizer = adam(model)
    names, states = get_state_dict(model, optimizer)
    state = {"model": names, "optimizer": states}
    dcp.load(state, checkpoint_id=path, no_dist=world == 1)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    found = steps_on(model, optimizer, range(2, 3), rank, world)
    wanted = whole_run()
    wanted = Trained(wanted.losses[2:], wanted.norms[2:], wanted.gradients[2:])
    assert_as_on_one_rank(found, wanted, model, path)


def goes_on_there(rank, world, folder, times):
    """Every checkpoint is loaded so many times, in turn into every way to hold the experts."""
    ways = itertools.cycle([(kind, group) for kind in ("DDP", "FSDP 2") for _, group in groups_of(world)])
    for path in checkpoints(folder):
        for kind, group in itertools.islice(ways, times):
            goes_on(wrapped(kind, group), path, rank, world)
    return True


def checkpoints(folder):
    return sorted(str(path.parent) for path in Path(folder).glob("*/*/.metadata"))


@FEW
def test_distributed_checkpoints_load_on_any_number_of_ranks(few, tmp_path):
    for world in (1, 2, 4):
        (folder := tmp_path / f"{world}").mkdir()
        if world == 1:
            model = whole_model()
            optimizer = adam(model)
            steps_on(model, optimizer, range(2))
            names, states = get_state_dict(model, optimizer)
            dcp.save({"model": names, "optimizer": states}, checkpoint_id=f"{folder}/one rank", no_dist=True)
        else:
            assert all(run_ranks(world, save_midway, str(folder), few))
    assert len(checkpoints(tmp_path)) == (6 if few else 11)
    for world in (2, 4):
        assert all(run_ranks(world, goes_on_there, str(tmp_path), 1 if few else 2, timeout=280))
    for path in checkpoints(tmp_path):
        goes_on(whole_model(), path)


def whole_files(rank, world, folder):
    """One file of the whole is loaded by every way to hold the experts; a file of one rank only by that rank."""
    wanted = whole_model().state_dict()
    for where, group in groups_of(world):
        for kind in ("DDP", "FSDP 2", "alone"):
            model = wrapped(kind, group)
            found = full_state_dict(model)
            assert found.keys() == (wanted.keys() if rank == 0 else set()), where
            assert all(type(value) is Tensor and torch.equal(value, wanted[name]) for name, value in found.items())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            load_full_state_dict(model, wanted if rank == 0 else None)
            found = full_state_dict(model)
            assert all(torch.equal(value, wanted[name]) for name, value in found.items())
            short = {name: value for name, value in wanted.items() if "head" not in name} if rank == 0 else None
            with pytest.raises(UserError, match="head.weight has shape None in the state, but .5, 32. in the model"):
                load_full_state_dict(model, short)
    model = spread_model(dist.group.WORLD)
    with pytest.raises(UserError, match=r"experts.keys has shape \(3, 64, 32\) in the state, but \(4, 64, 32\)"):
        load_full_state_dict(model, {**wanted, "blocks.0.mlp.experts.keys": torch.ones(3, 64, 32)})
    torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    dist.barrier()
    own, other = (torch.load(f"{folder}/{place}.pt", weights_only=True) for place in (rank, (rank + 1) % world))
    model.load_state_dict(own)
    with pytest.raises(UserError, match=f"saved by rank {1 - rank} of 2 that share the experts, but this is"):
        model.load_state_dict(other)
    return True


def test_one_file_of_the_whole(tmp_path):
    assert all(run_ranks(2, whole_files, str(tmp_path)))
    loaded = torch.load(tmp_path / "1.pt", weights_only=True)
    with pytest.raises(UserError, match="one rank's part of experts that are spread over 2 ranks"):
        whole_model().load_state_dict(loaded)
