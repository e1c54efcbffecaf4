"""Experts spread over ranks are never taken for copies: what would do so is told, or refused in one sentence."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import run_ranks
from tests.support.small_models import B, build, inputs, logits
from unifmoe_dist import full_state_dict, leave_experts_alone, param_groups, upcycle
from unifmoe_dist.errors import UserError
from unifmoe_dist.upcycling import moe_layers


def spread(family: str) -> nn.Module:
    torch.manual_seed(0)
    model = upcycle(build(family), [0, 2], 4, B, router_seed=3, expert_group=dist.group.WORLD)
    with torch.no_grad():
        for layer in moe_layers(model).values():
            layer.experts.keys.add_(dist.get_rank() + 1)
    return model


def first_keys(model: nn.Module) -> nn.Parameter:
    return next(iter(moe_layers(model).values())).experts.keys


class Around(nn.Module):
    """A module of one's own, such as a LightningModule."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.scale = model, nn.Parameter(torch.ones(()))

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return logits(self.model, batch) * self.scale


def wrappers(rank: int, world: int) -> bool:
    torch.manual_seed(1)
    batch = inputs("timm")
    refused = {
        "Distributed.* call unifmoe_dist.leave_experts_alone": lambda m: DistributedDataParallel(Around(m)),
        "Fully.* use FSDP 2": lambda m: FullyShardedDataParallel(
            m, use_orig_params=True, device_id=torch.device("cpu")
        ),
    }
    for name, wrap in refused.items():
        with pytest.raises(UserError, match=f"spread over ranks by expert_group, but {name}"):
            logits(wrap(spread("timm")), batch)

    logits(spread("timm"), batch).sum().backward()  # alone it runs
    told = Around(spread("timm"))
    told._ddp_params_and_buffers_to_ignore = ["scale"]
    leave_experts_alone(told)
    compiled = torch.compile(spread("timm"))  # not run: only how it is wrapped counts
    for module in map(DistributedDataParallel, (told, spread("timm"), compiled)):
        names = {name for name, _ in module.module.named_parameters()}
        assert names & module.parameters_to_ignore == {n for n in names if ".experts." in n or n == "scale"}
        if module.module is not compiled:
            mine = first_keys(module).detach().clone()
            module(**batch).sum().backward()
            assert torch.equal(first_keys(module), mine) and first_keys(module).grad.abs().sum() > 0

    ddp = DistributedDataParallel(spread("timm"))
    with ddp.join(), pytest.raises(UserError, match="no rank may stop before others"):
        ddp(**batch)

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    sharded = fully_shard(spread("timm"), mp_policy=half)
    output = logits(sharded, batch)
    output.float().square().sum().backward()
    assert output.dtype == torch.bfloat16
    for parameter in next(iter(moe_layers(sharded).values())).experts.parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all()

    with pytest.raises(UserError, match="expert_group is 'world', but must be a process group"):
        upcycle(build("timm"), [0], 4, B, expert_group="world")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "expert"))
    with pytest.raises(UserError, match=r"a mesh of 2 dimensions \('replica', 'expert'\); choose one of them"):
        upcycle(build("timm"), [0], 4, B, expert_group=mesh)
    return True


def norms_and_overflows(rank: int, world: int) -> bool:
    """What torch's clipping and loss scaling find in one rank's experts holds on all."""
    ddp = DistributedDataParallel(spread("timm"))
    batch = inputs("timm")
    logits(ddp, batch).sum().backward()
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter.grad.zero_()
        first_keys(ddp).grad[0, 0, 0] = 3.0 + rank
    for order, norm in ((2.0, 5.0), (1.0, 7.0), (float("inf"), 4.0)):
        assert torch.nn.utils.get_total_norm([p.grad for p in ddp.parameters()], order).item() == pytest.approx(norm)
    assert first_keys(ddp).grad.norm().item() == 3.0 + rank  # asked for by one rank alone, nothing waits for others
    if rank == 1:
        first_keys(ddp).grad[0, 0, 0] = float("inf")
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    before = first_keys(ddp).detach().clone()
    scaler.step(optimizer)
    assert torch.equal(first_keys(ddp), before)
    return True


