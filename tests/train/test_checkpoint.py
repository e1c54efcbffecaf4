"""Checkpoints: saves that are cut off leave the one before intact; the newest are kept; damage is named."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.faults import SMALL, die, lines_about, on_call, words
from tests.support.jobs import RunningJob, run_job
from tests.support.ranks import run_ranks
from tests.support.training import tensors_of, train
from unifmoe_dist.errors import UserError
from unifmoe_dist.train import checkpoint

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
    "first file": (checkpoint, "save_tensors", 4),
    "last file": (checkpoint, "save_tensors", 10),
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
        pytest.param(0, "last file", 2, marks=pytest.mark.slow),
        (0, "rename", 2),
        pytest.param(0, "latest", 2, marks=pytest.mark.slow),  # as with `best`, nothing names a whole folder
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


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
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


def test_checkpoint_holds_every_expert_once(tmp_path):
    run_ranks(2, train, str(tmp_path), 10, expert_parallel_size=2, optimizer="adamw", fresh=True)
    folder = checkpoint.latest(tmp_path)
    names: list[str] = []
    for path in folder.glob("*.safetensors"):
        if not path.name.startswith("random"):
            names += load_file(path).keys()
    assert len(names) == len(set(names))
    assert {f"blocks.1.mlp.experts.{e}.keys" for e in range(4)} <= set(names)
    assert {f"blocks.3.mlp.experts.{e}.values/exp_avg_sq" for e in range(4)} <= set(names)
    expert_bytes = sum(p.stat().st_size for p in folder.glob("experts-*-*[0-9].safetensors"))
    assert expert_bytes < 1.1 * 2 * 4 * (2 * 64 * 256 + 256 + 64) * 4  # layers x experts x floats x bytes


@pytest.mark.parametrize("name", ["dense.safetensors", "manifest.json", "progress.json"])
@pytest.mark.parametrize("damage", ["cut", "altered", "gone"])
def test_damaged_checkpoint(name, damage, tmp_path, small_run):
    folder = checkpoint.latest(small_run)
    path, original = folder / name, (folder / name).read_bytes()
    try:
        if damage == "cut":
            path.write_bytes(original[: len(original) // 2])
        elif damage == "altered":
            path.write_bytes(original[:-20] + b"\xff" * 20)
        else:
            path.unlink()
        with pytest.raises(UserError, match="step-000010"):
            checkpoint.latest(small_run)
    finally:
        path.write_bytes(original)


@pytest.mark.parametrize("name", ["nonsense", "step-7", "..", ""])
def test_a_checkpoint_that_is_not_there(name, small_run):
    with pytest.raises(UserError, match="it holds: best, latest, step-000010"):
        checkpoint.latest(small_run, name)
