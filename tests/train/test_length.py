"""Epochs, the plan of a schedule, and patience: when a run ends and which checkpoint it keeps."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from tests.support.glue_tables import TINY_ENCODER, write_rte
from tests.support.ranks import run_ranks
from tests.support.tasks import glue_task
from unifmoe_dist.config import DataConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from unifmoe_dist.data.encoders import TINY
from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime.ranks import running_ranks
from unifmoe_dist.train import build, checkpoint
from unifmoe_dist.train import trainer as trainer_module
from unifmoe_dist.train.cli import load_train_config, parse_train_config
from unifmoe_dist.train.evaluate import Score
from unifmoe_dist.train.folder import choose_folder
from unifmoe_dist.train.length import Selection, check_epochs, in_steps
from unifmoe_dist.train.trainer import Trainer

# -- epochs and patience ----------------------------------------------------------------------------------------------


def test_selection_counts_by_hand():
    selection, seen = Selection(), []
    for step, score in enumerate([-1.0, 0.5, 0.5, 0.4, 0.6, 0.6], 1):
        better = selection.offer(step, score, 0.9)
        seen.append((better, selection.step, selection.waited, selection.exhausted(2), selection.exhausted(None)))
        selection = Selection.from_progress(json.loads(json.dumps(selection.progress())))
    assert seen == [
        (True, 1, 0, False, False),
        (True, 2, 0, False, False),
        (False, 2, 1, False, False),
        (False, 2, 2, True, False),
        (True, 5, 0, False, False),
        (False, 5, 1, False, False),
    ]


def rte_config(root, output, **options) -> TrainConfig:
    return TrainConfig(
        output=str(output),
        log_every=1,
        baseline=False,
        progress=False,
        data=DataConfig(task="rte", root=str(root), batch_size=4),
        model=ModelConfig(backbone=TINY, pretrained="none", layers=[1], num_experts=2, num_blocks=4),
        optim=OptimConfig(lr=1e-3, warmup_steps=0, schedule="linear"),
        parallel=ParallelConfig(),
        **options,
    )


def test_an_epoch_rounds_up_and_the_schedule_covers_the_whole_plan(tmp_path):
    write_rte(tmp_path)
    config = rte_config(tmp_path, tmp_path / "run", epochs=3)
    config.validate(1)
    task = glue_task("rte", tmp_path, TINY_ENCODER)
    planned = in_steps(config, task)
    assert (planned.steps, planned.eval_every) == (9, 3)  # 10 items in batches of 4
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=9.0)
    schedule, rates = build.build_schedule(planned)(optimizer), []
    for _ in range(9):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([9, 8, 7, 6, 5, 4, 3, 2, 1]) and schedule.get_last_lr()[0] == 0.0
    config.data.batch_size = 100
    assert in_steps(config, task).steps == 3
    config.data.batch_size = 101
    with pytest.raises(UserError, match="batch_size 101 holds all 10 items .* more than 10 times; give at most 10"):
        in_steps(config, task)
    config.epochs, config.steps = None, 5
    assert in_steps(config, task) == config


@pytest.mark.parametrize(
    "words,expected",
    [
        ("--epochs 2 --steps 9", "epochs 2 sets steps .*leave steps out"),
        ("--epochs 0", "epochs must be at least 1"),
        ("--epochs 2 --eval_every 9", "leave eval_every out"),
        ("--patience 0", "patience must be at least 1"),
    ],
)
def test_epochs_that_contradict(words, expected):
    with pytest.raises(UserError, match=expected):
        parse_train_config(words.split()).validate(1)


def test_a_run_in_epochs_resumes_only_with_the_same_epochs(tmp_path):
    config = rte_config(tmp_path, tmp_path / "run", epochs=3)
    config.steps = 9  # as in_steps plans it
    check_epochs(config, 3, {"epoch_steps": 3, "step": 9})
    with pytest.raises(UserError, match="epochs had 2 steps and would now have 3.*data.batch_size"):
        check_epochs(config, 3, {"epoch_steps": 2, "step": 2})
    with pytest.raises(UserError, match="at epoch 4 already, beyond --epochs 3"):
        check_epochs(config, 3, {"epoch_steps": 3, "step": 12})


VALIDATION = [0.5, 0.6, 0.6, 0.55, 0.6, 0.4, 0.9, 0.9]  # by epoch: best is 2, and the fourth without gain is 6


def fit_with_scores(ranks, root, output, stop_at=None):
    """Real training whose scores are given; a stop signal reaches the last rank before step `stop_at`."""
    config = rte_config(root, output, epochs=8, patience=4, resume=(Path(output) / "config.yaml").exists())
    config.validate(ranks.world_size)
    trainer = Trainer(config, ranks, choose_folder(config))
    asked, real, train_step = [], trainer_module.evaluate, trainer.train_step

    def scored(*args) -> Score:
        epoch = trainer.step // trainer.epoch_steps
        asked.append(epoch)
        score = real(*args)  # the true collective work
        return Score(score.metric, VALIDATION[epoch - 1], score.accuracy, score.per_dataset, score.usage)

    def step() -> trainer_module.StepResult:
        if trainer.step + 1 == stop_at and ranks.rank == ranks.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step()

    trainer_module.evaluate, trainer.train_step = scored, step
    try:
        return trainer.fit(), asked, trainer.step
    finally:
        trainer_module.evaluate = real


def runs_with_scores(rank, world, root):
    with running_ranks(1) as ranks:
        return [
            fit_with_scores(ranks, root, f"{root}/whole"),
            fit_with_scores(ranks, root, f"{root}/cut", 14),  # inside epoch 5
            checkpoint.load_progress(checkpoint.latest(Path(root, "cut"))),
            fit_with_scores(ranks, root, f"{root}/cut"),
            fit_with_scores(ranks, root, f"{root}/cut"),
        ]


def test_patience_ends_the_run_on_all_ranks_and_survives_a_resume(tmp_path):
    write_rte(tmp_path / "RTE")  # three steps per epoch
    for whole, cut, saved, resumed, again in run_ranks(2, runs_with_scores, str(tmp_path), fresh=True):
        summary, asked, step = whole
        assert asked == [1, 2, 3, 4, 5, 6, 6] and step == 18  # the last is the test
        assert (summary["epochs"], summary["best_step"], summary["validation_score"]) == (6.0, 6, 0.6)
        assert cut == (None, [1, 2, 3, 4], 14)
        assert (saved["best"], saved["best_step"], saved["evaluations_without_improvement"]) == (0.6, 6, 2)
        summary, asked, step = resumed
        assert asked == [5, 6, 6] and step == 18 and (summary["epochs"], summary["best_step"]) == (6.0, 6)
        summary, asked, step = again  # tested again, not trained further
        assert asked == [6] and step == 18 and summary["best_step"] == 6
    config = load_train_config(str(tmp_path / "cut/config.yaml"))
    assert (config.epochs, config.patience, config.steps) == (8, 4, TrainConfig.steps)


def test_a_checkpoint_from_before_there_was_patience():
    assert Selection.from_progress({"best": 0.7, "best_step": 3}) == Selection(3, 0.7, 0.7, 0)
    assert Selection.from_progress({"best": -1.0, "best_step": 0}) == Selection()
