"""Every method in training: toy tasks, runs on two ranks, what an optimiser takes over, and what is saved."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tests.support.faults import SMALL
from tests.support.jobs import run_job
from tests.support.methods import METHODS, OPTIONS, SHAPE, applied, small_config
from tests.support.ranks import run_ranks
from unifmoe_dist.lending import here
from unifmoe_dist.methods.registry import method_of
from unifmoe_dist.runtime.ranks import running_ranks
from unifmoe_dist.train import build, checkpoint, export
from unifmoe_dist.train.cli import load_train_config
from unifmoe_dist.train.trainer import Trainer
from unifmoe_dist.upcycling import moe_layers, upcycle
from unifmoe_dist.upcycling.convert import build_layer

# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_each_method_learns_a_toy_task(method):
    """Two kinds of tokens that want opposite outputs."""
    torch.manual_seed(0)
    layer = build_layer(method, SHAPE, OPTIONS, None, "auto").train()
    optimizer = torch.optim.Adam([p for p in layer.parameters() if p.requires_grad], lr=0.01)
    kind = torch.arange(64) % 2
    x = torch.randn(64, 12) + 3 * torch.eye(12)[kind]
    target = torch.where(kind[:, None] == 0, x, -x)
    losses = []
    for step in range(1, 121):
        optimizer.zero_grad()
        task = (layer(x) - target).square().mean()
        (task + layer.auxiliary_weight * layer.auxiliary_loss()).backward()
        optimizer.step()
        layer.after_step(applied(step))
        losses.append(float(task))
    assert np.mean(losses[-5:]) < 0.3 * losses[0]


def run_all(rank, world, folder):
    """Every method on two ranks that share its experts, the summary of each."""
    results = {}
    with running_ranks(2) as ranks:
        for method in METHODS:
            config = small_config(folder / method, method, expert_parallel_size=2)
            config.data.batch_size = 4
            config.validate(world)
            results[method] = Trainer(config, ranks, folder / method).fit()
        results["statistics"] = saved_between_decisions(folder / "between", ranks)
    return results


def saved_between_decisions(folder, ranks):
    """What DynMoE has counted on all ranks when a run is saved, and when it goes on."""
    config = small_config(folder, "dynmoe", expert_parallel_size=2)
    config.data.batch_size, config.model.adapt_every = 4, 100
    counted = []
    for config.resume in (False, True):
        trainer = Trainer(config, ranks, folder)
        if not config.resume:
            trainer.train_step()
            trainer._save(0.0, better=False)
        layers = trainer.layers.values()
        counted.append([ranks.all_sum(torch.cat([layer.count, layer.lost])) for layer in layers])
    return counted


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_ranks(2, run_all, folder, fresh=True)[0]


def test_dynmoe_goes_on_with_what_all_ranks_have_counted(runs):
    saved, resumed = runs[1]["statistics"]
    for before, after in zip(saved, resumed, strict=True):
        assert before[:4].sum() > 0
        torch.testing.assert_close(after, before)


@pytest.mark.parametrize("method", METHODS)
def test_each_method_trains_sharded_and_opens_on_one_rank(method, runs, tmp_path):
    folder, summaries = runs
    summary, run = summaries[method], folder / method
    cost = summary["mean_expert_count"] * 8 / (4 if "emoe" in method else 1)
    assert summary["moe"] == method and summary["mean_block_compute"] == pytest.approx(cost)
    assert method in ("dynmoe", "mass") or summary["mean_expert_count"] == 2
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    weight = 0.01 if method != "mass" else 0.0  # there is no copy yet
    for line in train:
        assert line["loss"] == pytest.approx(line["task_loss"] + weight * line["div_loss"], abs=1e-6)
        assert (line["div_loss"] > 0) == (method != "mass")

    config = load_train_config(str(run / "config.yaml"))
    model = build.build_model(config, build.build_task(config))
    checkpoint.load_weights(checkpoint.latest(run, "best"), model)
    plain = export.load_consolidated(export.consolidate(run, tmp_path / "model.safetensors"))
    exported = export.load_exported(export.export(run, tmp_path / "exported"))
    x = torch.randn(3, 1, 16, 16)
    with torch.no_grad():
        want = model.eval()(x)
        assert torch.equal(plain(x), want) and torch.equal(exported(x), want)
    kinds = [[type(layer) for layer in moe_layers(each).values()] for each in (plain, model)]
    assert kinds[0] == kinds[1] and len(kinds[0]) == 2


def expand_under(rank, world, folder, zero, size, optimizer):
    """MASS, made to copy an expert at its second step: weights by global name, and whether moments were dropped."""
    config = small_config(folder, "mass", steps=40, optimizer=optimizer, zero_stage=zero, expert_parallel_size=size)
    config.data.batch_size, config.optim.grad_clip = 4, 0.0
    with running_ranks(size) as ranks:
        trainer = Trainer(config, ranks, folder)
        for layer in trainer.layers.values():
            for name, value in dict(p_limit=1.1, similarity_limit=1.1, warmup=0, expansion_steps=2).items():
                object.__setattr__(layer.config, name, value)
            layer.norms, layer.drift = layer.norms[:, :2].clone(), layer.drift[:, :2].clone()
            object.__setattr__(layer.config, "window", 2)
        trainer.train_step()
        for layer in trainer.layers.values():
            layer.active[1] = False  # a slot whose weights the optimiser has moved already
        trainer.train_step()
        forgotten = []
        if optimizer == "adamw":
            for layer in trainer.layers.values():
                moments = layer.router.weight.get_full_hp_param("exp_avg")
                forgotten.append([not bool(row.any()) for row in moments])
        for _ in range(2):
            trainer.train_step()
        active = [layer.active.tolist() for layer in trainer.layers.values()]
        weights = {n: here(t).detach().clone() for n, t in trainer.model.state_dict().items()}
        return checkpoint.split_by_expert(trainer.model, weights), active, forgotten


def assert_close_but(got, want, leave_out=()):
    for name, tensor in got.items():
        if not name.endswith(leave_out):
            torch.testing.assert_close(tensor, want[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_the_optimiser_takes_over_what_a_layer_rewrites(tmp_path):
    want, active, _ = run_ranks(1, expand_under, tmp_path / "0", 0, 1, "sgd")[0]
    assert active == [[True] * 4 + [False] * 2] * 2
    for got, now, _ in run_ranks(2, expand_under, tmp_path / "2", 2, 2, "sgd", fresh=True):
        assert now == active
        assert_close_but(got, want, (".norms", ".drift"))
    _, _, forgotten = run_ranks(1, expand_under, tmp_path / "adam", 1, 1, "adamw")[0]
    assert forgotten == [[False, True, False, False, True, True]] * 2


def test_dynmoe_resumes_on_another_number_of_ranks(tmp_path):
    """Through the commands: two ranks, then one, against one rank that was never interrupted."""
    base = [*SMALL, "--model.moe", "dynmoe", "--model.max_experts", "6", "--optim.name", "sgd", "--eval_every", "4"]
    base += ["--optim.schedule", "constant"]
    sharded = [*base, "--steps", "2", "--parallel.expert_parallel_size", "2"]
    whole, broken = tmp_path / "whole" / "run", tmp_path / "broken" / "run"
    assert run_job(whole.parent, 1, [*base, "--steps", "4", "--output", str(whole)]).statuses == [0]
    assert run_job(broken.parent, 2, [*sharded, "--output", str(broken)]).statuses == [0, 0]
    resumed = ["--resume", "--steps", "4", "--output", str(broken), "--parallel.expert_parallel_size", "1"]
    assert run_job(broken.parent, 1, resumed).statuses == [0]
    config = load_train_config(str(whole / "config.yaml"))
    states = []
    for run in (whole, broken):
        model = build.build_model(config, build.build_task(config))
        checkpoint.load_weights(checkpoint.latest(run), model)
        states.append(model.state_dict())
    assert states[0]["blocks.1.mlp.active"].sum() > 4  # experts were added
    assert_close_but(states[1], states[0])
    job = run_job(broken.parent, 1, [str(broken), "--checkpoint", "latest"], script="evaluate")
    assert job.statuses == [0] and '"moe": "dynmoe"' in job.output


@pytest.mark.parametrize("family", ["timm", "transformers"])
def test_auxiliary_losses_reach_the_gate_under_gradient_checkpointing(family):
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        if family == "timm":
            from unifmoe_dist.data.digits import build_digits_vit

            model, inputs = build_digits_vit(), {"x": torch.linspace(-1, 1, 1024).view(4, 1, 16, 16)}
        else:
            from transformers import BertConfig, BertForSequenceClassification

            small = BertConfig(
                vocab_size=40,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=4,
                num_attention_heads=2,
                hidden_dropout_prob=0.0,
            )
            model, inputs = BertForSequenceClassification(small), {"input_ids": torch.arange(36).view(3, 12)}
        upcycle(model, [1, 3], 4, method="topk")
        if checkpointing:
            build.checkpoint_activations(model)
        model.train()(**inputs)
        loss = sum(layer.auxiliary_loss() for layer in moe_layers(model).values())
        loss.backward()
        grads.append([layer.router.weight.grad for layer in moe_layers(model).values()])
    for plain, checkpointed in zip(*grads, strict=True):
        assert plain.abs().sum() > 0
        torch.testing.assert_close(checkpointed, plain)


@pytest.mark.parametrize("method", ["dynmoe", "emoe", "mass"])
def test_a_saved_transformers_model_comes_back(method, tmp_path):
    from transformers import BertConfig, BertForSequenceClassification

    small = BertConfig(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    model = BertForSequenceClassification(small)
    upcycle(model, [1], method=method, **method_of(method).taken(OPTIONS))
    (layer,) = moe_layers(model).values()
    if method != "emoe":
        layer.active[0], layer.active[5] = False, True
    model.save_pretrained(tmp_path)
    same = BertForSequenceClassification.from_pretrained(tmp_path)
    assert all(torch.equal(t, same.state_dict()[n]) for n, t in model.state_dict().items())
    (back,) = moe_layers(same).values()
    assert back.config == layer.config
    tokens = torch.arange(24).view(2, 12)
    torch.testing.assert_close(same(tokens).logits, model.eval()(tokens).logits)
