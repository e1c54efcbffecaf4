"""A new top-2 router for the residual positions, the experts frozen (observation 2).

The paper says only that a new top-2 router is trained on the residual positions. Assumed here: a linear router without
bias, as the original (eq. vanilla-router), starts anew from a seed; its two gates are renormalised, as the target's
are; Adam trains it on one of two objectives, and the same training on complete responses is the control.

- The task loss (`train_router_on_task`), everything but this router frozen. The layer's output becomes the shared
  response of each token's original pair plus the new router's top-2 of the residual responses:
  `y = S_ij(x) + sum_{e in top-2} g_e E_e^{R_ij}(x)`. To be preferred where the model and its data are at hand.
- Reconstruction (`train_router`), the mean squared error of the residual target relative to the squared output,
  `||sum_{e in top-2} g_e E_e^R(x) - r(x)||^2 / max(||y_orig(x)||, eta)^2`. The original router with renormalised gates
  would bring this to exactly 0, so a changed ranking only tells that training started elsewhere and that the residual
  responses no longer single out the original pair: the control holds the two apart.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unifmoe_dist.studies.diagnostics.rankings import expert_order, top_pair
from unifmoe_dist.studies.diagnostics.reconstruction import ETA, Reconstruction, responses
from unifmoe_dist.studies.diagnostics.shared_channels import FrozenExperts, SharedSets
from unifmoe_dist.studies.usage.capture import expert_scores


@dataclass(frozen=True)
class RouterTraining:
    """How a residual router is trained."""

    steps: int = 400  # of Adam
    batch_size: int = 1024  # tokens per step, drawn with replacement (on the task loss: whatever a batch holds)
    lr: float = 1e-2  # decayed to 0 along a cosine
    seed: int = 0  # of the router's start and of the tokens drawn

    def new_router(self, model_dim: int, num_experts: int) -> nn.Parameter:
        """(K, d) float32 router weight, orthonormal rows where K <= d, from a seed of its own."""
        generator = torch.Generator().manual_seed(self.seed)
        return nn.Parameter(nn.init.orthogonal_(torch.empty(num_experts, model_dim), generator=generator))

    def minimise(self, weight: nn.Parameter, losses: Iterator[Tensor]) -> None:
        """A step for each loss, which is computed after the step before."""
        optimizer = torch.optim.Adam([weight], lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        for loss in losses:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


def top2_gates(logits: Tensor) -> Tensor:
    """(N, K) gates: softmax over each row's two largest logits, 0 elsewhere; differentiable."""
    best = expert_order(logits.detach())[:, :2]
    return torch.zeros_like(logits).scatter(1, best, logits.gather(1, best).softmax(1))


def train_router(x: Tensor, problem: Reconstruction, training: RouterTraining) -> tuple[Tensor, float]:
    """Train a router to reconstruct the residual target of N tokens x (N, d), whose problems are given.

    Returns:
        Logits (N, K) float64 of all tokens, and the mean relative squared error that the router ends with.
    """
    inputs = x.double()
    weight = nn.Parameter(training.new_router(x.shape[1], problem.gram.shape[1]).detach().double().to(x.device))
    generator = torch.Generator().manual_seed(training.seed)

    def loss(rows: Tensor) -> Tensor:
        some = problem.rows(rows)
        error = some.squared_error(top2_gates(inputs[rows] @ weight.T))
        return (error / some.output_square.clamp(min=ETA**2)).mean()

    size = (min(training.batch_size, len(x)),)
    drawn = (torch.randint(len(x), size, generator=generator).to(x.device) for _ in range(training.steps))
    training.minimise(weight, map(loss, drawn))
    with torch.no_grad():
        return inputs @ weight.T, float(loss(torch.arange(len(x), device=x.device)))


def train_router_on_task(
    model: nn.Module,
    layer: Any,
    sets: SharedSets,
    batches: Iterable[tuple[Mapping[str, Any], Tensor]],
    loss_of: Callable[[Any, Tensor], Tensor],
    training: RouterTraining,
) -> Tensor:
    """Train a new router of one top-k MoE layer on its task; with `sets.none_shared()`, the control.

    The model is in evaluation mode meanwhile and unchanged afterwards.

    Args:
        model: Called as `model(**inputs)`.
        layer: One of its layers whose experts can be read; `sets` are theirs.
        batches: Inputs and labels, one step each; at most `training.steps` are used.
        loss_of: From the model's output and the labels to the loss.

    Returns:
        The router's weight (K, d) float32; `x @ weight.T` are the residual logits.
    """
    experts = FrozenExperts.of(layer).to(torch.float32)
    start = training.new_router(experts.keys.shape[2], experts.num_experts)
    weight = nn.Parameter(start.detach().to(experts.keys.device))
    hook = layer.register_forward_hook(ResidualOutput(experts, sets, weight), with_kwargs=True)
    frozen = [(p, p.requires_grad) for p in model.parameters()]
    was_training = model.training
    model.eval().requires_grad_(False)
    try:
        steps = zip(range(training.steps), batches, strict=False)
        training.minimise(weight, (loss_of(model(**inputs), labels) for _, (inputs, labels) in steps))
    finally:
        hook.remove()
        model.train(was_training)
        for parameter, trained in frozen:
            parameter.requires_grad_(trained)
    return weight.detach()


@dataclass(frozen=True)
class ResidualOutput:
    """Forward hook that puts the shared response and the newly routed residual in the place of a layer's output."""

    experts: FrozenExperts
    sets: SharedSets
    weight: Tensor

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        x: Tensor = args[0] if args else kwargs["x"]
        tokens = x.reshape(-1, x.shape[-1])
        with torch.no_grad():
            scores = expert_scores(layer.route(tokens))
            parts = responses(self.experts, self.sets.shared, top_pair(scores), scores, tokens)
        gates = top2_gates(tokens.float() @ self.weight.T)
        y = parts.merged("gates") + torch.einsum("nk,nkd->nd", gates, parts.residual)
        return y.to(output.dtype).view_as(output)
