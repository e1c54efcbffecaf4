"""The training loop on real ranks: equal losses at every layout, exact resume, and errors that a person can act on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.jobs import environment, free_port, run_job
from tests.support.ranks import PLOTS, run_ranks
from tests.support.training import make_config, train
from unifmoe_dist.errors import UserError
from unifmoe_dist.lending import here
from unifmoe_dist.runtime.ranks import Ranks, running_ranks, seed_everything
from unifmoe_dist.studies.training_plots import draw_finished
from unifmoe_dist.train import build, checkpoint
from unifmoe_dist.train.batches import TrainBatches
from unifmoe_dist.train.cli import dump_train_config, load_train_config, parse_train_config
from unifmoe_dist.train.folder import choose_folder
from unifmoe_dist.train.trainer import Trainer
from unifmoe_dist.upcycling import moe_layers

ROOT = Path(__file__).parents[2]
STEPS = 14, 9  # planned, taken


def left(*values):
    """A parameter set for `make test-all`: every two of its values meet in others."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    return run_ranks(1, train, str(tmp_path_factory.mktemp("one")), *STEPS)[0]


@pytest.mark.parametrize(
    "world,parallel",
    [
        left(2, dict(expert_parallel_size=1, zero_stage=0)),
        (2, dict(expert_parallel_size=1, zero_stage=1)),
        (2, dict(expert_parallel_size=2, zero_stage=0)),
        left(2, dict(expert_parallel_size=2, zero_stage=1)),
        left(2, dict(expert_parallel_size=2, zero_stage=2)),
        left(4, dict(expert_parallel_size=2, zero_stage=1)),
        (4, dict(expert_parallel_size=2, expert_placement="far", zero_stage=2)),
        (2, dict(expert_parallel_size=2, offload_optimizer=True)),
        (2, dict(expert_parallel_size=2, gradient_accumulation=2)),
        (1, dict(gradient_checkpointing=True)),
        pytest.param(
            2, dict(expert_parallel_size=2, gradient_checkpointing=True, dispatcher="tutel"), marks=pytest.mark.tutel
        ),
    ],
)
def test_sgd_losses_equal_one_rank(world, parallel, one_rank, tmp_path):
    """SGD, because Adam would hide expert gradients that are scaled by the group size."""
    results = run_ranks(world, train, str(tmp_path), *STEPS, **parallel, fresh=True)
    keys = [one_rank[1][f"blocks.3.mlp.experts.{e}.keys"] for e in (0, 1)]
    assert (keys[0] - keys[1]).abs().max() > 1e-4  # they started as copies: training moved them apart
    assert_same_training(results, one_rank)


def assert_same_training(results, expected):
    for losses, weights, _ in results:
        assert losses == pytest.approx(expected[0], abs=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[1][name], atol=1e-5, rtol=1e-3)


def train_with_ddp(rank, world, folder):
    """The same steps in plain torch: DistributedDataParallel and SGD, no DeepSpeed."""
    config = make_config(folder)
    ranks = Ranks(rank, world, torch.device("cpu"))
    seed_everything(config.seed)
    task = build.build_task(config)
    model = build.build_model(config, task)
    replica = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = build.build_optimizer(config, model)
    schedule = build.build_schedule(config)(optimizer)
    batches = TrainBatches(task, config.data.batch_size, config.seed, rank, world, 1)
    losses = []
    for step in range(STEPS[1]):
        for inputs, labels in batches.step(step):
            loss = torch.nn.functional.cross_entropy(replica(**inputs), labels)
            gram = sum(layer.diversity_loss() for layer in moe_layers(model).values())
            (loss + config.optim.lambda_div * gram).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(ranks.all_sum(loss)) / world)
    return losses, checkpoint.split_by_expert(model, {n: here(t) for n, t in model.state_dict().items()}), []


def test_deepspeed_equals_plain_ddp(one_rank, tmp_path):
    assert_same_training(run_ranks(2, train_with_ddp, str(tmp_path)), one_rank)


