"""What a run as a whole does with parts that are tested by themselves."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import torch

from tests.support.jobs import run_job
from tests.support.ranks import run_ranks
from unifmoe_dist.config import OptimConfig
from unifmoe_dist.runtime import compiling, heartbeat
from unifmoe_dist.runtime.ranks import running_ranks
from unifmoe_dist.train import deepspeed
from unifmoe_dist.train.cli import load_train_config, parse_train_config
from unifmoe_dist.train.trainer import Trainer

DYNMOE = [
    "--model.moe",
    "dynmoe",
    "--model.adapt_every",
    "epoch",
    "--model.layers",
    "[1,3]",
    "--model.num_experts",
    "2",
]
WORDS = [*DYNMOE, "--epochs", "2", "--data.batch_size", "40", "--data.sampling", "replacement", "--progress", "false"]


def passed_on(rank, world, folder):
    told, built = [], []
    announced = compiling.announced
    compiling.announced = lambda name, *rest: built.append(name) or nullcontext()
    config = parse_train_config([*WORDS, "--output", folder])
    with running_ranks(1) as ranks:
        trainer = Trainer(config, ranks, Path(folder))
        for layer in trainer.layers.values():
            layer.after_step = lambda step: told.append(step.epoch_steps) or []
        trainer.train_step()
        deepspeed.cpu_adam([{"params": [torch.nn.Parameter(torch.ones(1))]}], OptimConfig())
    compiling.announced = announced
    first = [index for step in range(trainer.epoch_steps) for index in trainer.batches.source.indices(0, step)]
    return trainer.epoch_steps, told, built, len(first) - len(set(first))


def test_a_run_passes_its_options_on(tmp_path):
    """To the layers how long an epoch is, to the batches how they are drawn; and each compilation is announced."""
    ((steps, told, built, repeats),) = run_ranks(1, passed_on, str(tmp_path / "run"), fresh=True)
    assert steps > 1 and told == [steps, steps]
    assert repeats > 0  # none within an epoch without replacement
    assert built == [compiling.CPU_ADAM]


def hasty(rank):
    heartbeat.SECONDS = 0.02


def test_a_run_whose_output_is_a_file(tmp_path):
    """It says where it runs and what it is at, and when it goes on, what was changed."""
    assert (heartbeat.SECONDS, compiling.PATIENCE_SECONDS) == (30, 10)
    run = tmp_path / "run"
    words = ["--output", str(run), "--eval_every", "2", "--data.batch_size", "4", "--no-baseline"]
    job = run_job(tmp_path, 1, [*words, "--steps", "2", "--optim.lr", "0.002"], hasty)
    assert job.statuses == [0], job.output
    starts = job.output.index(f"{run} starts, 2 steps")
    for part in ("1 rank on CPU", "model: unif in layers", "data: digits, rot75 held out", "batch: 20 items a step"):
        assert job.output.index(part) > starts
    assert re.search(r"^\[\d+ s\] (reading the data of digits|building the model|step \d of 2)", job.output, re.M)
    again = run_job(tmp_path, 1, [*words, "--resume", "--steps", "4", "--optim.lr", "0.01"])
    assert again.statuses == [0], again.output
    assert f"{run} goes on from step 2 of 4" in again.output and "  optim.lr: 0.002 -> 0.01" in again.output
    assert load_train_config(str(run / "config-1.yaml")).optim.lr == 0.002
    assert load_train_config(str(run / "config.yaml")).optim.lr == 0.01
