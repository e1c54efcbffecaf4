"""Trials of kernels in several threads: one after the other, so that none meets another's settings."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from tests.support.threads import in_threads
from unifmoe_dist.kernels import self_test


class Case:
    def __init__(self, device):
        self.device = device


def test_trials_take_turns(monkeypatch):
    """Two at once left torch's default type as the first had set it, for whoever had asked for another. None waits for
    another, as trials have backward passes, and those may need one."""
    monkeypatch.setattr(self_test, "_verdicts", {})
    tried, before = [], torch.get_default_dtype()

    def compare(case):
        assert torch.get_default_dtype() == torch.float32
        tried.append(case)
        time.sleep(0.05)
        return [(torch.ones(1), torch.ones(1))]

    def prove(start):
        time.sleep(start)
        case = Case(torch.device("cpu"))
        while not self_test._proven(case, 1e-3, compare):  # another's trial is under way
            time.sleep(0.01)

    torch.set_default_dtype(torch.bfloat16)
    try:
        assert in_threads(*(partial(prove, 0.02 * number) for number in range(3))) == []
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(before)
    assert len(tried) == 3
