"""Ranks that fail, vanish or are told to stop; steps that are not finite; saves that are cut off. Real processes."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.jobs import ROOT, Job, RunningJob, free_port, run_job
from tests.support.ranks import run_ranks
from tests.train.test_trainer import make_config
from unifmoe_dist.dispatch import alltoall
from unifmoe_dist.errors import UserError
from unifmoe_dist.layer import UniFMoELayer
from unifmoe_dist.runtime.ranks import running_ranks
from unifmoe_dist.runtime.watchdog import Watchdog
from unifmoe_dist.studies.scaling.resume_plot import plot_resume
from unifmoe_dist.train import checkpoint, evaluate
from unifmoe_dist.train.batches import TrainBatches
from unifmoe_dist.train.trainer import Trainer

SMALL = [
    "--steps",
    "6",
    "--eval_every",
    "2",
    "--log_every",
    "1",
    "--progress",
    "false",
    "--baseline",
    "false",
    "--model.layers",
    "[1,3]",
    "--model.num_experts",
    "4",
    "--data.batch_size",
    "4",
    "--optim.warmup_steps",
    "2",
]
SHARDED = [*SMALL, "--parallel.expert_parallel_size", "2"]


def words(folder: Path, *more: str, base: list[str] = SHARDED) -> list[str]:
    return [*base, "--output", str(folder / "run"), *more]


def on_call(owner, name: str, number: int, fault) -> None:
    """Have call `number` (from 1) of owner.name run `fault` first."""
    original, calls = getattr(owner, name), iter(range(1, 10**9))

    def wrapped(*args, **kwargs):
        if next(calls) == number:
            fault()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lines_about(job: Job, words: str) -> list[str]:
    return [line for line in job.output.splitlines() if words in line]


# -- one rank fails -----------------------------------------------------------------------------------------------

PLACES = {
    "data": (TrainBatches, "step", 3),
    "forward": (UniFMoELayer, "forward", 5),
    "dispatch": (alltoall._AllToAllExchange, "arrivals", 5),
    "evaluation": (evaluate, "evaluation_batches", 2),
    "save": (checkpoint, "save_file", 2),
}


def raise_at(rank, failing, place):
    def fault():
        raise ValueError("the true cause")

    if rank == failing:
        on_call(*PLACES[place], fault)


@pytest.mark.parametrize(
    "place,failing", [("data", 1), ("forward", 0), ("dispatch", 1), ("evaluation", 0), ("save", 1)]
)
def test_an_error_in_one_rank_ends_all(place, failing, tmp_path):
    job = run_job(tmp_path, 2, words(tmp_path), raise_at, failing, place)
    other = 1 - failing
    assert job.statuses == [1, 1]
    assert job.outputs[failing].count("ValueError: the true cause") == 1
    assert f"rank {failing} failed:" in job.outputs[failing]
    assert job.outputs[other].count(f"rank {other} stops because rank {failing} failed") == 1
    assert "Traceback" not in job.outputs[other] and "gloo" not in job.output
    failed_at, stopped_at = ((tmp_path / f"rank-{r}.log").stat().st_mtime for r in (failing, other))
    assert failed_at <= stopped_at  # the cause is said first


def vanish_at(rank, failing, how):
    if rank == failing:
        on_call(TrainBatches, "step", 3, die if how == "kill" else lambda: os._exit(0))


@pytest.mark.parametrize("failing,how", [(0, "kill"), (1, "exit")])
def test_a_rank_that_vanishes_ends_all(failing, how, tmp_path):
    job = run_job(tmp_path, 2, words(tmp_path), vanish_at, failing, how)
    other = 1 - failing
    assert job.statuses[failing] == (-9 if how == "kill" else 0) and job.statuses[other] == 1
    assert len(lines_about(job, f"rank {other} stops because rank {failing} was lost")) == 1
    assert "Traceback" not in job.output and "gloo" not in job.output


def stick_and_fail(rank):
    def fault():
        if rank == 0:
            time.sleep(1000)  # as in a collective of NCCL, which does not notice that a peer is gone
        raise ValueError("the true cause")

    on_call(TrainBatches, "step", 3, fault)


def test_a_rank_that_waits_for_ever_is_taken_down(tmp_path):
    job = run_job(tmp_path, 2, words(tmp_path), stick_and_fail)
    assert job.statuses == [1, 1] and lines_about(job, "rank 0 stops because rank 1 failed")


def refuse(rank, refusing):
    def fault():
        raise UserError("this will not do; use another.")

    if rank in refusing:
        on_call(TrainBatches, "step", 2, fault)
        on_call(Watchdog, "tell", 1, lambda: time.sleep(1))  # both must find out by other means


@pytest.mark.parametrize("refusing", [[1], [0, 1]])
def test_a_user_error_appears_once(refusing, tmp_path):
    job = run_job(tmp_path, 2, words(tmp_path), refuse, refusing)
    assert job.statuses == [2, 2]
    assert job.output.count("error: this will not do; use another.") == 1 and "Traceback" not in job.output


def test_a_single_process_fails_plainly(tmp_path):
    job = run_job(tmp_path, 1, words(tmp_path, base=SMALL), raise_at, 0, "forward")
    assert job.statuses == [1] and job.output.count("ValueError: the true cause") == 1


def test_port_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = run_job(tmp_path, 1, words(tmp_path, base=SMALL), occupy, port)
    assert job.statuses == [2] and f"error: port {port} is in use" in job.output and "--master_port" in job.output
    assert "Traceback" not in job.output


def occupy(rank, port):
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


BREAK = """
import os, sys
sys.path.insert(0, {launch!r})
import train
from unifmoe_dist.train.cli import run_main
from unifmoe_dist.train.batches import TrainBatches
from unifmoe_dist.errors import UserError
rank, how, step = os.environ["RANK"], {how!r}, TrainBatches.step
def faulty(self, number):
    if number == 2 and rank == "1":
        raise ValueError("the true cause")
    return step(self, number)
