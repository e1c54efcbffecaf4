"""A small run on digits, step by step."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from unifmoe_dist.config import DataConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from unifmoe_dist.runtime.ranks import running_ranks
from unifmoe_dist.train import checkpoint
from unifmoe_dist.train.trainer import Trainer


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


def make_config(
    folder, *, steps=14, eval_every=10, optimizer="sgd", resume=False, seed=0, clip=0.0, dispatcher="auto", **parallel
) -> TrainConfig:
    return TrainConfig(
        output=str(folder),
        steps=steps,
        eval_every=eval_every,
        log_every=5,
        baseline=False,
        progress=False,
        resume=resume,
        seed=seed,
        data=DataConfig(batch_size=4),
        model=ModelConfig(layers=[1, 3], num_experts=4, dispatcher=dispatcher),
        optim=OptimConfig(name=optimizer, lr=0.05 if optimizer == "sgd" else 1e-3, warmup_steps=3, grad_clip=clip),
        parallel=ParallelConfig(**parallel),
    )


def train(rank, world, folder, steps, stop=None, **options):
    """Global losses of the training steps, final weights by global name (this rank's experts), and gradient norms."""
    config = make_config(folder, steps=steps, **options)
    config.validate(world)
    with running_ranks(config.parallel.expert_parallel_size, config.parallel.expert_placement) as ranks:
        trainer = Trainer(config, ranks, Path(folder))
        losses, norms = [], []
        while trainer.step < (stop or steps):
            sums = trainer.train_step().sums
            losses.append(float(ranks.all_sum(sums["task_loss"])) / world)
            norms.append(float(trainer.engine.get_global_grad_norm() or 0.0))
            if trainer.step % config.eval_every == 0:
                trainer._save(0.0, better=trainer._validate())
        weights = {n: t.detach().clone() for n, t in trainer.model.state_dict().items()}
        return losses, checkpoint.split_by_expert(trainer.model, weights), norms
