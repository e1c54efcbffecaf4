"""Folders of upcycled Transformers models: what is saved loads as it was, or a sentence says why not."""

from __future__ import annotations

import copy
import json
import logging
import re
import subprocess
import sys
from functools import partial

import pytest
import timm
import torch
import transformers
from safetensors.torch import load_file, load_model, save_file, save_model

from tests.support.families import FAMILIES
from tests.support.small_models import TEXT, VISION, B, K, assert_same, build, inputs, logits, moved
from unifmoe_dist import UniFMoEConfig, UniFMoELayer, upcycle
from unifmoe_dist.errors import UserError
from unifmoe_dist.upcycling import moe_layers
from unifmoe_dist.upcycling.saving import without_notes


@pytest.mark.parametrize("automatic", [False, True])
def test_dense_weights_do_not_load_into_an_upcycled_configuration(automatic, tmp_path):
    dense = build("bert")
    dense.save_pretrained(tmp_path)
    config = upcycle(build("bert"), [1], K, B).config
    cls = transformers.AutoModelForSequenceClassification if automatic else type(dense)
    with pytest.raises(UserError, match="no weights for the layer of experts bert.encoder.layer.1.intermediate"):
        cls.from_pretrained(tmp_path, config=config)
    assert not moe_layers(cls.from_pretrained(tmp_path))