@pytest.fixture(scope="module")
def one_rank_clipped(tmp_path_factory):
    return run_ranks(1, train, str(tmp_path_factory.mktemp("clipped")), *STEPS, clip=0.3, zero_stage=0)[0]


@pytest.mark.parametrize(
    "world,parallel",
    [
        left(2, dict(expert_parallel_size=2, zero_stage=0)),
        (4, dict(expert_parallel_size=2, zero_stage=0)),
        left(4, dict(expert_parallel_size=2, zero_stage=2)),
        (2, dict(expert_parallel_size=2, offload_optimizer=True)),
    ],
)
def test_clipping_counts_remote_experts(world, parallel, one_rank, one_rank_clipped, tmp_path):
    moved = [(one_rank_clipped[1][n] - w).abs().max() for n, w in one_rank[1].items()]
    assert max(moved) > 1e-3  # the limit is felt
    results = run_ranks(world, train, str(tmp_path), *STEPS, clip=0.3, **parallel, fresh=True)
    assert_same_training(results, one_rank_clipped)
    for _, _, norms in results:
        assert norms == pytest.approx(one_rank_clipped[2], rel=2e-5)


@pytest.mark.parametrize(
    "parallel",
    [dict(zero_stage=0, router_lr=0.01), left(dict()), left(dict(zero_stage=2)), dict(offload_optimizer=True)],
)
@pytest.mark.timeout(900)  # DeepSpeed's CPU Adam is compiled at its first use, which takes minutes on a busy machine
def test_resume_is_exact_on_one_rank(parallel, tmp_path):
    options = dict(optimizer="adamw", eval_every=4, timeout=800, **parallel)
    whole, weights, _ = run_ranks(1, train, str(tmp_path / "whole"), 8, **options)[0]
    run_ranks(1, train, str(tmp_path / "cut"), 8, 6, **options)  # stops after the checkpoint of step 4
    rest, resumed, _ = run_ranks(1, train, str(tmp_path / "cut"), 8, None, resume=True, **options)[0]
    assert rest == whole[4:]
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


def train_dense(rank, world, folder, **parallel):
    config = make_config(folder, **parallel)
    config.model.moe = "none"
    with running_ranks(config.parallel.expert_parallel_size) as ranks:
        trainer = Trainer(config, ranks, Path(folder))
        return float(ranks.all_sum(trainer.train_step().sums["task_loss"]))


def test_the_dense_twin_takes_the_options_of_a_sharded_run(tmp_path):
    plain = run_ranks(2, train_dense, str(tmp_path / "a"), fresh=True)
    assert run_ranks(2, train_dense, str(tmp_path / "b"), expert_parallel_size=2, fresh=True) == plain


@pytest.mark.parametrize("before,after", [left(1, 0), (0, 2)])
def test_resume_at_another_zero_stage(before, after, tmp_path):
    run, options = str(tmp_path), dict(optimizer="adamw", eval_every=4)
    expected = run_ranks(1, train, run, 6, zero_stage=before, **options)[0][0][4:]
    resumed = run_ranks(1, train, run, 6, zero_stage=after, resume=True, **options)[0][0]
    assert resumed == pytest.approx(expected, abs=1e-5)


ROUTERS_APART = dict(optimizer="adamw", router_lr=0.01, eval_every=4)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run_ranks(1, train, str(tmp_path_factory.mktemp("undisturbed")), 8, **ROUTERS_APART)[0]


