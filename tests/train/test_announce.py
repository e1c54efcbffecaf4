"""A run says where it is and what it does, at its start and every half minute, and what changes when it goes on."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
import torch

from unifmoe_dist.runtime import heartbeat
from unifmoe_dist.runtime.ranks import Ranks
from unifmoe_dist.train import build, folder
from unifmoe_dist.train import words as said
from unifmoe_dist.train.cli import dump_train_config, parse_train_config


def lines(words: str, ranks: Ranks, step: int = 0) -> list[str]:
    config = parse_train_config(words.split())
    task = build.build_task(config)
    algorithm = build.build_algorithm(config, task)
    if ranks.world_size > 1:  # as if this rank had one of two shares of the experts
        for name, parameter in algorithm.named_parameters():
            parameter.allreduce = ".experts." not in name
    return said.first_lines(config, ranks, task, algorithm, Path("runs/mine"), step)


def test_the_first_lines_name_everything(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    words = "--steps 20 --parallel.expert_parallel_size 2 --model.layers [3] --data.batch_size 8"
    config = parse_train_config(words.split())
    model = build.build_algorithm(config, build.build_task(config))
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    own = sum(p.numel() for p in model.parameters())
    assert experts > 0
    assert lines(words, Ranks(0, 2, torch.device("cpu"))) == [
        "runs/mine starts, 20 steps",
        "  2 ranks on CPU, 3 threads per rank; expert-parallel size 2, ZeRO 1, fp32",
        f"  model: unif in layer 3 with 6 experts each; {own + experts:,} parameters ({own:,} on each rank)",
        "  data: digits, rot75 held out; 1,198 items of 5 environments to train, 300 to validate, 239 to test",
        "  batch: 40 items a step (8 of each environment), 20 at a time on each rank",
    ]


def test_a_dense_run_that_goes_on():
    found = lines("--steps 20 --model.moe none --parallel.gradient_accumulation 2", Ranks(0, 1, torch.device("cpu")), 7)
    assert found[0] == "runs/mine goes on from step 7 of 20"
    assert found[1].startswith("  1 rank on CPU") and "model: dense model; " in found[2] and "each rank" not in found[2]
    assert found[4].endswith("40 at a time on each rank")


def test_a_complete_run_needs_one_line():
    assert lines("--steps 20", Ranks(0, 1, torch.device("cpu")), 20) == [
        "runs/mine is complete at step 20; it is tested again"
    ]


@pytest.fixture
def beats(monkeypatch) -> io.StringIO:
    stream = io.StringIO()
    monkeypatch.setattr(heartbeat, "SECONDS", 0.1)
    monkeypatch.setattr(heartbeat.sys, "stderr", stream)
    return stream


def test_a_line_every_half_minute(beats, monkeypatch):
    monkeypatch.setattr(heartbeat.sys, "stderr", beats)
    with heartbeat.beating():
        time.sleep(0.3)
        assert beats.getvalue() == ""  # a command that has not said what it is at
        heartbeat.doing("step 3 of 20")
        time.sleep(0.35)
        for _ in range(6):
            heartbeat.heard()
            time.sleep(0.03)
    found = beats.getvalue().splitlines()
    assert 1 <= len(found) <= 5 and all(line.endswith("] step 3 of 20") for line in found)
    heartbeat.doing("nothing")  # outside of a command


def test_what_is_counted_is_said(beats, monkeypatch):
    monkeypatch.setattr(heartbeat.sys, "stderr", beats)
    monkeypatch.setattr("tqdm.tqdm", lambda things, **_: things)
    with heartbeat.beating():
        assert [time.sleep(0.25) or n for n in heartbeat.followed([5, 6], "routing")] == [5, 6]
    assert "routing: 0 of 2 done" in beats.getvalue() and "routing: 1 of 2 done" in beats.getvalue()


@pytest.mark.parametrize("how", ["terminal", "other rank", "hushed"])
def test_who_says_nothing(how, beats, monkeypatch):
    monkeypatch.setattr(heartbeat.sys, "stderr", beats)
    if how == "terminal":
        beats.isatty = lambda: True
    monkeypatch.setenv("RANK", "1" if how == "other rank" else "0")
    with heartbeat.beating():
        if how == "hushed":
            heartbeat.hush()
        heartbeat.doing("step 3 of 20")
        time.sleep(0.3)
    assert beats.getvalue() == ""


def test_options_that_change_are_said_and_the_old_ones_kept(tmp_path, capsys):
    first = ["--output", str(tmp_path), "--optim.lr", "0.002"]
    old = parse_train_config(first)
    (tmp_path / "config.yaml").write_text(text := dump_train_config(old))
    folder.keep_options(tmp_path, parse_train_config([*first, "--resume", "--no-progress"]))
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"] and capsys.readouterr().err == ""
    new = parse_train_config([*first, "--resume", "--optim.lr", "0.01", "--epochs", "3", "--no-baseline"])
    folder.keep_options(tmp_path, new)
    assert (tmp_path / "config-1.yaml").read_text() == text
    assert capsys.readouterr().err.splitlines() == [
        f"{tmp_path} goes on with other options; config-1.yaml keeps those it had:",
        "  epochs: null -> 3",
        "  baseline: true -> false",
        "  optim.lr: 0.002 -> 0.01",
    ]
