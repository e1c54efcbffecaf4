"""The examples of experts spread over ranks run to the end on real ranks, started as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.jobs import ROOT


def run(ranks: int, name: str, folder: Path, *words: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(ROOT / "examples" / name), *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


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
