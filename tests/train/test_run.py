"""A run that begins, or begins again, takes nothing away that was in its folder before."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime.ranks import Ranks
from unifmoe_dist.train import run as restart
from unifmoe_dist.train.cli import parse_train_config
from unifmoe_dist.train.folder import choose_folder

ALONE = Ranks(0, 1, torch.device("cpu"))


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("the user's\n")


def test_what_is_in_the_way_is_set_aside(tmp_path):
    put(tmp_path, "metrics.jsonl", "config.yaml", "metrics-1.jsonl", "notes.txt")
    restart.set_aside(tmp_path, "steps: 1\n")
    names = {"config.yaml", "config-1.yaml", "metrics-1.jsonl", "metrics-2.jsonl", "notes.txt"}
    assert {path.name for path in tmp_path.iterdir()} == names
    (tmp_path / "config.yaml").write_text("steps: 1\n")
    restart.set_aside(tmp_path, "steps: 1\n")
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.parametrize("words", [["--resume", "auto"], []], ids=["auto", "new"])
@pytest.mark.parametrize(
    "name", ["checkpoints/step-000100/dense.safetensors", "checkpoints/step-1000", "checkpoints/best", "summary.json"]
)
def test_a_start_refuses_what_it_would_write_over(tmp_path, name, words):
    put(tmp_path, name)
    with pytest.raises(UserError, match=r"move .* away or choose another --output|is damaged; delete"):
        choose_folder(parse_train_config(["--output", str(tmp_path), *words]))


HOLD = """
import fcntl, sys
lock = open(sys.argv[1], "a")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.readline()
"""


def test_one_job_writes_into_a_folder(tmp_path, monkeypatch, capsys):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / ".lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout.readline() == b"held\n"
    with pytest.raises(UserError, match="another job writes into"):
        with restart.only_writer(tmp_path, ALONE, patience=0):
            pass
    with pytest.raises(UserError, match="another job writes into"):
        restart.refuse_taken(tmp_path)  # where advice to delete the folder would be given
    monkeypatch.setattr(restart.time, "sleep", lambda _: other.communicate(b"\n"))
    with restart.only_writer(tmp_path, ALONE, patience=30) as waited:
        assert waited
    assert "waiting for its end" in capsys.readouterr().err
    restart.refuse_taken(tmp_path)
    with restart.only_writer(tmp_path, ALONE, patience=0) as waited:
        assert not waited

    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with restart.only_writer(tmp_path, ALONE, patience=0) as waited:
        assert not waited


def test_ranks_that_see_different_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr(Ranks, "gather", lambda self, value: [value, True, True])
    with pytest.raises(UserError, match="ranks 0 do not see the checkpoints"):
        restart.agree("auto", tmp_path, replace(ALONE, world_size=3))
