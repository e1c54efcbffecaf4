"""Experts' biases are biases to everybody's optimisers, and files of either shape are read."""

from __future__ import annotations

import json
import pickle

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay

from tests.support.methods import MOE_LAYERS
from unifmoe_dist import UniFMoEConfig, UniFMoELayer, upcycle
from unifmoe_dist.config import OptimConfig
from unifmoe_dist.experts import BlockExperts
from unifmoe_dist.train import checkpoint
from unifmoe_dist.train.build import parameter_groups
from unifmoe_dist.upcycling import moe_layers


def vit(method: str = "unif") -> torch.nn.Module:
    torch.manual_seed(0)
    return upcycle(timm.create_model("test_vit"), [1, 3], 4, 4, method=method)


def bert() -> torch.nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    shape = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    return upcycle(BertForSequenceClassification(shape), [1], 4, 4)


def biases(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    found = {p for name, p in model.named_parameters() if name.endswith(("key_bias", "value_bias"))}
    assert found
    return found


@pytest.mark.parametrize("method", ["unif", *MOE_LAYERS])
def test_no_helper_decays_them_or_takes_them_for_matrices(method):
    model = vit(method)
    groups = {
        "timm": param_groups_weight_decay(model, 0.1),
        "timm's layer decay": param_groups_layer_decay(model, 0.1),
        "timm's optimiser": create_optimizer_v2(model, "adamw", weight_decay=0.1).param_groups,
        "a recipe": [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1}],
        "ours": parameter_groups(model, OptimConfig(weight_decay=0.1)),
    }
    for who, made in groups.items():
        decayed = {p for group in made if group["weight_decay"] for p in group["params"]}
        assert decayed and not decayed & biases(model), who
    muon = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2])
    assert not {p for group in muon.param_groups for p in group["params"]} & biases(model)


def test_the_trainer_does_not_decay_them(tmp_path):
    from transformers import Trainer, TrainingArguments

    model = bert()
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    names = Trainer(model, arguments, train_dataset=[0]).get_decay_parameter_names(model)
    parameters = dict(model.named_parameters())
    assert names and not {parameters[name] for name in names} & biases(model)


def older(tensors: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The same with biases in two dimensions, as they used to be."""
    counts = {}
    for prefix, layer in moe_layers(model).items():
        counts.update({f"{prefix}.experts": layer.config.num_experts, f"{prefix}.shared": 1})
    result = {}
    for name, tensor in tensors.items():
        bank, _, last = name.rpartition(".")
        flat = last in ("key_bias", "value_bias") and bank in counts
        result[name] = tensor.view(counts[bank], -1) if flat else tensor
    assert sum(a.ndim != b.ndim for a, b in zip(result.values(), tensors.values(), strict=True)) >= 4
    return result


def assert_same_weights(model: torch.nn.Module, other: torch.nn.Module) -> None:
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a.flatten(), b.flatten()), name


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("assign", [False, True])
def test_older_state_dicts_load(assign):
    model, fresh = randomised(vit()), vit()
    fresh.load_state_dict(older(model.state_dict(), model), assign=assign)
    assert_same_weights(model, fresh)
    assert all(p.ndim == 1 for p in biases(fresh))
    x = torch.randn(2, 3, 160, 160)
    assert torch.equal(model.eval()(x), fresh.eval()(x))


def test_wrong_sizes_are_still_refused():
    model = vit()
    state = model.state_dict()
    name = next(name for name in state if name.endswith("key_bias"))
    with pytest.raises(RuntimeError, match="key_bias"):
        model.load_state_dict({**state, name: state[name][:-1]})


def test_older_checkpoints_of_runs_load(tmp_path):
    """Their files hold one row for every residual expert, as they do now, and (1, H) for the shared one."""
    model = randomised(vit())
    rows = checkpoint.split_by_expert(model, dict(model.state_dict()))
    old = {n: t[None] if ".shared." in n and n.endswith("bias") else t for n, t in rows.items()}
    assert rows["blocks.1.mlp.experts.2.key_bias"].shape == (model.blocks[1].mlp.config.hidden_dim,)
    for folder, tensors in (("new", rows), ("old", old)):
        (tmp_path / folder).mkdir()
        save_file({n: t.clone() for n, t in tensors.items()}, tmp_path / folder / "dense.safetensors")
        fresh = vit()
        checkpoint.load_weights(tmp_path / folder, fresh)
        assert_same_weights(model, fresh)


def test_older_transformers_folders_load(tmp_path):
    model = randomised(bert()).eval()
    new, old, again = (str(tmp_path / name) for name in ("new", "old", "again"))
    for folder in (new, old):
        model.save_pretrained(folder)
    assert_same_weights(model, type(model).from_pretrained(new))
    file = f"{old}/model.safetensors"
    save_file({n: t.clone() for n, t in older(load_file(file), model).items()}, file, {"format": "pt"})
    config = json.loads((tmp_path / "old/config.json").read_text())
    del config["unif_moe"][0]["flat_biases"]
    (tmp_path / "old/config.json").write_text(json.dumps(config))
    loaded = type(model).from_pretrained(old).eval()
    assert_same_weights(model, loaded)
    ids = torch.arange(12).view(2, 6)
    torch.testing.assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    loaded.save_pretrained(again)
    assert_same_weights(model, type(model).from_pretrained(again))
    model.load_state_dict(loaded.state_dict())


def test_rows_of_an_expert():
    """What is rewritten when an expert is copied, for the optimiser's state."""
    layer = UniFMoELayer(UniFMoEConfig(8, 12, 3, 4))
    with torch.no_grad():
        for parameter in layer.experts.parameters():
            parameter.zero_()
        layer.load_ffn(1, torch.ones(12, 8), torch.ones(12), torch.ones(8, 12), torch.ones(8))
    for parameter in layer.experts.parameters():
        rows = layer.experts.rows(parameter, 1)
        assert (parameter[rows] == 1).all() and parameter.sum() == parameter[rows].numel()


def test_a_module_pickled_before_experts_could_be_gated():
    experts = BlockExperts(2, 8, 16, 4, "gelu", bias=True)
    del experts.gate_keys, experts.gate_key_bias
    again = pickle.loads(pickle.dumps(experts))
    assert again.activated_keys is again.keys and again.weights().gate_keys is None
    assert list(again.state_dict()) == list(experts.state_dict())
