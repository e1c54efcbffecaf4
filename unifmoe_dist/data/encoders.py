"""BERT-style encoders of Transformers and their tokenizers: from the hub, from a folder, or with random weights."""

from __future__ import annotations

import pickle
import string
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from unifmoe_dist.errors import UserError
from unifmoe_dist.upcycling import enable_from_pretrained

GLUE_BACKBONE = "bert-large-cased"
"""The paper's language backbone."""

TINY = "tiny-bert"
"""Name of a BERT of 4 layers, 64 wide (FFN 256), whose tokens are characters. It exists only with random weights."""


_BERT_SIZES = {  # width, layers, heads, FFN, vocabulary: config.json of the hub's models (Devlin et al., 2019)
    "bert-base-cased": (768, 12, 12, 3072, 28996),
    "bert-base-uncased": (768, 12, 12, 3072, 30522),
    "bert-large-cased": (1024, 24, 16, 4096, 28996),
    "bert-large-uncased": (1024, 24, 16, 4096, 30522),
}


@dataclass(frozen=True)
class Encoder:
    """Where a sequence classifier and its tokenizer come from.

    Args:
        backbone: Name on the Hugging Face hub, a folder, or `TINY`.
        pretrained: Folder with config, weights and tokenizer, in place of the backbone; "none" draws random weights
            for the backbone's architecture; None takes the backbone's own weights.
    """

    backbone: str
    pretrained: str | None = None

    @property
    def random(self) -> bool:
        """Whether weights are drawn rather than read."""
        return self.pretrained == "none"

    @property
    def source(self) -> str:
        """The hub name or folder that is read."""
        return self.backbone if self.random or self.pretrained is None else self.pretrained

    @property
    def known(self) -> str | None:
        """Its name among the BERTs whose sizes are known offline, if it is one; they take 512 tokens."""
        name = self.source.removeprefix("google-bert/")
        return name if name in _BERT_SIZES and not Path(name).is_dir() else None

    def tokenizer(self) -> Any:
        """Raises UserError where it cannot be had from the source, or has no padding token."""
        if self._is_tiny():
            return _tiny_tokenizer()
        from transformers import AutoTokenizer

        with self._explained("tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(self.source, trust_remote_code=False)
        if tokenizer.pad_token_id is None:
            raise UserError(f"the tokenizer of {self.source} has no padding token; choose a BERT-style model.backbone.")
        return tokenizer

    def config(self) -> Any:
        """The model's config; raises UserError where it cannot be had from the source."""
        if self._is_tiny():
            return _tiny_config({})
        from transformers import AutoConfig

        with self._explained("config"):
            return AutoConfig.from_pretrained(self.source, trust_remote_code=False)

    def classifier(self, num_classes: int, dropout: float | None = None) -> nn.Module:
        """The model with a new classifier of `num_classes`, in float32; new weights come from torch's generator.

        `dropout` is that of hidden states and of the classifier's input; attention keeps the model's own, as all do for
        None.

        Raises:
            UserError: config or weights cannot be had from the source, or do not belong together.
        """
        from transformers import AutoConfig, AutoModelForSequenceClassification

        given = {"num_labels": num_classes} | ({} if dropout is None else {"hidden_dropout_prob": dropout})
        if self._is_tiny():
            return AutoModelForSequenceClassification.from_config(_tiny_config(given))
        enable_from_pretrained()  # the folder may hold an upcycled model
        with self._explained("weights"), _quiet():
            config = AutoConfig.from_pretrained(self.source, trust_remote_code=False, **given)
            if self.random:
                return AutoModelForSequenceClassification.from_config(config).float()
            # A checkpoint may bring a classifier of another width, which is drawn anew.
            model, loaded = AutoModelForSequenceClassification.from_pretrained(
                self.source,
                config=config,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                trust_remote_code=False,
            )
        drawn = [*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])]
        body = f"{model.base_model_prefix}."
        if foreign := sorted(name for name in drawn if name.startswith(body) and ".pooler." not in name):
            raise UserError(
                f"the weights of {self.source} lack {foreign[0]} in the shape that its config names ({len(foreign)} "
                "such tensors); give a folder whose weights and config belong together, or set model.pretrained none."
            )
        return model.float()

    def untrained(self, num_classes: int, dropout: float) -> nn.Module:
        """What `classifier` gives, with random weights: only sizes are read, and of BERT they are known offline.

        Raises:
            UserError: the backbone is no folder and none of the known ones, and the hub cannot be reached.
        """
        if name := self.known:
            return untrained_bert(*_BERT_SIZES[name], num_labels=num_classes, hidden_dropout_prob=dropout)
        try:
            return Encoder(self.source, "none").classifier(num_classes, dropout)
        except UserError as error:
            known = ", ".join(_BERT_SIZES)
            raise UserError(f"{error} Sizes that are known without a network: {known}, and local folders.") from error

    def _is_tiny(self) -> bool:
        if self.source != TINY:
            return False
        if not self.random:
            raise UserError(f"model.backbone {TINY} has no pretrained weights; set model.pretrained none.")
        return True

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Missing files, no network and unreadable files in one sentence."""
        folder = Path(self.source)
        if self.pretrained not in (None, "none") and not folder.is_dir():
            raise UserError(
                f"model.pretrained {self.source} is not a folder; give one that holds a model's config, weights and "
                "tokenizer, or none for random weights."
            )
        try:
            yield
        except UserError:
            raise
        except (OSError, ValueError, RuntimeError, ImportError, SafetensorError, pickle.UnpicklingError) as error:
            place = f"the folder {folder}" if folder.is_dir() else f"{self.source} on the Hugging Face hub"
            reason = " ".join(str(error).split("\n")[0].split()).rstrip(".")
            raise UserError(
                f"the {what} of {place} cannot be had ({reason}); check the name and the network, or set "
                "model.pretrained to a folder that holds config, weights and tokenizer."
            ) from error


def untrained_bert(
    width: int, layers: int, heads: int, hidden: int, vocabulary: int = 30522, **given: Any
) -> nn.Module:
    """A BERT classifier with random weights, of two classes unless `given` says otherwise."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=hidden,
            vocab_size=vocabulary,
            **given,
        )
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Transformers' report of weights that it draws anew: the classifier is meant to be new."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_CHARACTERS = string.digits + string.ascii_letters + string.punctuation


def _tiny_config(given: dict[str, Any]) -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=len(_SPECIAL) + 2 * len(_CHARACTERS),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
        attention_probs_dropout_prob=0.0,
        **given,
    )


def _tiny_tokenizer() -> Any:
    """BERT's own tokenizer over a vocabulary of single characters, at the start of a word and inside it."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = [*_SPECIAL, *_CHARACTERS, *(f"##{character}" for character in _CHARACTERS)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    core = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=False)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.post_processor = processors.BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=128,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
