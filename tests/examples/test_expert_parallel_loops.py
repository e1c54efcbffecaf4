"""The examples of experts spread over ranks run to the end on real ranks."""

from __future__ import annotations

import re

import pytest
import torch

from tests.support.jobs import free_port, run_example
from unifmoe_dist.runtime.local_ranks import rank_environment


def test_ddp(tmp_path):
    printed = re.search(r"2 ranks, 4 experts: .* accuracy (\S+)", run_example("ddp_loop.py", tmp_path, ranks=2))
    assert float(printed[1]) > 0.6  # of ten digits by other writers
    assert torch.load(tmp_path / "ddp_loop.pt")["blocks.3.mlp.experts.keys"].shape[0] == 4


def test_fsdp2(tmp_path):
    assert float(re.search(r"2 ranks: .* accuracy (\S+)", run_example("fsdp2_loop.py", tmp_path, ranks=2))[1]) > 0.6


@pytest.mark.slow  # tests/test_parallel.py loads more of them
def test_distributed_checkpoints(tmp_path):
    """Steps 30 to 59 are the same on another number of ranks."""
    assert "2 ranks: steps 0 to 29" in run_example("distributed_checkpoint.py", tmp_path, "saved", ranks=2)
    one = rank_environment(0, 1, free_port())  # as torchrun says to a rank alone
    goes_on = [run_example("distributed_checkpoint.py", tmp_path, "saved", ranks=2)]
    goes_on += [run_example("distributed_checkpoint.py", tmp_path, "saved", **one)]
    losses = [float(re.search(r"steps 30 to 59, loss (\S+)", printed)[1]) for printed in goes_on]
    assert losses[0] < 0.8 and abs(losses[0] - losses[1]) < 0.01
