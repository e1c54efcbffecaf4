"""Everybody's optimisers see biases, routers and every expert's matrix as what they are: compared by numbers."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from tests.support.ranks import run_ranks
from tests.support.small_models import B, build, moved
from unifmoe_dist import param_groups, upcycle
from unifmoe_dist.config import OptimConfig
from unifmoe_dist.errors import UserError
from unifmoe_dist.experts import BlockExperts
from unifmoe_dist.routing import Router
from unifmoe_dist.train.build import parameter_groups
from unifmoe_dist.upcycling import moe_layers

RATE, DECAY = 0.1, 0.5
MUON = partial(param_groups, weight_decay=DECAY, muon=True)


def upcycled(family: str = "timm") -> nn.Module:
    torch.manual_seed(0)
    return moved(upcycle(build(family), [0, 2], 4, B, router_seed=1)).train()


def backward(model: nn.Module) -> None:
    torch.manual_seed(2)
    model(torch.randn(3, 3, 32, 32)).square().sum().backward()


def split(model: nn.Module) -> list[torch.optim.Optimizer]:
    """torch's Muon for the matrices, and AdamW for what is none."""
    groups = MUON(model)
    muon = torch.optim.Muon([g for g in groups if g["use_muon"]], lr=RATE)
    return [muon, torch.optim.AdamW([g for g in groups if not g["use_muon"]], lr=RATE)]


def with_timm(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [create_optimizer_v2(model, "muon", lr=RATE, weight_decay=DECAY, param_group_fn=MUON)]


def timm_alone(parameters: list[nn.Parameter], **group) -> torch.optim.Optimizer:
    return create_optimizer_v2([{"params": parameters, "weight_decay": DECAY, **group}], "muon", lr=RATE)


# Of each library: its optimisers of a model, Muon of lone matrices, AdamW of lone parameters that are not decayed.
LIBRARIES = {
    "torch": (
        split,
        partial(torch.optim.Muon, lr=RATE, weight_decay=DECAY),
        partial(torch.optim.AdamW, lr=RATE, weight_decay=0.0),
    ),
    "timm": (with_timm, timm_alone, partial(timm_alone, use_muon=False, weight_decay=0.0)),
}


def linear_weights(layer: nn.Module, read) -> dict[str, Tensor]:
    """Every expert's up and down as nn.Linear has them, of what `read` finds in the banks: weights or gradients."""
    found = {}
    for bank in ("shared", "experts"):
        module = getattr(layer, bank)
        for index in range(len(module.keys)):
            found[f"{bank} {index} up"] = read(module.keys)[index]
            found[f"{bank} {index} down"] = read(module.values)[index].T
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in found.items()}


def without_muon(layer: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in layer.named_parameters() if name.startswith("router") or name.endswith("bias")}


