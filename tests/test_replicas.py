"""Experts spread over ranks are never taken for copies: what would do so is refused in one sentence."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import run_ranks
from tests.support.small_models import B, build, inputs, logits
from unifmoe_dist import upcycle
from unifmoe_dist.errors import UserError
from unifmoe_dist.upcycling import moe_layers


def spread(family: str) -> nn.Module:
    torch.manual_seed(0)
    model = upcycle(build(family), [0, 2], 4, B, router_seed=3, expert_group=dist.group.WORLD)
    with torch.no_grad():
        for layer in moe_layers(model).values():
            layer.experts.keys.add_(dist.get_rank() + 1)
    return model


def refusals(rank: int, world: int, folder: str) -> bool:
    torch.manual_seed(1)
    batch = inputs("timm")
    wrappers = {
        "DistributedDataParallel": DistributedDataParallel,
        "FSDP": lambda m: FullyShardedDataParallel(m, use_orig_params=True, device_id=torch.device("cpu")),
        "FSDP ": fully_shard,
    }
    for name, wrap in wrappers.items():
        with pytest.raises(UserError, match=f"spread over ranks by expert_group, but {name.strip()}"):
            logits(wrap(spread("timm")), batch)

    model = spread("timm")
    logits(model, batch).sum().backward()  # alone it runs
    ignored = spread("timm")
    names = [name for name, _ in ignored.named_parameters() if ".experts." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignored, names)
    logits(DistributedDataParallel(ignored), batch)  # nor is anything wrong with one that leaves the experts alone

    state = model.state_dict()  # what torch raises is no Exception: it goes through to all ranks
    states = [
        state,
        {"model": model},
        copy.deepcopy(state),
        {n: t.cpu().clone() for n, t in state.items()},
        get_model_state_dict(model, options=StateDictOptions(cpu_offload=True)),
    ]
    for number, saved in enumerate(states):
        with pytest.raises(BaseException, match="all but one rank's would be lost"):
            dcp.save(saved, checkpoint_id=str(Path(folder) / f"{number}"))
    with pytest.raises(BaseException, match="all but one rank's would be lost"):
        dcp.async_save(state, checkpoint_id=str(Path(folder) / "later")).result()

    buffer = io.BytesIO()  # this rank's own part, plain tensors
    torch.save(state, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert all(type(t) is Tensor and torch.equal(t, state[name]) for name, t in loaded.items())
    other = spread("timm")
    for loaded_from in (state, loaded):
        with torch.no_grad():
            first = next(iter(moe_layers(other).values())).experts.keys.zero_()
        other.load_state_dict(loaded_from)
        assert type(first) is nn.Parameter and torch.equal(first, next(iter(moe_layers(model).values())).experts.keys)
    assert torch.equal(logits(other, batch), logits(model, batch))
    other.load_state_dict(state, assign=True)  # parameters like any others, in copies too
    for again in (other, copy.deepcopy(other)):
        assert all(type(p) is nn.Parameter and p.requires_grad for p in again.parameters())
        assert len(list(again.parameters())) == len(list(model.parameters()))

    bert = spread("bert")
    with pytest.raises(UserError, match="spread over 2 ranks"):
        bert.save_pretrained(Path(folder) / "bert")
    return True


def test_spread_experts_are_not_taken_for_copies(tmp_path):
    assert run_ranks(2, refusals, str(tmp_path), timeout=280, fresh=True) == [True, True]
