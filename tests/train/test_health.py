"""Steps that are not finite: named, or left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.faults import SMALL, lines_about, words
from tests.support.jobs import run_job
from tests.support.ranks import run_ranks
from tests.support.training import make_config
from unifmoe_dist.errors import UserError
from unifmoe_dist.lending import here
from unifmoe_dist.runtime.ranks import running_ranks
from unifmoe_dist.train import checkpoint
from unifmoe_dist.train.trainer import Trainer

# -- steps that are not finite ------------------------------------------------------------------------------------

BAD_STEP = 3


class _BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("inf")


def spoil(run: Trainer, where: str) -> None:
    """Break this rank's part of the step that comes next."""
    if where == "input":
        original = run.batches.step

        def step(number):
            for inputs, labels in original(number):
                if number == BAD_STEP:
                    inputs["x"][0, 0, 0, 0] = float("nan")
                yield inputs, labels

        run.batches.step = step
    elif where == "weight":
        with torch.no_grad():
            run.layers["blocks.3.mlp"].experts.keys[0, 0, 0] = float("nan")
    elif where == "forward":
        run.model.blocks[2].mlp.register_forward_hook(lambda module, args, y: y + y.sum() * float("inf"))
    else:
        run.model.blocks[2].mlp.register_forward_hook(lambda module, args, y: _BadGradient.apply(y))


def train_spoiled(rank, world, folder, where, choice, zero_stage, leave_out=False):
    config = make_config(folder, steps=6, optimizer="adamw", expert_parallel_size=world, zero_stage=zero_stage)
    config.optim.on_nonfinite, config.optim.grad_clip = choice, 1.0
    with running_ranks(world) as ranks:
        run = Trainer(config, ranks, Path(folder))
        losses = []
        try:
            while run.step < 6:
                if run.step == BAD_STEP:
                    run._save(0.0, better=True)
                    if leave_out:
                        run.step += 1
                        continue
                    if rank == world - 1:
                        spoil(run, where)
                result = run.train_step()
                losses.append(float(result.sums["task_loss"]) if result.finite else None)
        except UserError as error:
            return str(error)
        weights = {n: here(t).detach().clone() for n, t in run.model.state_dict().items()}
        return losses, weights, run.skipped


@pytest.mark.parametrize(
    "where,zero_stage,named",
    [
        ("input", 0, "rank 1: the input x"),
        ("weight", 1, "rank 1: the weight blocks.3.mlp.experts.keys"),
        pytest.param("forward", 1, "rank 1: blocks.2.mlp gave values", marks=pytest.mark.slow),
        ("backward", 2, "rank 1: the gradient through blocks.2.mlp"),
    ],
)
def test_a_step_that_is_not_finite_is_named(where, zero_stage, named, tmp_path):
    choice = "skip" if where == "weight" else "stop"  # a broken weight cannot be skipped
    messages = run_ranks(2, train_spoiled, str(tmp_path), where, choice, zero_stage, fresh=True)
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"step {BAD_STEP + 1}: ") and named in messages[0]
    assert f"step {BAD_STEP} is saved" in messages[0] and "--optim.on_nonfinite" in messages[0]
    assert checkpoint.latest(tmp_path).name == f"step-{BAD_STEP:06d}"


@pytest.mark.parametrize("zero_stage", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_skipped_step_is_as_if_never_seen(zero_stage, tmp_path):
    spoiled = run_ranks(2, train_spoiled, str(tmp_path / "a"), "input", "skip", zero_stage, fresh=True)
    clean = run_ranks(2, train_spoiled, str(tmp_path / "b"), "input", "skip", zero_stage, leave_out=True, fresh=True)
    for (losses, weights, skipped), (clean_losses, clean_weights, _) in zip(spoiled, clean, strict=True):
        assert losses.pop(BAD_STEP) is None and skipped == 1
        assert losses == clean_losses and all(torch.equal(weights[n], clean_weights[n]) for n in weights)


def spoil_job(rank):
    original = Trainer.train_step

    def train_step(self):
        if self.step == BAD_STEP and rank == 0:
            spoil(self, "input")
        return original(self)

    Trainer.train_step = train_step


def test_skipped_steps_are_counted(tmp_path):
    options = ["--optim.on_nonfinite", "skip", "--eval_every", "3"]
    job = run_job(tmp_path, 1, words(tmp_path, *options, base=SMALL), spoil_job)
    assert job.statuses == [0] and lines_about(job, "warning: step 4: ")
    assert json.loads((tmp_path / "run/summary.json").read_text())["skipped_steps"] == 1
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    counts = {r["step"]: r["skipped_steps"] for r in records if r["kind"] == "train"}
    assert counts == {1: 0, 2: 0, 3: 0, 5: 1, 6: 1}  # step 4 has no losses to report
    assert "NaN" not in (tmp_path / "run/metrics.jsonl").read_text()
