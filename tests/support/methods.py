"""Small layers of every method, and small runs of them."""

from __future__ import annotations

import torch

from unifmoe_dist.config import ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from unifmoe_dist.expert_layer import AppliedStep
from unifmoe_dist.methods.registry import REGISTRY, UNIF
from unifmoe_dist.upcycling.convert import build_layer

MOE_LAYERS = [name for name, method in REGISTRY.items() if method.layer and method is not UNIF]
METHODS = [name for name in MOE_LAYERS if name != "wide"]  # which has no gate
SHAPE = dict(model_dim=12, hidden_dim=24, num_blocks=6, activation="gelu", bias=True)
OPTIONS = dict(num_experts=4, num_blocks=6, top_k=2, max_experts=6, mass_threshold=0.6)
CLOSE = dict(rtol=1e-4, atol=1e-5, equal_nan=True)


def make(method, options=OPTIONS, group=None, dispatcher="auto", seed=1, **shape):
    """A layer whose experts differ, so that mixing them up shows."""
    torch.manual_seed(seed)
    layer = build_layer(method, {**SHAPE, **shape}, options, group, dispatcher)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    if method == "emoe":
        layer._renew_gate()
    return layer


def applied(step=1, task_loss=lambda: 0.0):
    """A step of a job of one rank."""
    return AppliedStep(step, lambda t: t.detach().double().cpu(), task_loss)


def small_config(folder, method, steps=3, optimizer="adamw", **parallel):
    options = dict(num_experts=4, num_blocks=8, layers=[1, 3])
    return TrainConfig(
        output=str(folder),
        steps=steps,
        eval_every=steps,
        log_every=1,
        baseline=False,
        progress=False,
        model=ModelConfig(moe=method, **options),
        optim=OptimConfig(name=optimizer, lr=1e-3, warmup_steps=0),
        parallel=ParallelConfig(**parallel),
    )
