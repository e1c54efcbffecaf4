"""Bytes, step split, scaling study and cost model: formulas against brute force, counts and steps of real ranks."""

from __future__ import annotations

import csv
import json
import os
import sys
import time

import numpy as np
import pytest
import torch

from launch import scale
from tests.support.jobs import run_job
from tests.support.resume_plot import plot_resume
from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime.local_ranks import check_world_size, run_local_ranks
from unifmoe_dist.studies.scaling import scaling_study as scaling
from unifmoe_dist.studies.scaling.measured_step import Layout, Measurement, Study
from unifmoe_dist.studies.scaling.step_split import PARTS

# -- the study ------------------------------------------------------------------------------------------------


def test_grid_leaves_out_what_cannot_be():
    layouts, left_out = scaling.grid([6, 2], [1, 4], [0], [8], ["auto", "local"], [1])
    found = [(x.experts, x.ranks, x.expert_parallel, x.dispatcher) for x in layouts]
    assert found == [
        (2, 1, 1, "local"),
        (6, 1, 1, "local"),
        (2, 4, 2, "alltoall"),
        (2, 4, 1, "local"),
        (6, 4, 2, "alltoall"),
        (6, 4, 1, "local"),
    ]
    assert left_out == 0
    layouts, left_out = scaling.grid([6, 4], [2, 4], [4], [8], ["alltoall"], [1, 2])
    assert {(x.experts, x.ranks) for x in layouts} == {(4, 4)} and left_out == 6
    with pytest.raises(UserError, match="no combination"):
        scaling.grid([6], [2, 4], [4], [8], ["alltoall"], [1, 2])
    layouts, left_out = scaling.grid([4], [1, 2], [0], [8], ["auto"], [1], [0, 100])
    assert [(x.ranks, x.megabits) for x in layouts] == [(1, 0), (2, 0), (2, 100)] and left_out == 1
    with pytest.raises(UserError, match="--megabits must be at least 0, not -1"):
        scaling.grid([4], [2], [0], [8], ["auto"], [1], [-1])
    with pytest.raises(UserError, match="--batch must be at least 1, not 0"):
        scaling.grid([2], [1], [0], [0], ["auto"], [1])


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    check_world_size(1000)  # on the CPU any number goes
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_world_size(2)
    with pytest.raises(UserError, match="3 ranks need 3 GPUs, but this machine has 2"):
        check_world_size(3)


def fail_on_one_rank(kind):
    if os.environ["RANK"] == "1":
        if kind == "user":
            raise UserError("use fewer.")
        if kind == "crash":
            raise ValueError("broken here")
        print("last words", file=sys.stderr, flush=True)
        os._exit(3)
    time.sleep(250)


@pytest.mark.parametrize(
    "kind,error,words",
    [
        ("user", UserError, "use fewer"),
        ("crash", RuntimeError, "rank 1 failed(.|\n)*broken here"),
        ("death", RuntimeError, "rank 1 died(.|\n)*last words"),
    ],
)
def test_a_failing_rank_takes_the_others_down(kind, error, words):
    started = time.monotonic()
    with pytest.raises(error, match=words):
        run_local_ranks(2, fail_on_one_rank, kind)
    assert time.monotonic() - started < 200  # rank 0 would sleep for 250 s; starting takes a minute beside others


def test_the_volume_table_takes_no_other_option():
    with pytest.raises(UserError, match="--ranks 2 would change nothing"):
        scale.main(["--ranks", "2", "--volume"])


def test_an_option_given_twice_counts_twice():
    words = "--experts 2 --batch 8 --experts 4 6 --dispatcher alltoall --zero 1 --dispatcher tutel --zero 2".split()
    options = scale.parser().parse_args(words)
    assert (options.experts, options.batch, options.zero) == ([2, 4, 6], [8], [1, 2])
    assert options.dispatcher == ["alltoall", "tutel"] and options.ranks is None
    assert scale.parser().given(words).keys() == {"experts", "batch", "dispatcher", "zero"}


