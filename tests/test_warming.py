"""Warm-ups where there is nothing to warm up, and how the trainer learns what is to come."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch

import unifmoe_dist
from tests.support.ranks import run_ranks
from tests.support.training import make_config
from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.runtime.ranks import running_ranks
from unifmoe_dist.train import step
from unifmoe_dist.train.trainer import Trainer
from unifmoe_dist.warming import tokens_reaching


def test_on_the_cpu_nothing_happens(monkeypatch):
    layer = UniFMoELayer(UniFMoEConfig(8, 16, 3, 4))
    monkeypatch.setattr(unifmoe_dist.warming, "_run", lambda *_: pytest.fail("kernels ran"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert unifmoe_dist.warm_up(torch.nn.Sequential(layer), 7) is None


def test_the_tokens_that_reach_layers():
    """Found without their experts, on a model that is left as it was."""
    layers = [UniFMoELayer(UniFMoEConfig(8, 16, 3, 4)) for _ in range(2)]
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), layers[0], torch.nn.BatchNorm1d(5), layers[1].eval())
    x, before, state = torch.randn(3, 5, 8), torch.get_rng_state(), model.state_dict()
    kept = {name: tensor.clone() for name, tensor in state.items()}
    assert tokens_reaching(model, lambda: (model(x), model(x[:1]))) == ({15, 5}, torch.float32)
    assert torch.equal(torch.get_rng_state(), before) and [m.training for m in model] == [True, True, True, False]
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    assert all(layer.usage.totals is None and "forward" not in vars(layer) for layer in layers)
    assert tokens_reaching(torch.nn.Linear(2, 2), lambda: None) == (set(), None)


def trainer_warms_up(rank, world, folder):
    from pathlib import Path
    from unittest.mock import patch

    asked = []
    with (
        patch.object(step, "takes_triton", lambda device: True),
        patch.object(step, "warm_up", lambda *given: asked.append(given)),
        running_ranks(1) as ranks,
    ):
        trainer = Trainer(make_config(folder), ranks, Path(folder))
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
        trainer._one_step.warm_up(lambda: trainer.batches.source.sample(0))
        assert torch.equal(states[0], torch.get_rng_state()) and random.getstate() == states[1]
        assert (np.random.get_state()[1] == states[2]).all()
    return [(type(model).__name__, numbers, dtype) for model, numbers, dtype in asked]


def test_the_trainer_warms_up_for_its_batches(tmp_path):
    first, again = run_ranks(1, trainer_warms_up, str(tmp_path), fresh=True)[0]
    config = make_config(str(tmp_path))
    assert first == again and first[2] == torch.float32
    (tokens,) = first[1]
    assert tokens % config.data.batch_size == 0
