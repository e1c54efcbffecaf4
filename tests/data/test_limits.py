"""Models with short position tables or small vocabularies, cells that are no text, images smaller than a patch."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

from tests.support.tasks import glue_task
from unifmoe_dist.data.acceptability import acceptability_task
from unifmoe_dist.data.encoders import TINY, Encoder
from unifmoe_dist.data.glue_files import read_glue
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.data.vision_backbone import build_backbone
from unifmoe_dist.errors import UserError
from unifmoe_dist.train.cli import parse_train_config

LONG = " ".join(["word"] * 60)  # 240 tokens: the tokenizer's are characters
ROWS = {"sentence1": [LONG, "one"], "sentence2": ["a", LONG], "label": [0, 1]}


def write_rows(folder: Path, **columns) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation"):
        pyarrow.parquet.write_table(pyarrow.table({**ROWS, **columns}), folder / f"{split}.parquet")
    return folder


def write_model(folder: Path, kind: str, positions: int, vocabulary: int | None = None, added: int = 0) -> Path:
    """A folder with a small model's config and the tokenizer of single characters."""
    from transformers import AutoConfig

    tokenizer = Encoder(TINY, "none").tokenizer()
    if added:
        tokenizer.add_tokens(["word"])
    rows = vocabulary or len(tokenizer)
    config = AutoConfig.for_model(
        kind,
        vocab_size=rows,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=positions,
        pad_token_id=0 if kind == "bert" else 1,
        **({"dim": 16, "hidden_dim": 32, "n_layers": 1, "n_heads": 2} if kind == "distilbert" else {}),
    )
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "kind,positions,longest",
    [("bert", 64, 64), ("roberta", 128, 126), ("roberta", 514, 128), ("distilbert", 40, 40), ("camembert", 66, 64)],
)
def test_texts_are_cut_to_the_models_own_limit(kind, positions, longest, tmp_path):
    folder, data = write_model(tmp_path / "model", kind, positions), write_rows(tmp_path / "rte")
    task = glue_task("rte", data, Encoder(str(folder), "none"))
    inputs, labels = task.collate([task.train[0][0], task.train[0][1]])
    assert inputs["input_ids"].shape == (2, longest)
    with torch.no_grad():
        assert task.build_model()(**inputs).logits.isfinite().all()
    words = ["--data.task", "rte", "--model.backbone", str(folder), "--model.pretrained", "none"]
    assert find_task("rte").input_size(parse_train_config(words)) == (longest,)  # what a memory estimate counts


def test_the_acceptability_task_cuts_too(tmp_path):
    folder = write_model(tmp_path / "model", "bert", 64)
    task = acceptability_task(0, folder)
    assert max(len(task.train[0][i][0]) for i in range(len(task.train[0]))) == 64


def test_too_few_positions(tmp_path):
    folder = write_model(tmp_path / "model", "roberta", 6)
    with pytest.raises(UserError, match="takes inputs of 4 tokens, too few for a sentence"):
        glue_task("rte", write_rows(tmp_path / "rte"), Encoder(str(folder), "none"))


@pytest.mark.parametrize("task", ["rte", "acceptability"])
def test_tokens_beyond_the_embedding(task, tmp_path):
    folder = write_model(tmp_path / "model", "bert", 64, vocabulary=50)
    with pytest.raises(UserError, match=r"gives token \d+, but its model has embeddings for 50; "):
        if task == "rte":
            glue_task("rte", write_rows(tmp_path / "rte"), Encoder(str(folder), "none"))
        else:
            acceptability_task(0, folder)


def test_an_added_token_counts_only_where_it_occurs(tmp_path):
    size = len(Encoder(TINY, "none").tokenizer())
    folder = write_model(tmp_path / "model", "bert", 64, vocabulary=size, added=1)
    plain = write_rows(tmp_path / "rte", sentence1=["a", "b"], sentence2=["c", "d"])
    assert len(glue_task("rte", plain, Encoder(str(folder), "none")).train[0]) == 2
    with pytest.raises(UserError, match=f"gives token {size}, but its model has embeddings for {size}; "):
        glue_task("rte", write_rows(tmp_path / "rte"), Encoder(str(folder), "none"))


def test_token_types_beyond_the_embedding(tmp_path):
    folder = write_model(tmp_path / "model", "bert", 64)
    (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace('"type_vocab_size": 2', '"type_vocab_size": 1')
    )
    with pytest.raises(UserError, match="gives token type 1, but its model knows 1"):
        glue_task("rte", write_rows(tmp_path / "rte"), Encoder(str(folder), "none"))


@pytest.mark.parametrize(
    "columns,sentence",
    [
        ({"sentence1": ["one", None]}, "holds None in row 2 of the column 'sentence1', which must be text"),
        ({"sentence2": [3.5, 4.5]}, "holds 3.5 in row 1 of the column 'sentence2', which must be text"),
        ({"label": [0, None]}, "has the label None"),
        ({"label": ["0", "1"]}, "has the label '0'"),
        ({"label": [0.5, 1.0]}, "has the label 0.5"),
    ],
)
def test_cells_that_are_no_text(columns, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        read_glue("rte", write_rows(tmp_path / "rte", **columns))


def test_labels_are_whole_numbers_however_stored(tmp_path):
    labels = read_glue("rte", write_rows(tmp_path / "rte", label=[0.0, 1.0]))[0].labels
    assert labels == [0, 1] and all(type(label) is int for label in labels)


@pytest.mark.parametrize("size,use", [(8, 16), (20, 16), (225, 224)])
def test_images_that_are_no_whole_patches(size, use):
    with pytest.raises(UserError, match=f"data.image_size {size} is no multiple of .* 16 pixels; use {use}, for"):
        build_backbone("deit_tiny_patch16_224", 7, size, "none")
