"""Banks of experts, what is kept of their weights, and whether that is theirs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unifmoe_dist import kept
from unifmoe_dist.experts import BlockExperts

HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def nothing_yet(monkeypatch):
    """As in a process in which nothing has happened."""
    kept._Everything.optimisers.clear()
    kept._Everything.by_holder.clear()


@pytest.fixture(name="gpu")
def as_on_a_gpu(monkeypatch):
    """As on a GPU: nobody looks at the weights themselves."""
    monkeypatch.setattr(kept, "_kind", lambda weight: "cuda")


def bank(gated=False, bias=True):
    torch.manual_seed(0)
    made = BlockExperts(3, 32, 64, 4, "silu", bias, gated)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def copies(experts):
    """Those in half precision that a forward pass would compute with."""
    return experts.weights().in_type(HALF)


def is_kept(experts):
    """Whether a second pass takes what the first has made."""
    first, second = copies(experts)["keys"], copies(experts)["keys"]
    return first.data_ptr() == second.data_ptr()
