"""Layers that do not fit the backbone are refused before the data are read."""

from __future__ import annotations

import pytest
import torch

from tests.support.methods import MOE_LAYERS
from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime.ranks import Ranks
from unifmoe_dist.train import build
from unifmoe_dist.train.cli import parse_train_config
from unifmoe_dist.train.trainer import Trainer

VISION = ["--data.task", "domainnet", "--data.held_out", "real", "--data.root", "/nowhere"]
LANGUAGE = [
    "--data.task",
    "mnli",
    "--data.root",
    "/nowhere",
    "--model.backbone",
    "tiny-bert",
    "--model.pretrained",
    "none",
    "--model.layers",
    "[1,3]",
    "--model.num_experts",
    "4",
]


def config(*words: str):
    return parse_train_config(list(words))


@pytest.mark.parametrize("method", ["unif", "none", *MOE_LAYERS])
@pytest.mark.parametrize("words", [VISION, LANGUAGE])
def test_what_fits_passes_and_draws_no_random_number(words, method):
    state = torch.get_rng_state()
    build.check_layers(config(*words, "--model.moe", method, "--model.layers", "[1,2]", "--model.num_experts", "4"))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "words,message",
    [
        ([*VISION, "--model.moe", "emoe", "--model.num_experts", "7"], "1536 is not divisible by num_experts 7"),
        ([*VISION, "--model.num_blocks", "7"], "hidden_dim 1536 is not divisible by num_blocks 7"),
        ([*VISION, "--model.layers", "[12]"], "this model has 12 layers: use 0 to 11"),
        ([*VISION, "--model.num_experts", "400"], "384"),
        ([*LANGUAGE, "--model.layers", "[4]"], "this model has 4 layers"),
        ([*LANGUAGE, "--model.moe", "emoe", "--model.num_experts", "3"], "256 is not divisible by num_experts 3"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_data_are_read(words, message, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "build_task", lambda config: pytest.fail("the data were read"))
    with pytest.raises(UserError, match=message):
        Trainer(config(*words), Ranks(0, 1, torch.device("cpu")), tmp_path)


def test_backbones_that_cannot_be_had_are_left_to_those_who_read_them():
    build.check_layers(config(*VISION, "--model.backbone", "resnet50"))
    build.check_layers(config(*LANGUAGE, "--model.backbone", "no-such-model"))  # tests run without the hub
