"""Sweeps: what a table needs; runs that finish, fail, are killed, stopped, shared and taken up again."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from launch import report as report_command
from launch import sweep as sweep_command
from tests.support.ranks import _context
from tests.support.sweeps import CPU, plan
from tests.support.tiny_images import make_benchmark
from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.sweep import pool, run_folder
from unifmoe_dist.studies.sweep.pool import run_all
from unifmoe_dist.studies.sweep.run_folder import State, state_of
from unifmoe_dist.train.cli import dump_train_config

ROOT = Path(__file__).parents[2]


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a whole sweep: two environments, two seeds and three methods, two steps each."""
    output = tmp_path_factory.mktemp("a 'b' \"c\"; $(touch named) `touch named`\n<script>{0} %d")  # nobody runs names
    sweep_command.main(words_of(output))
    return output


@pytest.mark.parametrize("garbage", ["", "{", "[1]", "{}"])
def test_what_is_no_summary_does_not_pass_for_a_finished_run(tmp_path, garbage):
    (run,) = plan(tmp_path)
    run.folder.mkdir(parents=True)
    (run.folder / "config.yaml").write_text(dump_train_config(run.config))
    (run.folder / "summary.json").write_text(json.dumps({"wall_seconds": 1.0}))
    (run.folder / "run.json").write_text("garbage")
    assert state_of(run) is State.FINISHED
    (run.folder / "summary.json").write_text(garbage)
    assert state_of(run) is State.NEW
    run_folder.prepare(run)
    assert json.loads((run.folder / "run.json").read_text())["method"] == "dense"


def words_of(output: Path, *more: str) -> list[str]:
    return [
        "--table",
        "digits",
        "--methods",
        "dense",
        "unif",
        "unif-blocks-4",
        "--held-out",
        "rot0",
        "rot75",
        "--seeds",
        "0",
        "1",
        "--set",
        "steps=2",
        "eval_every=2",
        "--jobs",
        "1",
        "--output",
        str(output),
        *more,
    ]


def test_a_whole_sweep_gives_the_report(finished, capsys):
    report_command.main([str(finished)])
    page = capsys.readouterr().out
    assert "12 of 12 planned runs have finished." in page
    lines = {line.split(" | ")[0].strip("| "): line for line in page.splitlines() if line.startswith("| ")}
    assert set(lines) == {"method", "---", "Dense", "UniF-MoE", "UniF-MoE, B = 4"}
    folder = finished / "digits"
    by_seed = [
        [
            json.loads((folder / place / "dense" / f"seed{seed}" / "summary.json").read_text())["test_accuracy"]
            for place in ("rot0", "rot75")
        ]
        for seed in (0, 1)
    ]
    means = [100 * sum(scores) / 2 for scores in by_seed]
    spread = abs(means[0] - means[1]) / 2**0.5  # the deviation of two values, over n - 1
    assert f"{sum(means) / 2:.1f} ± {spread:.1f}" in lines["Dense"]
    assert "8.00 | 1.00 | 0.00 |" in lines["Dense"]
    assert "only rot0, rot75 of 6 environments were planned" in page
    for name in ("report.md", "digits.md", "digits.tex", "digits.csv", "digits.png", "digits-scores.png"):
        assert (finished / "report" / name).stat().st_size > 300
    assert not list(Path().glob("named*"))


def test_a_finished_sweep_is_skipped(finished, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    sweep_command.main(words_of(finished))
    assert "12 of 12 runs are finished, 0 of them now" in capsys.readouterr().out
    after = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file()}
    assert {path: after[path] for path in before} == before
    sweep_command.main(words_of(finished, "--dry-run"))
    assert "12 runs: 0 to do, 0 half done, 12 finished" in capsys.readouterr().out