TrainBatches.step = faulty
def main(words):
    if how == "early" and rank == "1":
        raise UserError("rank one alone knows better.")
    train.main(words)
run_main(main)
"""


@pytest.mark.parametrize("launcher,how", [("deepspeed", "raise"), ("torchrun", "early")])
def test_under_a_launcher(launcher, how, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(BREAK.format(launch=str(ROOT / "launch"), how=how))
    starts = {
        "deepspeed": ["deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", str(free_port())],
        "torchrun": ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())],
    }
    env = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *starts[launcher], str(script), *words(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, timeout=120)
    expected = {"raise": "ValueError: the true cause", "early": "error: rank one alone knows better."}[how]
    assert done.returncode != 0 and done.stdout.count(expected) == 1, done.stdout
    assert "gloo" not in done.stdout
    if how == "raise":
        assert done.stdout.index(expected) < done.stdout.index("rank 0 stops because rank 1 failed")


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
        weights = {n: t.detach().clone() for n, t in run.model.state_dict().items()}
        return losses, weights, run.skipped


@pytest.mark.parametrize(
    "where,zero_stage,named",
    [
        ("input", 0, "rank 1: the input x"),
        ("weight", 1, "rank 1: the weight blocks.3.mlp.experts.keys"),
        ("forward", 1, "rank 1: blocks.2.mlp gave values"),
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


@pytest.mark.parametrize("zero_stage", [0, 2])
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


# -- signals ------------------------------------------------------------------------------------------------------


def signal_at(rank, signalled, step, *numbers):
    def fault():
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(1.2 if len(numbers) > 1 else 0)

    if rank == signalled:
        on_call(TrainBatches, "step", step, fault)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


def test_a_signal_saves_and_resuming_is_exact(tmp_path):
    whole = run_job(tmp_path / "a", 1, words(tmp_path / "a", base=SMALL))
    stopped = run_job(tmp_path / "b", 1, words(tmp_path / "b", base=SMALL), signal_at, 0, 3, signal.SIGTERM)
    assert whole.statuses == stopped.statuses == [0]
    assert lines_about(stopped, "saved at step 3 after SIGTERM; continue with --resume")
    assert lines_about(stopped, "finishing this step and saving; SIGTERM again leaves at once")
    assert checkpoint.latest(tmp_path / "b/run").name == "step-000003"  # between two evaluations
    assert not (tmp_path / "b/run/summary.json").exists()
    assert run_job(tmp_path / "b", 1, words(tmp_path / "b", "--resume", base=SMALL)).statuses == [0]
    one, two = (tensors_of(checkpoint.latest(tmp_path / name / "run")) for name in "ab")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    records = [(tmp_path / name / "run/metrics.jsonl").read_text() for name in "ab"]
    assert records[0] == records[1]


def test_a_run_may_end_where_a_signal_stopped_it(tmp_path):
    run_job(tmp_path, 1, words(tmp_path, "--eval_every", "9", base=SMALL), signal_at, 0, 3, signal.SIGTERM)
    assert not (tmp_path / "run/checkpoints/best").exists()  # nothing was validated
    ended = run_job(tmp_path, 1, words(tmp_path, "--resume", "--steps", "3", base=SMALL))
    assert ended.statuses == [0], ended.output
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["steps"] == summary["best_step"] == 3 and 0 <= summary["validation_accuracy"] <= 1


def test_a_signal_to_one_rank_stops_all_at_the_same_step(tmp_path):
    job = run_job(tmp_path, 2, words(tmp_path), signal_at, 1, 4, signal.SIGUSR1)
    assert job.statuses == [0, 0] and len(lines_about(job, "saved at step 4 after SIGUSR1")) == 1
    assert checkpoint.latest(tmp_path / "run").name == "step-000004"


def test_the_same_signal_again_leaves_at_once(tmp_path):
    job = run_job(tmp_path, 1, words(tmp_path, base=SMALL), signal_at, 0, 2, signal.SIGINT, signal.SIGINT)
    assert len(lines_about(job, "finishing this step and saving; Ctrl-C again leaves at once")) == 1
    assert job.statuses == [130] and lines_about(job, "second SIGINT") and not (tmp_path / "run/checkpoints").exists()


# -- saves that are cut off ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Tensors of an undisturbed run's checkpoints at steps 2 and 4, by step."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_job(folder, 2, words(folder, "--steps", "4")).statuses == [0, 0]
    return {step: tensors_of(checkpoint.latest(folder / "run", f"step-{step}")) for step in (2, 4)}


def assert_intact(run: Path, step: int, whole) -> None:
    folder = checkpoint.latest(run)  # compares every file with its digest
    assert folder.name == f"step-{step:06d}"
    tensors = tensors_of(folder)
    assert all(torch.equal(tensors[name], value) for name, value in whole[step].items())


# Where a rank dies: (owner, function, its call) just before which it does. A save is 5 files on rank 0, 3 on rank 1.
# Rank 0 replaces config.yaml, then in each save progress.json, manifest.json, the folder, `latest` and (here) `best`.
POINTS = {
    "first file": (checkpoint, "save_file", 4),
    "last file": (checkpoint, "save_file", 10),
    "rename": (os, "replace", 9),
    "latest": (os, "replace", 10),
    "best of the first save": (os, "replace", 6),
    "prune": (checkpoint, "prune", 2),
}


def kill_in_save(rank, failing, point):
    if rank == failing:
        on_call(*POINTS[point], die)


@pytest.mark.parametrize(
    "failing,point,step",
    [
        (1, "first file", 2),
        (0, "last file", 2),
        (0, "rename", 2),
        (0, "latest", 2),
        (0, "best of the first save", 2),
        (0, "prune", 4),
    ],
)
def test_a_kill_during_a_save(failing, point, step, whole, tmp_path):
    job = run_job(tmp_path, 2, words(tmp_path, "--steps", "4"), kill_in_save, failing, point)
    assert job.statuses[failing] == -9 and job.statuses[1 - failing] == 1
    assert_intact(tmp_path / "run", step, whole)
    if point in ("latest", "best of the first save"):  # a whole folder that nothing names; nothing named the best
        assert run_job(tmp_path, 2, words(tmp_path, "--steps", "4", "--resume")).statuses == [0, 0]
        assert_intact(tmp_path / "run", 4, whole)
        names = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
        assert names == {"latest", "best", "step-000002", "step-000004"}


@pytest.mark.parametrize("seed", [0, 1])
def test_a_kill_at_any_time(seed, tmp_path):
    chance = random.Random(seed)
    job = RunningJob(tmp_path, 2, words(tmp_path, "--steps", "100000", "--eval_every", "1"))
    pointer = tmp_path / "run/checkpoints/latest"
    while not pointer.is_file() and time.monotonic() < job.started + 60:
        time.sleep(0.02)
    time.sleep(chance.uniform(0.0, 1.0))
    os.kill(job.processes[chance.randrange(2)].pid, signal.SIGKILL)
    ended = job.finish()
    assert -9 in ended.statuses and 1 in ended.statuses
    step = int(checkpoint.latest(tmp_path / "run").name.removeprefix("step-"))
    more = ["--steps", str(step + 1), "--resume"]
    assert run_job(tmp_path, 2, words(tmp_path, *more)).statuses == [0, 0]
    assert checkpoint.latest(tmp_path / "run").name == f"step-{step + 1:06d}"


def limit_files(rank):
    """No file may grow beyond 64 KiB from the second save on, as on a full disk."""
    on_call(checkpoint, "save", 2, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16)))


def test_a_full_disk(tmp_path):
    job = run_job(tmp_path, 1, words(tmp_path, base=SMALL), limit_files)
    assert job.statuses == [2] and "Traceback" not in job.output
    (line,) = lines_about(job, "error: ")
    assert "step-000004 could not be written" in line and "step-000002 is intact" in line and "--resume" in line
    assert checkpoint.latest(tmp_path / "run").name == "step-000002"


def test_the_newest_checkpoints_are_kept_and_offered(tmp_path):
    folder = tmp_path / "checkpoints"
    for step in (999_997, 999_998, 999_999, 1_000_000, 1_000_001):
        (folder / f"step-{step:06d}").mkdir(parents=True)
        (folder / f"step-{step:06d}/manifest.json").write_text("{}")
    (folder / ".writing-step-1000002").mkdir()
    (folder / "latest").write_text("step-1000000")
    (folder / "best").write_text("step-999997")
    checkpoint.prune(folder, keep=2)
    assert {p.name for p in folder.iterdir() if p.is_dir()} == {"step-999997", "step-999999", "step-1000000"}
    with pytest.raises(UserError, match=re.escape("step-999999 into ")):
        checkpoint.latest(tmp_path)  # it lacks progress.json


def test_the_resume_plot_measures_distance(tmp_path):
    for name, shift in (("whole", 0.0), ("resumed", 0.25)):
        (tmp_path / name).mkdir()
        records = [{"kind": "train", "step": s, "loss": 2.0 - s / 10 + shift * (s > 4)} for s in range(1, 9)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    resumed = {"1 rank": tmp_path / "resumed"}
    gaps = plot_resume(("2 ranks", tmp_path / "whole"), resumed, 4, tmp_path / "resume.png")
    assert gaps == {"1 rank": pytest.approx(0.25)} and (tmp_path / "resume.png").stat().st_size > 0
    with pytest.raises(UserError, match="after 8"):
        plot_resume(("2 ranks", tmp_path / "whole"), resumed, 8, tmp_path / "resume.png")
