"""What earlier versions saved keeps what it was trained with; shipped settings are the authors'."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.support.fidelity import D, H, K, mass, with_weights
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.mass import MASSConfig, MASSLayer
from unifmoe_dist.studies.paper_tables import GLUE
from unifmoe_dist.train import checkpoint
from unifmoe_dist.train.build import layer_options
from unifmoe_dist.train.cli import dump_train_config, load_train_config, parse_train_config
from unifmoe_dist.train.length import in_steps
from unifmoe_dist.train.step import TrainingStep
from unifmoe_dist.upcycling.convert import saved_options


def config_of(task, method):
    from unifmoe_dist.config.named import with_options
    from unifmoe_dist.methods.registry import METHODS

    benchmark = find_task(task)
    config = load_train_config(f"configs/{benchmark.base_config}")
    return with_options(config, {**METHODS[method].options, **benchmark.method_options.get(method, {})})


@pytest.mark.parametrize("task,most", [("cola", 16), ("mrpc", 16), ("rte", 16), ("mnli", 10), ("qnli", 10)])
def test_dynmoe_on_glue_as_in_the_authors_scripts(task, most):
    model = config_of(task, "dynmoe").model
    assert (model.num_experts, model.most_experts(), model.adapt_every) == (8, most, "epoch")
    assert not model.gate_temperature


def test_dynmoe_and_mass_on_domainbed_as_in_the_authors_scripts():
    for method in ("dynmoe", "mass"):
        config = config_of("vlcs", method)
        assert (config.model.num_experts, config.model.most_experts(), config.model.adapt_every) == (6, 8, 1)
    options = SimpleNamespace(**layer_options(config))
    assert (options.mass_window, options.mass_warmup, options.mass_untried) == (450, 250, 0)
    options = SimpleNamespace(**layer_options(config_of("domainnet", "mass")))
    assert (options.expansion_steps, options.mass_window, options.mass_warmup) == (1500, 1350, 750)


def test_mass_on_glue_as_in_the_authors_scripts():
    config = config_of("cola", "mass")
    options = SimpleNamespace(**layer_options(in_steps(config, SimpleNamespace(train=[range(8551)]))))
    assert (options.num_experts, options.max_experts, options.mass_threshold) == (8, 16, 0.5)
    assert (options.expansion_steps, options.mass_window, options.mass_warmup) == (268, 241, 134)
    assert options.mass_untried == 1 and all("mass" in find_task(task).method_options for task in GLUE)
    chosen = parse_train_config(["--model.moe", "mass", "--model.mass_window", "9", "--model.mass_warmup", "4"])
    assert (layer_options(chosen)["mass_window"], layer_options(chosen)["mass_warmup"]) == (9, 4)


# -- what earlier versions wrote --------------------------------------------------------------------------------------


def test_windows_of_another_length_load(tmp_path):
    long, short = mass(0.5, window=6), mass(0.5, window=3)
    long.norms[:] = torch.arange(6.0)
    long.drift[:] = torch.arange(6.0)
    short.load_state_dict(long.state_dict())
    assert short.norms[0].tolist() == short.drift[0].tolist() == [3, 4, 5]
    long.load_state_dict(short.state_dict())
    assert long.norms[0].tolist() == long.drift[0].tolist() == [0, 0, 0, 3, 4, 5]


def test_runs_and_models_of_earlier_versions_keep_their_gate(tmp_path):
    config = parse_train_config(["--model.moe", "dynmoe", "--model.adapt_every", "3", "--output", str(tmp_path)])
    text = dump_train_config(config)
    old = "".join(line for line in text.splitlines(True) if "gate_temperature" not in line)
    assert old != text
    path = tmp_path / "config.yaml"
    path.write_text(old)
    assert load_train_config(str(path)).model.gate_temperature
    path.write_text(text)
    assert not load_train_config(str(path)).model.gate_temperature
    path.write_text("model:\n  moe: dynmoe\n")  # by hand
    assert not load_train_config(str(path)).model.gate_temperature
    path.write_text(text.replace("moe: dynmoe", "moe: emoe").replace("  load_loss: tutel\n", ""))
    assert load_train_config(str(path)).model.load_loss == "shazeer"
    windows = text.replace("moe: dynmoe", "moe: mass").replace("  mass_window: null\n  mass_warmup: null\n", "")
    path.write_text(windows.replace("steps: 800", "steps: 5001", 1))
    model = load_train_config(str(path)).model
    assert (model.mass_window, model.mass_warmup) == (200, 100)
    saved = {"num_experts": 4, "max_experts": 6, "layers": [1], "method": "dynmoe", "expansion_steps": 300}
    assert saved_options("dynmoe", saved)["gate_temperature"]
    assert not saved_options("dynmoe", {**saved, "gate_temperature": False})["gate_temperature"]
    assert saved_options("emoe", saved)["load_loss"] == "shazeer"
    options = saved_options("mass", saved)
    assert [options[name] for name in ("max_experts", "mass_window", "mass_warmup")] == [6, 120, 60]


def test_a_checkpoint_with_windows_of_another_length_is_taken(tmp_path):
    """A run in epochs is opened with its configuration, which does not say how many steps they were."""
    long, short = mass(0.5, window=6), mass(0.5, window=3)
    long.norms[:] = torch.arange(6.0)
    weights = checkpoint.split_by_expert(long, long.state_dict())
    checkpoint.save_tensors({name: t.contiguous() for name, t in weights.items()}, tmp_path / "dense.safetensors")
    checkpoint.load_weights(tmp_path, short)
    assert short.norms[0].tolist() == [3, 4, 5]
    with pytest.raises(UserError, match="model options differ"):
        checkpoint.load_weights(tmp_path, with_weights(MASSLayer(MASSConfig(D, 2 * H, K, initial_experts=4))))


def test_layers_are_told_how_long_an_epoch_is(monkeypatch):
    told = []
    layer = SimpleNamespace(after_step=lambda step: told.append((step.step, step.epoch_steps)) or [])
    monkeypatch.setattr("unifmoe_dist.train.deepspeed.take_over", lambda engine, changes: None)
    step = SimpleNamespace(epoch_steps=7, layers={"a": layer}, engine=None, ranks=SimpleNamespace(all_sum=None))
    TrainingStep.after_step(step, ({}, torch.zeros(1)), 5)
    assert told == [(5, 7)]
