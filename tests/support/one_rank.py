"""A small upcycled model trained on one rank, and the same on several: what frameworks' loops are compared with."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.small_models import B, build, logits, moved
from unifmoe_dist import diversity_loss, upcycle
from unifmoe_dist.upcycling import moe_layers

K, RATE, STEPS, MICRO = 4, 0.5, 3, 2


def upcycled(method: str) -> nn.Module:
    torch.manual_seed(0)
    return moved(upcycle(build("timm"), [0, 2], K, B, router_seed=1, method=method)).train()


def whole_model() -> nn.Module:
    return upcycled("unif")


def spread_model(whole: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """The same model, its experts spread over a group."""
    model = upcycle(build("timm"), [0, 2], K, B, router_seed=1, expert_group=group).train()
    model.load_state_dict(whole.state_dict())
    return model


def batches(step: int, world: int) -> Tensor:
    """Of every micro-batch and rank, 2 images."""
    return torch.randn(MICRO, world, 2, 3, 32, 32, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, images: Tensor) -> Tensor:
    return logits(model, {"x": images}).square().mean() + 0.1 * diversity_loss(model)


def one_rank(clip: float, world: int) -> list[tuple[float, float, nn.Module]]:
    """Loss, norm of the gradient, and the model, after every step on all ranks' batches."""
    model, found = whole_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [loss_of(model, images) / (MICRO * world) for images in batches(step, world).flatten(0, 1)]
        torch.stack(losses).sum().backward()
        assert all(p.grad.abs().sum() > 0 for p in model.parameters())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        optimizer.step()
        found.append((float(torch.stack(losses).sum()), float(norm), copy.deepcopy(model)))
    assert not clip or found[0][1] > 2 * clip  # the limit is felt
    return found


def assert_same_weights(model: nn.Module, whole: nn.Module) -> None:
    """Gradients are what SGD has taken off the weights."""
    expected = dict(whole.named_parameters())
    first = {name: layer.first_expert for name, layer in moe_layers(model).items()}
    for name, parameter in model.named_parameters():
        want = expected[name].detach()
        if len(want) != len(parameter):  # this rank's experts
            start = first[name.split(".experts.")[0]] * len(want) // K
            want = want[start : start + len(parameter)]
        torch.testing.assert_close(
            parameter.detach(), want, rtol=1e-4, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}"
        )
