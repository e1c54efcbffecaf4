"""Training loops of one's own: the same steps on one rank, and on ranks that hold the experts or parts of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.small_models import B, build
from unifmoe_dist import diversity_loss, upcycle
from unifmoe_dist.upcycling import moe_layers

K, STEPS, ACCUMULATION, SIZE, CLIP = 4, 3, 2, 3, 0.5


def whole_model(layers: tuple[int, ...] = (0, 2), **options) -> nn.Module:
    """A tiny ViT with layers of experts that differ, all here."""
    torch.manual_seed(0)
    model = quiet(upcycle(build("timm"), layers, K, B, router_seed=1, **options).train())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def spread_model(group, layers: tuple[int, ...] = (0, 2), **options) -> nn.Module:
    """The same, its experts spread over the ranks of a group: of the whole's state each rank takes its part."""
    model = quiet(upcycle(build("timm"), layers, K, B, router_seed=1, expert_group=group, **options).train())
    model.load_state_dict(whole_model(layers, **options).state_dict())
    return model


def quiet(model: nn.Module) -> nn.Module:
    """Without the noise of some methods' gates, which every rank draws for itself."""
    for layer in moe_layers(model).values():
        layer.gate_noise = 0.0
    return model


def batch(step: int, place: int) -> tuple[Tensor, Tensor]:
    """Images and labels of a micro-batch; places are counted over ranks and accumulation."""
    generator = torch.Generator().manual_seed(1000 * step + place)
    return torch.randn(SIZE, 3, 32, 32, generator=generator), torch.randint(5, (SIZE,), generator=generator)


def loss_of(model: nn.Module, step: int, place: int, gram: float = 0.1) -> Tensor:
    images, labels = batch(step, place)
    loss = F.cross_entropy(model(images), labels)
    return loss + gram * diversity_loss(model) if gram else loss


@dataclass
class Trained:
    """Of every step: its loss, the norm of its gradients before clipping, and every gradient before that by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)


def bare_names(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters():
        yield name.removeprefix("module.").replace("_checkpoint_wrapped_module.", ""), parameter


def train(
    model: nn.Module,
    places: list[int],
    clip: Callable[[nn.Module], Tensor],
    waiting: Callable[[bool], contextlib.AbstractContextManager] = lambda last: contextlib.nullcontext(),
    optimizer: torch.optim.Optimizer | None = None,
    steps: range = range(STEPS),
    gram: float = 0.1,
) -> Trained:
    """Steps of clipped momentum SGD, each on the micro-batches at `places`, accumulated.

    `waiting(last)` is entered around a micro-batch's passes: no gradient need be averaged but those of the last.
    """
    found = Trained()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in steps:
        total = 0.0
        for place in places:
            with waiting(place == places[-1]):
                loss = loss_of(model, step, place, gram)
                (loss / len(places)).backward()
            total += loss.item() / len(places)
        grads = {name: p.grad.detach().clone() for name, p in bare_names(model) if p.grad is not None}
        found.gradients.append({n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()})
        found.norms.append(clip(model).item())
        found.losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return found


def on_one_rank(world: int, gram: float = 0.1, **options) -> tuple[nn.Module, Trained]:
    """What `world` ranks should find."""
    model = whole_model(**options)
    clip = lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), CLIP)  # noqa: E731
    return model, train(model, list(range(world * ACCUMULATION)), clip, gram=gram)


def own_places(rank: int) -> list[int]:
    return [rank * ACCUMULATION + i for i in range(ACCUMULATION)]


def assert_as_on_one_rank(found: Trained, wanted: Trained, model: nn.Module, where: str) -> None:
    """Losses, norms and gradients of a rank's training against those of one rank; of spread experts its part."""
    losses = torch.tensor(found.losses)
    if dist.is_initialized():
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
    close = {"rtol": 2e-4, "atol": 2e-6}
    torch.testing.assert_close(losses, torch.tensor(wanted.losses), msg=lambda m: f"{where}: {m}", **close)
    torch.testing.assert_close(
        torch.tensor(found.norms), torch.tensor(wanted.norms), msg=lambda m: f"{where}: {m}", **close
    )
    for step, (got, expected) in enumerate(zip(found.gradients, wanted.gradients, strict=True)):
        assert got.keys() == expected.keys()
        for name, value in got.items():
            part = own_part(model, name, expected[name])
            torch.testing.assert_close(
                value.as_subclass(Tensor), part, msg=lambda m, at=(where, step, name): f"{at}: {m}", **close
            )


def own_part(model: nn.Module, name: str, whole: Tensor) -> Tensor:
    """What this rank holds of a parameter of the whole model."""
    for layer_name, layer in moe_layers(model).items():
        layer_name = layer_name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")
        if name.startswith(f"{layer_name}.experts.") and layer.experts.share is not None:
            rows = len(whole) // layer.config.num_experts
            return whole[rows * layer.first_expert : rows * (layer.first_expert + layer.num_local_experts)]
    return whole
