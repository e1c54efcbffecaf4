"""The residual router trained on the task loss, everything but this router frozen.

This is the objective to prefer where the model and its data are at hand: unlike reconstruction, it does not have the
original router for its optimum. With `sets.none_shared()` it trains the control, on complete responses. The layer's
output becomes the shared response of each token's original pair plus the new router's top-2 of the residual responses:
`y = S_ij(x) + sum_{e in top-2} g_e E_e^{R_ij}(x)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unifmoe_dist.studies.diagnostics.alignment import SharedSets
from unifmoe_dist.studies.diagnostics.channels import FrozenExperts
from unifmoe_dist.studies.diagnostics.pairs import top_pair
from unifmoe_dist.studies.diagnostics.reconstruction import responses
from unifmoe_dist.studies.diagnostics.router_training import RouterTraining, new_router, top2_gates
from unifmoe_dist.studies.usage.capture import expert_scores


def train_router_on_task(
    model: nn.Module,
    layer: Any,
    sets: SharedSets,
    batches: Iterable[tuple[Mapping[str, Any], Tensor]],
    loss_of: Callable[[Any, Tensor], Tensor],
    training: RouterTraining,
) -> Tensor:
    """Train a new router of one top-k MoE layer on its task.

    The model is in evaluation mode meanwhile and unchanged afterwards.

    Args:
        model: Called as `model(**inputs)`.
        layer: One of its layers, a `RoutingLayer` whose experts can be read.
        sets: Shared sets of its experts.
        batches: Inputs and labels, one step each; at most `training.steps` are used.
        loss_of: From the model's output and the labels to the loss.
        training: Steps, learning rate and seed.

    Returns:
        The router's weight (K, d) float32; `x @ weight.T` are the residual logits.
    """
    experts = FrozenExperts.of(layer).to(torch.float32)
    device = experts.keys.device
    start = new_router(experts.keys.shape[2], experts.num_experts, training.seed)
    weight = nn.Parameter(start.to(device))
    optimizer = torch.optim.Adam([weight], lr=training.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.steps)
    hook = layer.register_forward_hook(_ResidualOutput(experts, sets, weight), with_kwargs=True)
    frozen = [(p, p.requires_grad) for p in model.parameters()]
    was_training = model.training
    model.eval().requires_grad_(False)
    try:
        for _, (inputs, labels) in zip(range(training.steps), batches, strict=False):
            loss = loss_of(model(**inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    finally:
        hook.remove()
        model.train(was_training)
        for parameter, trained in frozen:
            parameter.requires_grad_(trained)
    return weight.detach()


class _ResidualOutput:
    """Forward hook that puts the shared response and the newly routed residual in the place of a layer's output."""

    def __init__(self, experts: FrozenExperts, sets: SharedSets, weight: Tensor) -> None:
        self.experts, self.sets, self.weight = experts, sets, weight

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        x: Tensor = args[0] if args else kwargs["x"]
        tokens = x.reshape(-1, x.shape[-1])
        with torch.no_grad():
            scores = expert_scores(layer.route(tokens))
            parts = responses(self.experts, self.sets.shared, top_pair(scores), scores, tokens)
        gates = top2_gates(tokens.float() @ self.weight.T)
        y = parts.merged("gates") + torch.einsum("nk,nkd->nd", gates, parts.residual)
        return y.to(output.dtype).view_as(output)
