"""Training algorithms as runs: on ranks, resumed, and what is deployed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.jobs import run_job
from tests.support.ranks import run_ranks
from unifmoe_dist.algorithms.dmda import add_selective_head
from unifmoe_dist.config import AlgorithmConfig, DataConfig, DMDAConfig, ModelConfig, OptimConfig, TrainConfig
from unifmoe_dist.data.digits import build_digits_vit, digits_task
from unifmoe_dist.errors import UserError
from unifmoe_dist.lending import here
from unifmoe_dist.runtime.ranks import Ranks, running_ranks
from unifmoe_dist.train import build, checkpoint, export
from unifmoe_dist.train.cli import load_train_config
from unifmoe_dist.train.evaluate import evaluate
from unifmoe_dist.train.folder import choose_folder
from unifmoe_dist.train.trainer import Trainer

# -- runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("lfme", "dmda", "pcmoe"))
def test_a_run_deploys_the_model_alone(name, tmp_path):
    run = tmp_path / "run"
    words = [
        "--steps",
        "2",
        "--eval_every",
        "2",
        "--log_every",
        "1",
        "--progress",
        "false",
        "--baseline",
        "false",
        "--data.batch_size",
        "4",
        "--model.moe",
        "none",
        "--optim.warmup_steps",
        "1",
        "--output",
        str(run),
        "--algorithm.name",
        name,
    ]
    job = run_job(tmp_path, 1, words)
    assert job.statuses == [0], job.output
    summary = json.loads((run / "summary.json").read_text())
    assert summary["algorithm"] == name and summary["steps"] == 2
    task = digits_task()
    images = task.collate([task.test[0][i] for i in range(8)])[0]
    config = load_train_config(str(run / "config.yaml"))
    model = build.build_model(config, task)
    checkpoint.load_weights(checkpoint.latest(run, "best"), model)
    score = evaluate(model, task, task.test, 64, Ranks(0, 1, torch.device("cpu")))
    assert score.accuracy == pytest.approx(summary["test_accuracy"], abs=1e-9)
    expected = model.eval()(**images)
    one_file = export.consolidate(run, tmp_path / "model.safetensors")
    assert load_file(one_file).keys() == model.state_dict().keys()
    assert torch.equal(export.load_consolidated(one_file)(**images), expected)
    assert torch.equal(export.load_exported(export.export(run, tmp_path / "out"))(**images), expected)
    config.resume, config.algorithm.name = True, "erm"
    with pytest.raises(UserError, match=f"algorithm.name {name}"):
        choose_folder(config)


def small(folder: Path, name: str, moe: str = "none", resume: bool = False, **parallel) -> TrainConfig:
    config = TrainConfig(
        output=str(folder),
        steps=8,
        eval_every=4,
        log_every=4,
        baseline=False,
        progress=False,
        resume=resume,
        data=DataConfig(batch_size=4),
        model=ModelConfig(moe=moe, layers=[1], num_experts=2, num_blocks=4),
        optim=OptimConfig(name="adamw" if moe == "none" else "sgd", lr=2e-3, warmup_steps=2),
        algorithm=AlgorithmConfig(name, dmda=DMDAConfig(warmup_steps=5)),
    )
    for option, value in parallel.items():
        setattr(config.parallel, option, value)
    return config


def steps(trainer: Trainer, last: int) -> list[float]:
    """Losses over all ranks until step `last`; saves at step 4."""
    losses = []
    while trainer.step < last:
        result = trainer.train_step()
        losses.append(float(trainer.ranks.all_sum(result.sums["task_loss"])) / trainer.ranks.world_size)
        if trainer.step == 4:
            trainer._save(0.0, better=trainer._validate())
    return losses


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: t.detach().clone() for n, t in trainer.algorithm.state_dict().items()}


def cut_and_resumed(rank, world, folder, name, zero_stage):
    with running_ranks(1) as ranks:
        whole = Trainer(small(Path(folder) / "whole", name, zero_stage=zero_stage), ranks, Path(folder) / "whole")
        expected = steps(whole, 8)
        cut = Path(folder) / "cut"
        steps(Trainer(small(cut, name, zero_stage=zero_stage), ranks, cut), 5)
        resumed = Trainer(small(cut, name, resume=True, zero_stage=zero_stage), ranks, cut)
        assert resumed.step == 4
        assert steps(resumed, 8) == expected[4:]
        after = state(resumed)
        assert all(torch.equal(after[n], tensor) for n, tensor in state(whole).items())
        broken = next(n for n, p in resumed.algorithm.extra.named_parameters() if p.ndim == 2)
        with torch.no_grad():
            resumed.algorithm.extra.get_parameter(broken)[0, 0] = float("nan")
        with pytest.raises(UserError, match=f"the weight extra.{broken} is not finite"):
            resumed.train_step()
    return True


@pytest.mark.parametrize("name,zero_stage", [("lfme", 1), ("dmda", 0)])
def test_a_resumed_run_is_the_same_run(name, zero_stage, tmp_path):
    assert run_ranks(1, cut_and_resumed, str(tmp_path), name, zero_stage) == [True]


LAYOUTS = [("lfme", "none", 1), ("dmda", "none", 1), ("pcmoe", "none", 1), ("lfme", "unif", 2)]


def train_all(rank, world, folder):
    """Losses and final weights of every case; whole tensors by the checkpoint's names."""
    found = []
    for number, (name, moe, expert_parallel_size) in enumerate(LAYOUTS):
        size = min(world, expert_parallel_size)
        place = Path(folder) / str(number)
        config = small(place, name, moe, expert_parallel_size=size)
        config.optim.name, config.optim.lr = "sgd", 0.02  # Adam would hide gradients that are scaled
        if size > 1:
            config.parallel.gradient_accumulation = 2
        found.append((place, config))
    results = []
    with running_ranks(min(world, 2)) as sharded:
        plain = dataclasses.replace(sharded, expert_group=None)
        for place, config in found:
            ranks = sharded if config.parallel.expert_parallel_size > 1 else plain
            trainer = Trainer(config, ranks, place)
            losses = steps(trainer, 6)
            parts = {"": trainer.model, "algorithm.": trainer.algorithm.extra}
            weights = {}
            for start, part in parts.items():
                own = {n: here(t).detach().clone() for n, t in part.state_dict().items()}
                weights.update({start + n: t for n, t in checkpoint.split_by_expert(part, own).items()})
            results.append((losses, weights))
    return results