@pytest.mark.parametrize("method,option", [("dynmoe", "gate_temperature True"), ("gmoe", "load_loss shazeer")])
def test_a_run_of_a_version_with_another_gate_is_not_taken_for_this_one(method, option, tmp_path):
    (run,) = plan(tmp_path, methods=(method,))
    run.folder.mkdir(parents=True)
    lines = dump_train_config(run.config).splitlines(True)
    (run.folder / "config.yaml").write_text("".join(lines))
    assert state_of(run) is State.NEW
    old = (line for line in lines if "gate_temperature" not in line and "load_loss" not in line)
    (run.folder / "config.yaml").write_text("".join(old))
    with pytest.raises(UserError, match=f"holds a run with model.{option}"):
        state_of(run)


def test_a_run_with_other_options_is_not_taken_for_this_one(finished):
    with pytest.raises(UserError, match="holds a run with steps 2, not 3"):
        sweep_command.main(words_of(finished, "--set", "steps=3", "eval_every=2"))
    same = plan(finished, settings=("steps=2", "eval_every=2", "keep_checkpoints=5", "log_every=1"))
    assert state_of(same[0]) is State.FINISHED  # options that change no result


def test_a_failed_run_is_listed_and_tried_again(tmp_path, capsys):
    """Its checkpoint is damaged; the other run is done all the same."""
    words = [
        "--config",
        str(ROOT / "configs/digits-comparison.yaml"),
        "--methods",
        "dense",
        "--held-out",
        "rot0",
        "rot15",
        "--seeds",
        "0",
        "--set",
        "steps=2",
        "eval_every=2",
        "--output",
        str(tmp_path),
        "--jobs",
        "1",
        "--discard-checkpoints",
    ]
    run = plan(tmp_path)[0]
    run_folder.prepare(run)
    (run.folder / "config.yaml").write_text(dump_train_config(run.config))
    (run.folder / "checkpoints").mkdir()
    (run.folder / "checkpoints" / "latest").write_text("step-000001")
    assert state_of(run) is State.PARTIAL
    with pytest.raises(SystemExit) as left:
        sweep_command.main(words)
    out = capsys.readouterr().out
    assert left.value.code == 1
    assert "1 of 2 runs are finished, 1 of them now; 1 failed" in out
    assert "has no readable manifest" in out and str(run.folder / "log.txt") in out

    (run.folder / "checkpoints" / "latest").unlink()  # now it never saved anything, and starts anew
    assert state_of(run) is State.NEW
    sweep_command.main(words)
    assert "2 of 2 runs are finished, 1 of them now; 0 failed" in capsys.readouterr().out
    assert not (run.folder / "checkpoints").exists()  # discarded
    assert state_of(run) is State.FINISHED


