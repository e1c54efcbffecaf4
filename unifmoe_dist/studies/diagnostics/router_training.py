"""A new top-2 router for the residual positions, the experts frozen (observation 2).

The paper says only that a new top-2 router is trained on the residual positions. Assumed here: a linear router without
bias, as the original (eq. vanilla-router), starts anew from a seed; its two gates are renormalised, as the target's
are; it minimises the mean squared error of the residual target relative to the squared output,
`||sum_{e in top-2} g_e E_e^R(x) - r(x)||^2 / max(||y_orig(x)||, eta)^2`, with Adam.

The original router with renormalised gates would bring this loss to exactly 0, so a changed ranking only tells that
training started elsewhere and that the residual responses no longer single out the original pair. `train_router` on
the complete responses, from the same seed, is the control that holds the two apart. `task_router.py`
trains the router on the task loss instead, which has no such optimum: prefer it where the model and data are at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unifmoe_dist.studies.diagnostics.demand import ETA
from unifmoe_dist.studies.diagnostics.pairs import expert_order
from unifmoe_dist.studies.diagnostics.reconstruction import Reconstruction


@dataclass(frozen=True)
class RouterTraining:
    """How a residual router is trained.

    Args:
        steps: Adam steps.
        batch_size: Tokens per step, drawn with replacement (on the task loss: whatever a batch holds).
        lr: Learning rate, decayed to 0 along a cosine.
        seed: Seed of the router's start and of the tokens drawn.
    """

    steps: int = 400
    batch_size: int = 1024
    lr: float = 1e-2
    seed: int = 0


def new_router(model_dim: int, num_experts: int, seed: int) -> Tensor:
    """(K, d) float32 router weight, orthonormal rows where K <= d, from a seed of its own."""
    weight = torch.empty(num_experts, model_dim)
    return nn.init.orthogonal_(weight, generator=torch.Generator().manual_seed(seed))


def top2_gates(logits: Tensor) -> Tensor:
    """(N, K) gates: softmax over each row's two largest logits, 0 elsewhere; differentiable."""
    best = expert_order(logits.detach())[:, :2]
    return torch.zeros_like(logits).scatter(1, best, logits.gather(1, best).softmax(1))


def train_router(x: Tensor, problem: Reconstruction, training: RouterTraining) -> tuple[Tensor, float]:
    """Train a router to reconstruct the residual target.

    Args:
        x: (N, d) tokens.
        problem: Their N reconstruction problems.
        training: How.

    Returns:
        Logits (N, K) float64 of all tokens, and the mean relative squared error that the router ends with.
    """
    inputs = x.double()
    weight = nn.Parameter(new_router(x.shape[1], problem.gram.shape[1], training.seed).double().to(x.device))
    optimizer = torch.optim.Adam([weight], lr=training.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.steps)
    generator = torch.Generator().manual_seed(training.seed)
    scale = problem.output_square.clamp(min=ETA**2)
    for _ in range(training.steps):
        rows = torch.randint(len(x), (min(training.batch_size, len(x)),), generator=generator).to(x.device)
        batch = Reconstruction(
            problem.gram[rows], problem.products[rows], problem.target_square[rows], problem.output_square[rows]
        )
        loss = (batch.squared_error(top2_gates(inputs[rows] @ weight.T)) / scale[rows]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        logits = inputs @ weight.T
        error = (problem.squared_error(top2_gates(logits)) / scale).mean()
    return logits, float(error)
