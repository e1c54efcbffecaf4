"""Ranks that fail, vanish or are told to stop; steps that are not finite; saves that are cut off. Real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from tests.support.faults import SMALL, die, lines_about, on_call, words
from tests.support.jobs import ROOT, environment, free_port, run_job
from tests.support.training import tensors_of
from unifmoe_dist.dispatch import alltoall
from unifmoe_dist.errors import UserError
from unifmoe_dist.layer import UniFMoELayer
from unifmoe_dist.runtime.watchdog import Watchdog
from unifmoe_dist.studies.records import read_metrics
from unifmoe_dist.train import checkpoint, evaluate
from unifmoe_dist.train.batches import TrainBatches

# -- one rank fails -----------------------------------------------------------------------------------------------

PLACES = {
    "data": (TrainBatches, "step", 3),
    "forward": (UniFMoELayer, "forward", 5),
    "dispatch": (alltoall.AllToAllExchange, "arrivals", 5),
    "evaluation": (evaluate, "evaluation_batches", 2),
    "save": (checkpoint, "save_tensors", 2),
}


def raise_at(rank, failing, place):
    def fault():
        raise ValueError("the true cause")

    if rank == failing:
        on_call(*PLACES[place], fault)


@pytest.mark.parametrize(
    "place,failing",
    [pytest.param("data", 1, marks=pytest.mark.slow), ("forward", 0), ("dispatch", 1), ("evaluation", 0), ("save", 1)],
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


@pytest.mark.parametrize("refusing", [pytest.param([1], marks=pytest.mark.slow), [0, 1]])
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
    command = [sys.executable, "-m", *starts[launcher], str(script), *words(tmp_path)]
    compiled = tmp_path / "extensions"
    variables = {**environment(), "TORCH_EXTENSIONS_DIR": str(compiled)}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables, timeout=120
    )
    expected = {"raise": "ValueError: the true cause", "early": "error: rank one alone knows better."}[how]
    assert done.returncode != 0 and done.stdout.count(expected) == 1, done.stdout
    assert "gloo" not in done.stdout
    if how == "raise":
        assert done.stdout.index(expected) < done.stdout.index("rank 0 stops because rank 1 failed")
    assert not compiled.exists()  # DeepSpeed would, for a minute, what only its inference takes


# -- signals ------------------------------------------------------------------------------------------------------


def signal_at(rank, signalled, step, *numbers):
    def fault():
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(1.2 if len(numbers) > 1 else 0)

    if rank == signalled:
        on_call(TrainBatches, "step", step, fault)


def test_a_signal_saves_and_resuming_is_exact(tmp_path):
    whole = run_job(tmp_path / "a", 1, words(tmp_path / "a", base=SMALL))
    stopped = run_job(tmp_path / "b", 1, words(tmp_path / "b", base=SMALL), signal_at, 0, 3, signal.SIGTERM)
    assert whole.statuses == stopped.statuses == [0]
    assert lines_about(stopped, "saved at step 3 after SIGTERM; continue with --resume")
    assert lines_about(stopped, "finishing this step and saving; SIGTERM again leaves at once")
    assert checkpoint.latest(tmp_path / "b/run").name == "step-000003"  # between two evaluations
    assert not (tmp_path / "b/run/summary.json").exists()
    with (tmp_path / "b/run/metrics.jsonl").open("ab") as lines:
        lines.write(b'[1]\n\0\xff\n{"kind')  # as a power failure may leave it
    assert [record["step"] for record in read_metrics(tmp_path / "b/run")][-1] == 3
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
