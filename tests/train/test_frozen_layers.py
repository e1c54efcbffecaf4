"""Runs that train a model from one of its layers on."""

from __future__ import annotations

import pytest
import timm
import torch

from tests.support.ranks import run_ranks
from tests.support.training import make_config, tensors_of
from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime.ranks import running_ranks
from unifmoe_dist.train.build import freeze_before
from unifmoe_dist.train.cli import parse_train_config
from unifmoe_dist.train.trainer import Trainer


def trained(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_what_comes_before_a_layer_is_frozen():
    model = timm.create_model("vit_tiny_patch16_224", depth=4)
    everything = trained(model)
    freeze_before(model, 2)
    assert trained(model) == {
        name for name in everything if name.startswith(("blocks.2.", "blocks.3.", "norm.", "head."))
    }
    with pytest.raises(UserError, match="model.train_from 4 is no layer of the backbone, which has 0 to 3"):
        freeze_before(model, 4)


def test_where_the_ffn_is_what_is_known_its_whole_layer_is_trained():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 50}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=3, tie_word_embeddings=True))
    freeze_before(model, 2)
    assert {".".join(name.split(".")[:3]) for name in trained(model)} == {"model.layers.2", "model.norm.weight"}
    assert not model.lm_head.weight.requires_grad


def steps(rank, world, folder, resume):
    """Names of weights of a run that trains from layer 2 on: those that are frozen, and those that its steps change."""
    config = make_config(folder, steps=8 if resume else 4, eval_every=4, optimizer="adamw", resume=resume)
    config.model.train_from = 2
    config.validate(world)
    with running_ranks(1) as ranks:
        trainer = Trainer(config, ranks, folder)
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        while trainer.step < config.steps:
            trainer.train_step()
        trainer._save(0.0, better=trainer._validate())
        after = {name: p.detach() for name, p in trainer.model.named_parameters()}
        frozen = {name for name, p in trainer.model.named_parameters() if not p.requires_grad}
        return frozen, {name for name in before if not torch.equal(before[name], after[name])}


def test_a_run_leaves_the_frozen_part_alone_and_resumes(tmp_path):
    for resume in (False, True):
        for frozen, changed in run_ranks(2, steps, tmp_path / "run", resume, fresh=True):
            assert frozen and changed and not frozen & changed
            assert all(name.startswith(("blocks.0.", "blocks.1.", "cls", "pos", "patch")) for name in frozen)
            assert {name.split(".")[1] for name in changed if name.startswith("blocks.")} >= {"2", "3"}
    assert any(name.startswith("blocks.0.") for name in tensors_of(tmp_path / "run/checkpoints/step-000008"))


def test_a_layer_below_zero_is_refused():
    with pytest.raises(UserError, match="model.train_from must be"):
        parse_train_config(["--model.train_from", "-1"])