def states(rank: int, world: int, folder: str) -> bool:
    """Whichever copy of a state is saved, every rank finds its own experts in the checkpoint."""
    model = spread("timm")
    state = model.state_dict()
    copies = [
        state,
        {"model": model},
        copy.deepcopy(state),
        {n: t.cpu().clone() for n, t in state.items()},
        get_model_state_dict(model, options=StateDictOptions(cpu_offload=True)),
    ]
    other = spread("timm")
    for number, saved in enumerate(copies):
        dcp.save(saved, checkpoint_id=str(Path(folder) / f"{number}"))
        with torch.no_grad():
            first_keys(other).zero_()
        given = {"model": other} if "model" in saved else other.state_dict()
        dcp.load(given, checkpoint_id=str(Path(folder) / f"{number}"))
        assert torch.equal(first_keys(other), first_keys(model))
    dcp.async_save(state, checkpoint_id=str(Path(folder) / "later")).result()

    other.load_state_dict(state, assign=True)  # parameters like any others, in copies too
    for again in (other, copy.deepcopy(other)):
        assert all(type(p) is nn.Parameter and p.requires_grad for p in again.parameters())
        assert len(list(again.parameters())) == len(list(model.parameters()))
        assert torch.equal(first_keys(again), first_keys(model))

    optimizer = torch.optim.Adam(model.parameters())
    logits(DistributedDataParallel(model), inputs("timm")).sum().backward()
    optimizer.step()
    resumed = torch.optim.Adam(other.parameters())
    resumed.load_state_dict(optimizer.state_dict())  # before any step
    torch.save(optimizer.state_dict(), f"{folder}/optimizer-{rank}.pt")
    dist.barrier()
    elsewhere = torch.load(f"{folder}/optimizer-{1 - rank}.pt", weights_only=True)
    with pytest.raises(UserError, match=f"saved by rank {1 - rank} of 2"):
        optimizer.load_state_dict(elsewhere)
    for parameter, twin in zip(model.parameters(), other.parameters(), strict=True):
        twin.grad = parameter.grad
    other.load_state_dict(model.state_dict())
    for each in (optimizer, resumed):
        each.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))

    bert = spread("bert")
    for state in (None, bert.state_dict()):
        with pytest.raises(UserError, match="spread over 2 ranks; give it state_dict=unifmoe_dist.full_state_dict"):
            bert.save_pretrained(Path(folder) / "bert", state_dict=state)
    batch = inputs("bert")
    output, whole = logits(bert, batch), full_state_dict(bert)
    if rank == 0:
        bert.save_pretrained(Path(folder) / "bert", state_dict=whole)
        loaded = type(bert).from_pretrained(Path(folder) / "bert")
        torch.testing.assert_close(logits(loaded, batch), output)
    return True


def adapters_and_matrices(rank: int, world: int, folder: str) -> bool:
    """What has no state of the whole is refused before it is written, or when another rank reads it."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=[], target_parameters=["experts.keys"], r=2)
    adapted = peft.get_peft_model(spread("timm"), config)
    for save in (full_state_dict, lambda model: model.state_dict(), lambda model: model.save_pretrained(folder)):
        with pytest.raises(UserError, match="mlp.experts are of experts that are spread over ranks"):
            save(adapted)
    assert bool(full_state_dict(adapted.merge_and_unload())) == (rank == 0)

    model = spread("timm")
    groups = param_groups(model, muon=True)
    muon = torch.optim.Muon([group for group in groups if group["use_muon"]])
    logits(DistributedDataParallel(model), inputs("timm")).sum().backward()
    muon.step()
    torch.save(muon.state_dict(), f"{folder}/{rank}.pt")
    dist.barrier()
    muon.load_state_dict(torch.load(f"{folder}/{rank}.pt", weights_only=True))
    with pytest.raises(UserError, match=f"saved by rank {1 - rank} of 2"):
        muon.load_state_dict(torch.load(f"{folder}/{1 - rank}.pt", weights_only=True))
    muon.step()
    return True


def test_adapters_and_matrices(tmp_path):
    assert run_ranks(2, adapters_and_matrices, str(tmp_path)) == [True, True]


def test_wrappers():
    assert run_ranks(2, wrappers, timeout=280) == [True, True]


def test_norms_and_overflows():
    assert run_ranks(2, norms_and_overflows) == [True, True]


def test_states(tmp_path):
    assert run_ranks(2, states, str(tmp_path), timeout=280) == [True, True]