@pytest.mark.parametrize(
    "words,said",
    [
        (["--table", "domainbed"], ["5 data sets cannot be used", "PACS: PACS was not found", "DomainNet: DomainNet"]),
        (["--table", "glue", "--tasks", "rte", "--set", "data.root=nowhere"], ["data.root nowhere is not a folder"]),
        (
            ["--table", "domainbed", "--tasks", "pacs", "--set", "model.pretrained=absent.safetensors"],
            ["model.pretrained", "absent.safetensors"],
        ),
    ],
)
def test_what_every_run_would_lack_is_said_once_before_any_starts(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "pacs" in words:  # data that is there, and weights that are not
        make_benchmark(tmp_path / "data", "pacs", per_class=1, size=4)
    with pytest.raises(UserError, match="no run was started") as error:
        sweep_command.main([*words, "--jobs", "1", "--output", "sweeps"])
    assert all(part in str(error.value) for part in said), error.value
    assert not (tmp_path / "sweeps").exists()


def test_a_sweep_gives_up_when_its_first_runs_fail_alike(tmp_path):
    """With another cause in one of them it goes on."""
    reasons = ["disk full"] * 4 + ["out of memory"]
    runs = plan(tmp_path, held_out=("rot0",), seeds=range(7))

    class Pool:
        """In place of processes: each run ends at once, with its status, as if it had printed its reason."""

        def __init__(self, places, discard):
            self.free, self.at_work = list(places), {}

        def start(self, run):
            self.at_work[run] = self.free.pop()
            (run.folder / "log.txt").write_text(reasons[run.seed] if run.seed < len(reasons) else "disk full")

        def ended(self, timeout):
            ended = [(run, 1) for run in self.at_work]
            self.free += self.at_work.values()
            self.at_work.clear()
            return ended

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_Pool", Pool)
        outcome = run_all(runs, [CPU], progress=False)
        assert len(outcome.failures) == 7 and not outcome.alike
        reasons[4] = "disk full"
        outcome = run_all(runs, [CPU], progress=False)
        assert len(outcome.failures) == 5 and outcome.alike == "disk full" and outcome.left == runs[5:]


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def test_a_killed_run_ends_alone_and_is_resumed(tmp_path):
    runs = plan(tmp_path, held_out=("rot0", "rot15"), settings=("steps=24", "eval_every=4", "log_every=4"))
    killed, other = runs
    outcomes = []
    worker = threading.Thread(target=lambda: outcomes.append(run_all(runs, [CPU], progress=False)))
    worker.start()
    wait_for((killed.folder / "checkpoints" / "latest").is_file)
    os.kill(int((killed.folder / "sweep.lock").read_text()), signal.SIGKILL)
    worker.join(120)
    first = outcomes[0]
    assert [(failure.run, failure.reason) for failure in first.failures] == [(killed, "killed by SIGKILL")]
    assert first.finished == [other] and state_of(killed) is State.PARTIAL

    second = run_all(runs, [CPU], progress=False)
    assert second.skipped == [other] and second.finished == [killed] and not second.failures
    records = [json.loads(line) for line in (killed.folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["kind"] == "validation"] == list(range(4, 25, 4))
    assert (killed.folder / "log.txt").read_text().count("digits rot0 dense seed 0") == 2


def test_ctrl_c_saves_what_is_at_work(tmp_path):
    runs = plan(tmp_path, held_out=("rot0", "rot15"), settings=("steps=5000", "eval_every=2"))

    def press():
        wait_for((runs[0].folder / "checkpoints" / "latest").is_file)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    outcome = run_all(runs, [CPU], progress=False)
    presser.join()
    assert outcome.stopped and outcome.left == runs and not outcome.failures and not outcome.finished
    assert "after SIGTERM; continue with --resume" in (runs[0].folder / "log.txt").read_text()
    assert [state_of(run) for run in runs] == [State.PARTIAL, State.NEW]


def test_two_sweeps_do_not_run_the_same_run(tmp_path):
    run = plan(tmp_path)[0]
    run_folder.prepare(run)
    with (run.folder / "sweep.lock").open("a") as other:
        fcntl.lockf(other, fcntl.LOCK_EX)
        outcome = run_all([run], [CPU], progress=False)
    assert outcome.elsewhere == [run] and not outcome.finished and not outcome.failures
    assert state_of(run) is State.NEW


def _sweep_that_dies(pipe):
    import multiprocessing

    child = multiprocessing.get_context("fork").Process(target=_run_without_end)
    child.start()
    pipe.send(child.pid)
    time.sleep(60)


def _run_without_end():
    pool._leave_with_parent()
    time.sleep(60)


def test_a_run_leaves_when_its_sweep_is_killed():
    here, there = _context.Pipe(duplex=False)
    parent = _context.Process(target=_sweep_that_dies, args=(there,))
    parent.start()
    child = psutil.Process(here.recv())
    parent.kill()
    parent.join()
    assert psutil.wait_procs([child], timeout=10)[1] == []


@pytest.mark.parametrize(
    "words,message", [(["--jobs", "0"], "--jobs must be at least 1"), (["--gpus", "99"], "--gpus 99 does not exist")]
)
def test_places_that_do_not_exist(words, message, tmp_path):
    with pytest.raises(UserError, match=message):
        sweep_command.main(["--table", "digits", "--output", str(tmp_path), *words])