def resume_on_one_rank(rank, world, folder):
    with running_ranks(1) as ranks:
        config = small(Path(folder), "lfme", "unif", resume=True)
        config.optim.lr = 0.02
        return steps(Trainer(config, ranks, Path(folder)), 6)


def test_two_ranks_train_as_one(tmp_path):
    one = run_ranks(1, train_all, str(tmp_path / "one"))[0]
    for results in run_ranks(2, train_all, str(tmp_path / "two"), fresh=True):
        for case, (losses, weights), (expected, whole) in zip(LAYOUTS, results, one, strict=True):
            assert losses == pytest.approx(expected, abs=2e-5), case
            for name, weight in weights.items():
                torch.testing.assert_close(weight, whole[name], atol=2e-5, rtol=1e-3, msg=f"{case} {name}")
    assert len({round(losses[0], 3) for losses, _ in one}) == len(LAYOUTS)
    rest = run_ranks(1, resume_on_one_rank, str(tmp_path / "two" / "3"))[0]  # saved by two ranks, experts sharded
    assert rest == pytest.approx(one[3][0][4:], abs=2e-5)
    names = [
        name
        for path in checkpoint.latest(tmp_path / "two" / "3").glob("*.safetensors")
        if not path.name.startswith("random")
        for name in load_file(path)
    ]
    assert len(names) == len(set(names))
    assert {f"algorithm.experts.{e}.blocks.1.mlp.experts.{k}.keys" for e in range(5) for k in range(2)} <= set(names)


def test_a_selective_head_is_built_again_from_its_description():
    config = TrainConfig(algorithm=AlgorithmConfig("dmda"), model=ModelConfig(moe="none"))
    model = add_selective_head(build_digits_vit(), 0.5)
    shape = json.loads(json.dumps(export._describe(config, model)))
    export._skeleton(shape).load_state_dict(model.state_dict())
    assert export._timm_config(shape)["channel_ratio"] == 0.5
    assert "channel_ratio" not in export._timm_config(export._describe(TrainConfig(), build_digits_vit()))