@pytest.mark.parametrize("library", LIBRARIES)
def test_muon_sees_one_matrix_per_expert_and_neither_biases_nor_routers(library):
    model = upcycled()
    layer = next(iter(moe_layers(model).values()))
    make, lone_muon, lone_adamw = LIBRARIES[library]
    optimizers = make(model)
    alone = {name: nn.Parameter(tensor) for name, tensor in linear_weights(layer, lambda p: p).items()}
    rest = {name: nn.Parameter(p.detach().clone()) for name, p in without_muon(layer).items()}
    twins = [lone_muon([*alone.values()]), lone_adamw([*rest.values()])]
    start = {name: p.detach().clone() for name, p in alone.items()}
    for _ in range(3):
        backward(model)
        for name, gradient in linear_weights(layer, lambda p: p.grad).items():
            alone[name].grad = gradient
        for name, parameter in without_muon(layer).items():
            rest[name].grad = parameter.grad.clone()
        for optimizer in (*optimizers, *twins):
            optimizer.step()
            optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
    for name, tensor in linear_weights(layer, lambda p: p).items():
        torch.testing.assert_close(
            tensor, alone[name].detach(), rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert not torch.allclose(tensor, start[name], atol=1e-2)
    for name, parameter in without_muon(layer).items():
        torch.testing.assert_close(parameter, rest[name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("family", ["timm", "bert"])
def test_groups_hold_every_trained_parameter_once(family):
    model = upcycled(family)
    model.get_submodule("blocks.1" if family == "timm" else "bert.encoder.layer.1").requires_grad_(False)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    plain = {p for n, p in trained.items() if n.endswith("bias") or ".router." in n or "norm" in n.lower()}
    optim = OptimConfig(weight_decay=0.1, router_lr=0.5)
    for groups in (param_groups(model, 0.1), parameter_groups(model, optim), MUON(model)):
        weights = [p for group in groups for p in group["params"]]
        assert sum(p.numel() for p in weights) == sum(p.numel() for p in trained.values())
        assert len({id(p) for p in weights}) == len(weights)
        exempt = {p for group in groups if not group["weight_decay"] for p in group["params"]}
        assert exempt == plain
    for decay in ("matrices", "all"):
        rates = {
            p: group.get("lr")
            for group in parameter_groups(model, replace(optim, decay=decay))
            for p in group["params"]
        }
        assert {p for p, rate in rates.items() if rate == 0.5} == {p for n, p in trained.items() if ".router." in n}
        assert len(rates) == len(trained)
    apart = {p for group in MUON(model) if not group["use_muon"] for p in group["params"]} - exempt
    names = {name.split(".")[-2 if name.endswith("weight") else -1] for name, p in trained.items() if p in apart}
    assert names == (
        {"cls_token", "pos_embed", "proj"}
        if family == "timm"
        else {"word_embeddings", "position_embeddings", "token_type_embeddings"}
    )


def test_what_is_done_to_an_experts_gradient_is_done_to_its_banks():
    model = upcycled()
    (muon, _), bank = split(model), next(iter(moe_layers(model).values())).experts
    backward(model)
    once = bank.keys.grad.clone()
    backward(model)
    torch.testing.assert_close(bank.keys.grad, 2 * once)
    matrices = [p for group in muon.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(matrices, 1e-3)
    assert float(bank.keys.grad.norm()) < 1e-3
    muon.zero_grad(set_to_none=False)
    assert not bank.keys.grad.any()
    backward(model.double().float())  # other memory
    before = bank.keys.detach().clone()
    muon.step()
    assert not torch.allclose(bank.keys, before, atol=1e-2)
    again = split(model)[0]
    again.load_state_dict(muon.state_dict())
    states = [[group["params"] for group in o.state_dict()["param_groups"]] for o in (again, muon)]
    assert states[0] == states[1] and len(again.state) == len(matrices)


def test_no_gradient_is_none():
    model = upcycled()
    bank = next(iter(moe_layers(model).values())).experts
    (matrix, *_) = [p for group in MUON(model) for p in group["params"] if getattr(p, "bank", None) is bank.keys]
    assert matrix.grad is None
    with pytest.raises(UserError, match="takes no gradient that its bank has not"):
        matrix.grad = torch.zeros_like(matrix)
    bank.keys.grad = torch.zeros_like(bank.keys)
    matrix.grad = torch.ones_like(matrix)
    assert bank.keys.grad[0].all() and not bank.keys.grad[1:].any()


def sharded_equals_whole(rank: int, world: int) -> bool:
    """Under FSDP 2 every rank's Muon gets its own experts, whole."""
    model = upcycled()
    whole = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, (BlockExperts, Router)):
            fully_shard(module)
    fully_shard(model)
    for either in (model, whole):
        backward(either)
        split(either)[0].step()
    for bank in ("experts", "shared"):
        for name in ("keys", "values"):
            got, want = (getattr(getattr(either.blocks[0].mlp, bank), name) for either in (model, whole))
            torch.testing.assert_close(got.full_tensor(), want, rtol=1e-4, atol=1e-5)
    cut = whole.blocks[0].mlp
    fully_shard(cut.experts, shard_placement_fn=lambda p: Shard(1 if p.ndim > 1 else 0))
    with pytest.raises(UserError, match="every expert's matrices whole on one rank, but they are cut"):
        MUON(cut)
    return True


def test_muon_under_fsdp2():
    assert run_ranks(2, sharded_equals_whole) == [True, True]
