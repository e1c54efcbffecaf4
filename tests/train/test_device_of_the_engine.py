"""Which GPU a rank's DeepSpeed engine takes, by DeepSpeed's own code; no GPU is here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime import engine as engines
from torch import nn

from tests.support.training import make_config
from unifmoe_dist.runtime import ranks as places
from unifmoe_dist.runtime.ranks import Ranks
from unifmoe_dist.train import deepspeed


@pytest.mark.parametrize("gpus,index", [(1, 0), (4, 3)])
def test_it_is_the_device_of_the_rank(gpus, index, monkeypatch):
    """The fourth rank of a node has the fourth GPU, or the only one that it is shown (srun --gpus-per-task 1)."""
    given, taken = {}, []

    def initialize(**options):
        given.update(options)
        return (SimpleNamespace(zero_optimization=lambda: 1),)

    accelerator = SimpleNamespace(set_device=taken.append, device_name=lambda number: f"cuda:{number}")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    device = places._own_device()
    library = SimpleNamespace(initialize=initialize, init_distributed=lambda **_: None)
    monkeypatch.setattr(deepspeed, "_library", lambda: library)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    deepspeed.start(make_config("run"), model, Ranks(3, 4, device), optimizer, lambda _: None, 4, None)
    monkeypatch.setattr(engines, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(engines, "dist", SimpleNamespace(get_world_size=lambda: 4, get_rank=lambda: 3))
    engines.DeepSpeedEngine._set_distributed_vars(SimpleNamespace(local_rank=3), given["args"])
    assert taken == [torch.device("cuda", index), index]
