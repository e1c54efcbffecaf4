"""A small run on digits, step by step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from safetensors.torch import load_file

from unifmoe_dist.config import DataConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from unifmoe_dist.lending import here
from unifmoe_dist.runtime.ranks import running_ranks
from unifmoe_dist.train import checkpoint
from unifmoe_dist.train.trainer import Trainer
from unifmoe_dist.upcycling import convert


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


def make_config(
    folder,
    *,
    steps=14,
    eval_every=10,
    optimizer="sgd",
    router_lr=None,
    resume=False,
    seed=0,
    clip=0.0,
    dispatcher="auto",
    **parallel,
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
        optim=OptimConfig(
            name=optimizer, lr=0.05 if optimizer == "sgd" else 1e-3, router_lr=router_lr, warmup_steps=3, grad_clip=clip
        ),
        parallel=ParallelConfig(**parallel),
    )


@contextmanager
def gated_backbones() -> Iterator[None]:
    """Every FFN that is upcycled inside has a gate; weights are scaled up, so that the product's gradients are felt."""
    find = convert.find_adapter

    def gated(model: torch.nn.Module):
        adapter = find(model)

        def read(block):
            ffn = adapter.read(block)
            up, gate = copy.deepcopy(ffn.up), copy.deepcopy(ffn.up)
            with torch.no_grad():
                up.weight.mul_(20)
                gate.weight.copy_(up.weight.flip(0))
                gate.bias.fill_(1.0)
            return replace(ffn, up=up, gate=gate)

        return SimpleNamespace(name=adapter.name, blocks=adapter.blocks, install=adapter.install, read=read)

    with patch.object(convert, "find_adapter", gated):
        yield


def train(rank, world, folder, steps, stop=None, gated=False, **options):
    """Global losses of the training steps, final weights by global name (this rank's experts), and gradient norms."""
    with gated_backbones() if gated else nullcontext():
        return _train(world, folder, steps, stop, **options)


def _train(world, folder, steps, stop, **options):
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
        weights = {n: here(t).detach().clone() for n, t in trainer.model.state_dict().items()}
        return losses, checkpoint.split_by_expert(trainer.model, weights), norms