@pytest.mark.parametrize(
    "before,after",
    [
        ((2, 1), (2, 2)),
        ((4, 4), (1, 1)),
        ((1, 1), (4, 4)),
        left((2, 2), (1, 1)),
        left((1, 1), (2, 2)),
        left((4, 2), (4, 4)),
        left((4, 2), (2, 2)),
    ],
)
def test_resume_at_another_layout(before, after, undisturbed, tmp_path):
    """Experts on four ranks are on two nodes: a flat run goes on with `two_level`, and one with `two_level` goes on."""
    whole, weights, _ = undisturbed
    options = dict(**ROUTERS_APART, fresh=True)

    def layout(size: int) -> dict:
        over_nodes = dict(dispatcher="two_level", ranks_per_node=2) if size == 4 else {}
        return dict(expert_parallel_size=size, **over_nodes)

    run_ranks(before[0], train, str(tmp_path), 8, 4, **layout(before[1]), **options)
    results = run_ranks(after[0], train, str(tmp_path), 8, None, resume=True, **layout(after[1]), **options)
    for rest, resumed, _ in results:
        assert rest == pytest.approx(whole[4:], abs=1e-4)
        for name, weight in resumed.items():
            torch.testing.assert_close(weight, weights[name], atol=2e-3, rtol=1e-2)


def test_gated_experts_train_and_resume_at_another_world_size(tmp_path):
    """On one rank, and on two up to step 4 and on four from there, each with its share of the experts."""
    options = dict(eval_every=4, gated=True, fresh=True)
    whole, weights, norms = run_ranks(1, train, str(tmp_path / "whole"), 8, **options)[0]
    start = run_ranks(2, train, str(tmp_path / "cut"), 8, 4, expert_parallel_size=2, **options)
    rest = run_ranks(4, train, str(tmp_path / "cut"), 8, None, resume=True, expert_parallel_size=4, **options)
    name = "blocks.3.mlp.experts.{}.gate_keys"
    assert (weights[name.format(0)] - weights[name.format(1)]).abs().max() > 3e-5  # training moved them apart
    assert {n for _, own, _ in rest for n in own if ".experts." in n} == {n for n in weights if ".experts." in n}
    for losses, own, found in rest:
        assert start[0][0] + losses == pytest.approx(whole, abs=1e-5)
        assert start[0][2] + found == pytest.approx(norms, rel=1e-4)
        for n, weight in own.items():
            torch.testing.assert_close(weight, weights[n], atol=3e-6, rtol=1e-5)


def whole_run(rank, world, folder, **options):
    os.environ[PLOTS] = "1"
    config = make_config(folder, steps=10, optimizer="adamw", **options)
    with running_ranks(config.parallel.expert_parallel_size, config.parallel.expert_placement) as ranks:
        summary = Trainer(config, ranks, Path(folder)).fit()
    if rank == 0:
        draw_finished(Path(folder))
    return summary


@pytest.mark.parametrize("precision", ["fp32", left("bf16")])
def test_a_run_writes_its_folder(precision, tmp_path):
    folder = tmp_path / "run"
    summary = run_ranks(2, whole_run, str(folder), expert_parallel_size=2, precision=precision, fresh=True)[0]
    written = json.loads((folder / "summary.json").read_text())
    needed = {"test_accuracy", "mean_block_compute", "mean_expert_count", "world_size", "wall_seconds"}
    assert needed <= written.keys() and written["test_accuracy"] == summary["test_accuracy"]
    assert 1 < written["mean_block_compute"] < 4 * 8 and written["world_size"] == 2
    for name in ("config.yaml", "metrics.jsonl", "plots/curves.png", "plots/compute.png", "plots/usage.png"):
        assert (folder / name).stat().st_size > 0
    assert list((folder / "tensorboard").rglob("events*"))
    assert load_train_config(str(folder / "config.yaml")).parallel.precision == precision
    with pytest.raises(UserError, match="--resume"):
        choose_folder(make_config(folder))
    done = run_job(tmp_path, 1, [str(folder)], script="evaluate")
    assert done.statuses == [0], done.output
    scored, end = json.JSONDecoder().raw_decode(done.output[done.output.index("{") :])
    last = done.output[done.output.index("{") + end :].strip()
    assert last.startswith("UniF-MoE on digits (rot75 held out): test accuracy ") and last.endswith("experts.")
    assert scored["accuracy"] == pytest.approx(summary["test_accuracy"], abs=0.02 if precision == "bf16" else 1e-9)