def test_a_head_around_an_upcycled_body_is_saved_whole(tmp_path):
    model = build("bert")
    upcycle(model.bert, [0], K, B)
    upcycle(model, [1], 2, 8)  # and once more, now the whole
    moved(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert [layer.config.num_experts for layer in moe_layers(again).values()] == [K, 2]
    batch = inputs("bert")
    torch.testing.assert_close(logits(again, batch), logits(model, batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_an_encoder_decoder_is_saved_whole(part, tmp_path):
    encoder, decoder = build("bert").bert, build("bert", is_decoder=True, add_cross_attention=True).config
    model = transformers.EncoderDecoderModel(encoder=encoder, decoder=transformers.BertLMHeadModel(decoder)).eval()
    upcycle(getattr(model, part), [1], K, B)
    moved(model).save_pretrained(tmp_path)
    again = transformers.EncoderDecoderModel.from_pretrained(tmp_path)
    assert list(moe_layers(again)) == list(moe_layers(model)) and len(moe_layers(again)) == 1
    ids = torch.randint(3, 50, (2, 6))
    with torch.no_grad():
        got, want = (m(input_ids=ids, decoder_input_ids=ids).logits for m in (again.eval(), model))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_layers_that_a_configuration_cannot_tell_of_are_not_saved(tmp_path):
    model = build("bert")
    model.bert.encoder.layer[1].output.dense = UniFMoELayer(UniFMoEConfig(64, 32, K, B))
    with pytest.raises(UserError, match="does not tell of the layers of experts in bert.encoder.layer.1.output.dense"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())

    class Own(type(model)):
        pass  # may make such layers in its own __init__

    model.__class__ = Own
    model.save_pretrained(tmp_path)
    lost = "has the layer of experts bert.encoder.layer.1.output.dense, .*call upcycle on its body in its __init__"
    with pytest.raises(UserError, match=lost):
        Own.from_pretrained(tmp_path)

    class Making(Own):
        def __init__(self, config):
            super().__init__(config)
            self.bert.encoder.layer[1].output.dense = UniFMoELayer(UniFMoEConfig(64, 32, K, B))

    assert len(moe_layers(Making.from_pretrained(tmp_path))) == 1
    assert not moe_layers(Own.from_pretrained(tmp_path, num_hidden_layers=1))  # left out on purpose


ANOTHER_PROCESS = """
import sys
from transformers import AutoModelForSequenceClassification as Auto, PreTrainedModel

METHODS = ("post_init", "save_pretrained", "from_pretrained")
folder, before = sys.argv[1], {name: vars(PreTrainedModel)[name] for name in METHODS}
import unifmoe_dist
import unifmoe_dist.upcycling

assert all(vars(PreTrainedModel)[name] is before[name] for name in METHODS)
try:
    Auto.from_pretrained(folder)
except KeyError as error:
    print(error)
for _ in range(2):
    unifmoe_dist.enable_from_pretrained()
    after = {name: vars(PreTrainedModel)[name] for name in METHODS}
    assert all(after[name] is not before[name] for name in METHODS)
    assert after == globals().setdefault("enabled", after)
print(*unifmoe_dist.upcycling.moe_layers(Auto.from_pretrained(folder)))
"""


def test_another_process_fails_with_the_remedy_and_loads_with_it(tmp_path):
    """Importing the package changes nothing in Transformers; one call does, and calling it again nothing more."""
    model = upcycle(build("bert"), [1], K, B)
    model.save_pretrained(tmp_path)
    command = [sys.executable, "-c", ANOTHER_PROCESS, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    failure, layers = result.stdout.splitlines()
    assert failure == "'gelu, in UniF-MoE layers: call unifmoe_dist.enable_from_pretrained() first'"
    assert layers == " ".join(moe_layers(model))


@torch.no_grad()
def test_other_ways_to_keep_a_model(tmp_path):
    model, batch = moved(upcycle(build("bert"), [0, 2], K, B)), inputs("bert")
    kind, expected = type(model), logits(model, batch)
    save_model(model, str(tmp_path / "model.safetensors"))
    by_file = upcycle(build("bert"), [0, 2], K, B)
    assert load_model(by_file, str(tmp_path / "model.safetensors")) == (set(), [])
    torch.save(model, tmp_path / "model.pt")
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len([*(tmp_path / "shards").glob("*.safetensors")]) > 3
    model.save_pretrained(tmp_path / "state", state_dict=model.state_dict(), variant="mine")
    found = {
        "safetensors": by_file,
        "pickled whole": torch.load(tmp_path / "model.pt", weights_only=False),
        "shards": kind.from_pretrained(tmp_path / "shards"),
        "state_dict=, variant=": kind.from_pretrained(tmp_path / "state", variant="mine"),
        "device_map": kind.from_pretrained(tmp_path / "shards", device_map="cpu"),
        "low_cpu_mem_usage": kind.from_pretrained(
            tmp_path / "shards", low_cpu_mem_usage=True, torch_dtype=torch.float32
        ),
        "from a state_dict": kind.from_pretrained(None, config=model.config, state_dict=model.state_dict()),
    }
    for way, again in found.items():
        torch.testing.assert_close(logits(again.eval(), batch), expected, msg=lambda m, way=way: f"{way}: {m}")
    model.bert.save_pretrained(tmp_path / "body")
    model.save_pretrained(tmp_path / "whole")
    for folder in ("body", "whole"):
        body = transformers.AutoModel.from_pretrained(tmp_path / folder, add_pooling_layer=False)
        assert len(moe_layers(body)) == 2
        got, want = (m(**batch).last_hidden_state for m in (body, model.bert))
        torch.testing.assert_close(got, want, msg=lambda m, folder=folder: f"{folder}: {m}")
    with pytest.raises(UserError, match="has no weights for the layer of experts"):
        dense = build("bert")
        dense.save_pretrained(tmp_path / "dense")
        kind.from_pretrained(tmp_path / "dense", config=model.config, ignore_mismatched_sizes=True)


@pytest.mark.parametrize("family", ["timm", "bert", "vit", "distilbert"])
def test_dense_weights_do_not_pass_by_a_layer_of_experts(family, tmp_path):
    """Nor those of other experts; and a dense model tells at least whom it asks."""
    dense, model = build(family), upcycle(build(family), [0, 2], K, B)
    torch.save(dense.state_dict(), tmp_path / "dense.pth")
    place = next(iter(moe_layers(model)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for load in (model.load_state_dict, partial(timm.models.load_checkpoint, model)):
        given = dense.state_dict() if load == model.load_state_dict else str(tmp_path / "dense.pth")
        with pytest.raises(
            RuntimeError, match=rf"{place}\.\S+ belongs to a dense FFN, but {place} is a layer of experts"
        ):
            load(given, strict=False)
    assert_same(
        {name: tensor for name, tensor in model.state_dict().items() if place in name},
        {name: tensor for name, tensor in before.items() if place in name},
    )
    with pytest.raises(RuntimeError, match="size mismatch"):
        upcycle(build(family), [0, 2], K + 1, B).load_state_dict(before, strict=False)
    missing, unexpected = dense.load_state_dict(before, strict=False)
    assert missing and any(name.startswith(f"{place}.experts") for name in unexpected)
    missing, unexpected = upcycle(build(family), [0, 2], K, B).load_state_dict(before, strict=False)
    assert not missing and not unexpected


@pytest.mark.parametrize("family", ["bert", "distilbert", "electra", "vit"])
def test_a_process_without_the_package_fails_with_the_remedy(family, tmp_path):
    """As it would see it: the test before this one has a real process."""
    model = upcycle(build(family), [1], K, B)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    name = config["activation" if family == "distilbert" else "hidden_act"]
    assert name == "gelu, in UniF-MoE layers: call unifmoe_dist.enable_from_pretrained() first"
    known = transformers.activations.ACT2FN
    kept = dict.pop(known, name)
    try:
        with pytest.raises(KeyError, match=r"call unifmoe_dist.enable_from_pretrained\(\) first"):
            type(model).from_pretrained(tmp_path)
    finally:
        known.update({name: kept})
    assert len(moe_layers(type(model).from_pretrained(tmp_path))) == 1


@pytest.mark.parametrize("name", ["gelu", "gelu, in UniF-MoE layers: import unifmoe_dist first"])
def test_folders_of_earlier_versions_load(name, tmp_path):
    model = upcycle(build("bert"), [1], K, B)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["hidden_act"] = name
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = type(model).from_pretrained(tmp_path)
    assert len(moe_layers(again)) == 1 and again.config.hidden_act == model.config.hidden_act
    assert without_notes(again.config).hidden_act == "gelu"
    assert without_notes(transformers.AutoConfig.from_pretrained(tmp_path)).hidden_act == "gelu"


@pytest.mark.parametrize("family", [*TEXT, *VISION])
def test_from_pretrained_rebuilds_the_layers(family: str, tmp_path, caplog):
    model = upcycle(upcycle(build(family), [0], K, B), [-1], 2, 8)
    with torch.no_grad():  # experts that no longer equal each other
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    batch = inputs(family)
    expected = logits(model, batch)
    model.save_pretrained(tmp_path)
    automatic = "AutoModelForSequenceClassification" if family in TEXT else "AutoModelForImageClassification"
    for cls in (type(model), getattr(transformers, automatic)):
        with caplog.at_level(logging.WARNING):
            again, report = cls.from_pretrained(tmp_path, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
        assert not again.training and [m.config.num_experts for m in moe_layers(again).values()] == [K, 2]
        assert_same(dict(again.named_parameters()), dict(model.named_parameters()), rtol=0, atol=0)
        # Weights that lie unaligned in a mapped file may round differently in the last bit; a copy does not.
        torch.testing.assert_close(logits(again, batch), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(logits(copy.deepcopy(again), batch), expected)
    assert "newly initialized" not in caplog.text
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert len(moe_layers(base)) == 2
    half = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    again.save_pretrained(tmp_path / "again")  # and once more
    twice = type(model).from_pretrained(tmp_path / "again")
    assert torch.equal(logits(copy.deepcopy(twice), batch), expected)


def test_folders_of_another_version_of_transformers_load(tmp_path):
    """Versions 4 and 5 have ViT's FFNs in different places; each loads what the other saved, and saves its own."""
    model, batch = moved(upcycle(build("vit"), [0, 2], K, B)), inputs("vit")
    model.save_pretrained(tmp_path)
    own = next(iter(moe_layers(model))).rpartition(".")[2]
    other = {"mlp": "intermediate", "intermediate": "mlp"}[own]
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {re.sub(rf"\.{own}\.(?=experts|shared|router|usage)", f".{other}.", n): t for n, t in weights.items()}
    assert renamed.keys() != weights.keys()
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    for folder in (tmp_path, tmp_path / "again"):
        again, report = type(model).from_pretrained(folder, output_loading_info=True)
        assert not any(report.values())
        torch.testing.assert_close(logits(again, batch), logits(model, batch))
        again.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again/model.safetensors").keys() == weights.keys()


def test_config_carries_the_layers_without_touching_dense_twins():
    dense = build("bert")
    config = dense.config
    moe = upcycle(type(dense)(config), [1], K, B)
    assert not hasattr(config, "unif_moe") and moe.bert.config is moe.config
    assert not moe_layers(type(dense)(config))
    # New weights, same structure:
    fresh = transformers.AutoModelForSequenceClassification.from_config(moe.config)
    (layer,) = moe_layers(fresh).values()
    assert torch.equal(layer.ffn_weights(0)[0], layer.ffn_weights("shared")[0])


def test_from_pretrained_with_fewer_layers(tmp_path):
    """Transformers leaves out the layers above; so do the rebuilt ones."""
    model = upcycle(build("bert"), [0, 2], K, B)
    model.save_pretrained(tmp_path)
    shallow = type(model).from_pretrained(tmp_path, num_hidden_layers=1)
    assert list(moe_layers(shallow)) == ["bert.encoder.layer.0.intermediate"]
    (layer,) = moe_layers(shallow).values()
    assert torch.equal(layer.ffn_weights(1)[0], next(iter(moe_layers(model).values())).ffn_weights(1)[0])
    shallow.save_pretrained(tmp_path / "again")
    assert len(moe_layers(type(model).from_pretrained(tmp_path / "again"))) == 1


def test_sharded_save_is_refused_on_reload(tmp_path):
    model = upcycle(build("bert"), [1], K, B)
    model.config.unif_moe[0]["expert_parallel_size"] = 2
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="spread over 2 ranks"):
        type(model).from_pretrained(tmp_path)


def tiny_t5() -> transformers.T5ForConditionalGeneration:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 50}
    config = transformers.T5Config(**sizes, feed_forward_proj="gated-silu", dropout_rate=0.0)
    return transformers.T5ForConditionalGeneration(config).eval()


def test_both_parts_of_a_model_with_one_configuration(tmp_path):
    """T5's encoder and decoder share a configuration, so the whole's tells of each part by name."""
    model = tiny_t5()
    upcycle(model.encoder, [1], K, B)
    model.save_pretrained(tmp_path / "encoder")
    again = type(model).from_pretrained(tmp_path / "encoder")
    upcycle(again.decoder, [0], 2, B, capacity_factor=2.0)
    upcycle(again.encoder, [0], 4, B)
    moved(again).save_pretrained(tmp_path / "both")
    again.save_pretrained(tmp_path / "both")  # once more: nothing is noted twice
    notes = json.loads((tmp_path / "both" / "config.json").read_text())["unif_moe"]
    assert [(note["part"], note["layers"]) for note in notes] == [("encoder", [1]), ("encoder", [0]), ("decoder", [0])]
    both = type(model).from_pretrained(tmp_path / "both")
    assert [layer.config.num_experts for layer in moe_layers(both).values()] == [4, K, 2]
    assert [layer.config.gated for layer in moe_layers(both).values()] == [True] * 3
    ids = torch.randint(3, 50, (2, 6))
    with torch.no_grad():
        got, want = (m(input_ids=ids, decoder_input_ids=ids).logits for m in (both, again))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    half = transformers.T5EncoderModel.from_pretrained(tmp_path / "both")
    assert [layer.config.num_experts for layer in moe_layers(half).values()] == [4, K]
    assert both.config.unif_moe == again.config.unif_moe and without_notes(both.config).dense_act_fn == "silu"


@pytest.mark.parametrize("family", ["Llama", "GPT-2", "OPT", "Gemma 3", "ModernBERT", "T5", "BART", "CLIP", "Swin"])
def test_more_families_fail_with_the_remedy_elsewhere(family, tmp_path, monkeypatch):
    """Their configurations have the activation by other names, or in the configuration of a part."""
    row = next(row for row in FAMILIES if row.title == family and row.kind != "timm")
    model = row.build()
    upcycle(row.part_of(model), [1], K, B)
    model.save_pretrained(tmp_path)
    known = type(transformers.activations.ACT2FN)
    find = known.__getitem__

    def as_elsewhere(names, name: str):
        if "unifmoe_dist" in name:
            raise KeyError(name)
        return find(names, name)

    with (
        monkeypatch.context() as patch,
        pytest.raises(KeyError, match=r"unifmoe_dist.enable_from_pretrained\(\) first"),
    ):
        patch.setattr(known, "__getitem__", as_elsewhere)
        type(model).from_pretrained(tmp_path)
    assert len(moe_layers(type(model).from_pretrained(tmp_path))) == 1


def test_a_family_without_an_activation_fails_with_the_remedy_elsewhere(tmp_path):
    """DINOv2-giant's FFNs take none from their configuration; a process of its own opens the folder by both ways."""
    model = next(row for row in FAMILIES if row.title == "DINOv2-giant" and row.kind == "vision").build()
    upcycle(model, [1], K, B).save_pretrained(tmp_path)
    code = (
        "import sys, transformers\n"
        "for name in ('AutoModel', 'Dinov2ForImageClassification'):\n"
        "    try:\n"
        "        getattr(transformers, name).from_pretrained(sys.argv[1])\n"
        "    except (ValueError, OSError) as error:\n"
        "        print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0 and result.stdout.count("call unifmoe_dist.enable_from_pretrained() first") == 2
    again = type(model).from_pretrained(tmp_path)
    assert len(moe_layers(again)) == 1
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/config.json").read_text() == (tmp_path / "config.json").read_text()
    assert len(moe_layers(transformers.AutoModel.from_pretrained(tmp_path / "again"))) == 1


@pytest.mark.parametrize("change", [{"ffns": None}, {"part": "decoder"}])
def test_notes_that_do_not_fit_the_folder_are_refused(change, tmp_path):
    model = tiny_t5()
    upcycle(model.encoder, [1], K, B)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if "ffns" in change:
        change = {"ffns": {"nowhere.1": ["wi_0", "act", "wi_1", "wo"]}}
    config["unif_moe"][0].update(change)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError, match="has (the layer of experts encoder|no weights for the layer of experts decoder)"
    ):
        type(model).from_pretrained(tmp_path)
