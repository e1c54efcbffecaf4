"""The router's ablations beyond one layer (test_layer.py holds those to the equations): sharded, trained, saved."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
import transformers

from tests.support.faults import SMALL
from tests.support.jobs import run_job
from tests.support.ranks import run_ranks
from tests.support.sharded import CLOSE, EXCHANGES, assert_equals_whole, sharded_layer, whole_layer
from unifmoe_dist import UniFMoEConfig, upcycle
from unifmoe_dist.errors import UserError
from unifmoe_dist.train import export
from unifmoe_dist.train.cli import parse_train_config
from unifmoe_dist.train.folder import choose_folder
from unifmoe_dist.upcycling import moe_layers

ALL = dict(shared_demand=0.4, fixed_experts=2, block_choice="prefix")


def sharded_step(rank, world, dispatcher):
    whole = whole_layer(UniFMoEConfig(12, 40, 4, 10, **ALL))
    parts = [torch.randn(n, 12, generator=torch.Generator().manual_seed(n)) for n in (7, 0)]
    layer = sharded_layer(whole, dist.group.WORLD, dispatcher)
    assert_equals_whole(layer, whole, parts, rank, dist.group.WORLD, **CLOSE)
    return True


@pytest.mark.parametrize("dispatcher", EXCHANGES)
def test_sharded_equals_whole(dispatcher):
    """One rank has no token; the shared column's gradient of 0 is reduced like any other."""
    assert all(run_ranks(2, sharded_step, dispatcher))


def test_a_run_with_every_ablation(tmp_path):
    """Without a Gram loss the shared column never gets a gradient other than 0, which ZeRO must take."""
    options = [
        *SMALL,
        "--steps",
        "2",
        "--parallel.expert_parallel_size",
        "2",
        "--parallel.zero_stage",
        "2",
        "--optim.lambda_div",
        "0",
    ]
    options += [word for name, value in ALL.items() for word in (f"--model.{name}", str(value))]
    job = run_job(tmp_path, 2, [*options, "--output", str(tmp_path / "run")])
    assert job.statuses == [0, 0], job.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["num_blocks"] == 8
    assert (summary["mean_block_compute"], summary["mean_expert_count"]) == (3 + 2 * 5, 2)
    assert summary["mean_shared_demand"] == pytest.approx(0.4)

    loaded = export.load_exported(export.export(tmp_path / "run", tmp_path / "out"))
    for layer in moe_layers(loaded).values():
        assert {name: getattr(layer.config, name) for name in ALL} == ALL
    for name, value in (("shared_demand", "0.5"), ("fixed_experts", "1"), ("block_choice", "prototype")):
        changed = ["--resume", "--output", str(tmp_path / "run"), f"--model.{name}", value]
        with pytest.raises(UserError, match=f"model.{name}"):
            choose_folder(parse_train_config(changed))


@pytest.mark.parametrize(
    "words,expected",
    [
        ("--model.shared_demand 1.5", ["model.shared_demand", "1.5"]),
        ("--model.fixed_experts 7", ["model.fixed_experts", "7", "num_experts 6"]),
        ("--model.fixed_experts 0", ["model.fixed_experts", "0"]),
    ],
)
def test_options_that_do_not_fit(words, expected):
    with pytest.raises(UserError) as error:
        parse_train_config(words.split()).validate(1)
    assert all(word in str(error.value) for word in expected)


def test_saved_models_keep_their_policies(tmp_path):
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = upcycle(transformers.BertModel(config), [1], 3, 4, **ALL).eval()
    model.save_pretrained(tmp_path)
    loaded = transformers.BertModel.from_pretrained(tmp_path).eval()
    tokens = torch.arange(9)[None]
    torch.testing.assert_close(loaded(tokens)[0], model(tokens)[0])
    (layer,) = moe_layers(loaded).values()
    assert {name: getattr(layer.config, name) for name in ALL} == ALL
    assert not ALL.keys() & upcycle(transformers.BertModel(config), [1], 3, 4).config.unif_moe[0].keys()