def test_resume_without_a_checkpoint(tmp_path):
    with pytest.raises(UserError, match="checkpoint"):
        choose_folder(make_config(tmp_path, resume=True))


def test_a_run_that_saved_nothing_is_not_to_be_resumed(tmp_path):
    (tmp_path / "config.yaml").write_text(dump_train_config(make_config(tmp_path)))
    for resume in (False, True):  # neither may send the user to the other
        with pytest.raises(UserError, match="delete it"):
            choose_folder(make_config(tmp_path, resume=resume))


def test_resume_with_fewer_steps_than_done(small_run):
    with pytest.raises(UserError, match="step 10.*--steps 9"):
        choose_folder(make_config(small_run, steps=9, resume=True))
    assert choose_folder(make_config(small_run, steps=10, resume=True)) == small_run


@pytest.mark.parametrize(
    "words",
    [
        "--model.num_blocks 4",
        "--data.held_out rot0",
        "--data.split_seed 1",
        "--seed 1",
        "--data.task acceptability",
        "--optim.name adamw",
    ],
)
def test_resume_as_another_run(words, small_run):
    changed = parse_train_config(["--resume", "--output", str(small_run), *words.split()])
    with pytest.raises(UserError, match="was trained with"):
        choose_folder(changed)


def test_resume_with_another_seed_names_the_seed(small_run):
    with pytest.raises(UserError, match="was trained with seed 0, so it cannot be resumed with 3"):
        choose_folder(parse_train_config(["--resume", "--output", str(small_run), "--seed", "3"]))


def other_model(rank, world, folder):
    config = make_config(folder)
    config.model.layers = [1, 99]
    with pytest.raises(UserError, match="99"):
        Trainer(config, Ranks(0, 1, torch.device("cpu")), Path(folder))
    config.model.layers, config.model.num_blocks = [1, 3], 7
    with pytest.raises(UserError, match="256.*7"):
        Trainer(config, Ranks(0, 1, torch.device("cpu")), Path(folder))
    config.model.num_blocks, config.model.num_experts, config.resume = 8, 6, True
    with pytest.raises(UserError, match="6|experts"):
        Trainer(config, Ranks(0, 1, torch.device("cpu")), Path(folder))
    assert load_train_config(str(Path(folder) / "config.yaml")).model.num_experts == 4  # as the run was made
    return True


def half_on_cpu(rank, world, folder):
    with pytest.raises(UserError, match="fp16.*GPU"):
        Trainer(make_config(folder, precision="fp16"), Ranks(0, 1, torch.device("cpu")), Path(folder))
    return True


def test_fp16_on_the_cpu_is_refused(tmp_path):
    assert run_ranks(1, half_on_cpu, str(tmp_path)) == [True]


def test_models_that_do_not_fit(small_run):
    assert run_ranks(1, other_model, str(small_run)) == [True]


@pytest.mark.parametrize(
    "launched,words,named",
    [
        (False, ["--model.num_exprts", "4"], "num_exprts"),
        left(True, ["--model.layers", "[77]"], "77"),  # test_faults.py has an error under the launcher too
    ],
)
def test_two_ranks_print_an_error_once_and_exit_non_zero(launched, words, named, tmp_path):
    """Of options, before the ranks meet; of the model, by DeepSpeed's launcher, after it."""
    words = ["--output", str(tmp_path / "run"), *words]
    if launched:
        launcher = ["deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", str(free_port())]
        command = [sys.executable, "-m", *launcher, str(ROOT / "launch/train.py"), *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120, cwd=tmp_path)
        output, statuses = done.stdout + done.stderr, [done.returncode]
    else:
        job = run_job(tmp_path, 2, words)
        output, statuses = job.output, job.statuses
    assert 0 not in statuses
    assert len([line for line in output.splitlines() if line.startswith("error:")]) == 1, output
    assert named in output and "Traceback" not in output
