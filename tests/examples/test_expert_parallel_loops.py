"""The examples of experts spread over ranks run to the end on real ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.support.jobs import ROOT, enter, run_job


def run(ranks: int, name: str, folder: Path, *words: str) -> str:
    job = run_job(folder / "output", ranks, words, enter, folder, {}, timeout=280, script=str(ROOT / "examples" / name))
    assert job.statuses == [0] * ranks, job.output[-4000:]
    return job.output


def test_ddp(tmp_path):
    printed = re.search(r"2 ranks, 4 experts: .* accuracy (\S+)", run(2, "ddp_loop.py", tmp_path))
    assert float(printed[1]) > 0.6  # of ten digits by other writers
    assert torch.load(tmp_path / "ddp_loop.pt")["blocks.3.mlp.experts.keys"].shape[0] == 4


def test_fsdp2(tmp_path):
    assert float(re.search(r"2 ranks: .* accuracy (\S+)", run(2, "fsdp2_loop.py", tmp_path))[1]) > 0.6


@pytest.mark.slow  # tests/test_parallel.py loads more of them
def test_distributed_checkpoints(tmp_path):
    """Steps 30 to 59 are the same on another number of ranks."""
    assert "2 ranks: steps 0 to 29" in run(2, "distributed_checkpoint.py", tmp_path, "saved")
    goes_on = [run(ranks, "distributed_checkpoint.py", tmp_path, "saved") for ranks in (2, 1)]
    losses = [float(re.search(r"steps 30 to 59, loss (\S+)", printed)[1]) for printed in goes_on]
    assert losses[0] < 0.8 and abs(losses[0] - losses[1]) < 0.01