def test_sweep_measures_plots_and_continues(tmp_path, capsys):
    words = "--experts 2 --experts 4 --ranks 1 2 --batch 3 --width 16 --depth 2 --steps 2 --warmup 1".split()
    scale.main([*words, "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "no cost model: a cost model needs at least 6 points" in printed
    assert "but of 4 that were measured 2 are held out to check it; measure 9 in all:" in printed
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
    with (tmp_path / "scaling.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    assert [(r["experts"], r["ranks"]) for r in rows] == [("2", "1"), ("4", "1"), ("2", "2"), ("4", "2")]
    for row in rows[:2]:  # nothing travels
        assert (row["expert_parallel"], row["dispatcher"], row["dropped"]) == ("1", "local", "0")
        assert float(row["sent_bytes"]) == float(row["minimum_bytes"]) == 0 and float(row["rank_blocks"]) > 0
    rows = rows[2:]
    assert [(r["experts"], r["ranks"], r["expert_parallel"]) for r in rows] == [("2", "2", "2"), ("4", "2", "2")]
    for row in rows:
        number = {name: float(row[name]) for name in Measurement.__dataclass_fields__ if name != "device"}
        assert number["tokens"] == 2 * 3 * 5 and number["dropped"] == 0 and np.isfinite(number["loss"])
        assert sum(number[name] for name in PARTS) == pytest.approx(number["step"], rel=1e-6)
        assert all(number[name] > 0 for name in PARTS)  # every part was found in the profile, all-reduce too
        assert number["minimum_bytes"] < number["sent_bytes"] <= number["tutel_bytes"] * 2
        beyond = 2 * (16 + 38) / 30 + 1  # counts, alignment, and bits of active experts
        assert number["sent_bytes"] - number["minimum_bytes"] <= beyond
        assert number["exchange_messages"] == number["exchange_collectives"] == 5
        assert 0.9 < number["contention"] < 100
        # Both ranks' work together is what routing asked for: C_B blocks per token.
        assert number["rank_blocks"] >= number["blocks_per_token"] * 15 * 0.9
        assert number["memory"] > 0

    # All points are there: nothing is measured again.
    text = (tmp_path / "scaling.csv").read_text()
    study, known = scaling.read_study(tmp_path), scaling.read_points(tmp_path)
    layouts = [Layout(k, 1, 1, 3, "local", 1) for k in (2, 4)] + [Layout(k, 2, 2, 3, "alltoall", 1) for k in (2, 4)]
    points = scaling.run_study(layouts, study, tmp_path, progress=False)
    assert points == known and [p.layout for p in points] == layouts and (tmp_path / "scaling.csv").read_text() == text

    # A crash while the last row was written: that point is missing, and its row replaces the rest of the line.
    (tmp_path / "scaling.csv").write_text(text[: text.rindex(".") + 1])
    assert scaling.read_points(tmp_path) == points[:-1]
    scaling.write_points(tmp_path, points)
    assert (tmp_path / "scaling.csv").read_text() == text and scaling.read_points(tmp_path) == points


@pytest.mark.slow
def test_a_point_on_two_hosts(tmp_path):
    study, layout = Study(width=16, depth=2, warmup=1, steps=2), Layout(2, 2, 2, 3, "alltoall", 1, megabits=100)
    try:
        (point,) = scaling.run_study([layout], study, tmp_path, progress=False)
    except UserError as error:
        pytest.skip(str(error))
    assert point.layout == layout and point.result.sent_bytes > 0 and scaling.read_points(tmp_path) == [point]


def test_a_command_error_is_one_sentence(tmp_path):
    job = run_job(tmp_path, 1, ["--predict", str(tmp_path)], script="scale")
    assert job.statuses == [2] and "make it with launch/scale.py --record" in job.output
    assert "Traceback" not in job.output


@pytest.mark.parametrize(
    "layout,study,words",
    [
        (dict(experts=2), dict(width=18), "width 18"),
        (dict(experts=16), dict(width=16), "at most 15 experts"),
        (dict(experts=3, ranks=2, expert_parallel=2), dict(), "3 is not divisible"),
        (dict(experts=2), dict(steps=0), "steps must be at least 1, not 0"),
    ],
)
def test_what_cannot_work_is_refused_before_ranks_start(layout, study, words, tmp_path):
    with pytest.raises(UserError, match=words):
        chosen = Layout(**{**dict(ranks=1, expert_parallel=1, batch=2, dispatcher="local", zero=1), **layout})
        scaling.run_study([chosen], Study(**study), tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


def test_another_shape_in_the_same_folder_is_refused(tmp_path):
    scaling.agree_on_study(tmp_path, Study(width=64))
    with pytest.raises(UserError, match="width 64"):
        scaling.run_study([Layout(2, 1, 1, 2, "local", 1)], Study(width=32), tmp_path, progress=False)


def test_folders_that_hold_no_study(tmp_path):
    layout = Layout(2, 1, 1, 2, "local", 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output .*file"):
        scaling.run_study([layout], Study(), tmp_path / "file", progress=False)
    for text in ("{", "[]", '{"colour": 1}'):
        (tmp_path / "study.json").write_text(text)
        with pytest.raises(UserError, match="study.json"):
            scaling.read_study(tmp_path)
    (tmp_path / "scaling.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="scaling.csv"):
        scaling.read_points(tmp_path)


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
