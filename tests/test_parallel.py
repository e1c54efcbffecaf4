"""Experts spread over ranks in other people's loops: what several ranks find is what one rank finds."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.own_loops import (
    CLIP,
    assert_as_on_one_rank,
    on_one_rank,
    own_places,
    spread_model,
    train,
    whole_model,
)
from tests.support.ranks import run_ranks
from unifmoe_dist import clip_grad_norm_, full_state_dict, load_full_state_dict


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


def ddp_equals_one_rank(rank, world):
    wanted = {gram: on_one_rank(world, gram)[1] for gram in (0.0, 0.1)}
    for where, group in groups_of(world):
        for clip in (ours, torchs):
            for save in (None, False, True):
                gram = 0.0 if save else 0.1  # a second gradient of the routers, which reentrant checkpointing refuses
                bare = model_over(group)
                model = DistributedDataParallel(bare if save is None else checkpointed(bare, save))
                waits = lambda last, m=model: contextlib.nullcontext() if last else m.no_sync()  # noqa: E731
                waiting = waits if clip is ours else lambda last: contextlib.nullcontext()
                found = train(model, own_places(rank), clip, waiting, gram=gram)
                assert_as_on_one_rank(found, wanted[gram], model, f"{where} {clip.__name__} checkpointed: {save}")
    return True


def fsdp2_equals_one_rank(rank, world):
    wanted = on_one_rank(world)[1]
    for where, group in groups_of(world):
        for save in (False, True):
            for blocks in (False, True):
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


@pytest.mark.parametrize("world", [2, 4])
def test_ddp(world):
    assert all(run_ranks(world, ddp_equals_one_rank))


@pytest.mark.parametrize("world", [2, 4])
def test_fsdp2(world):
    assert all(run_ranks(world, fsdp2_equals_one_rank))
