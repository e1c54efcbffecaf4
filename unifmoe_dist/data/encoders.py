"""BERT-style encoders of Transformers and their tokenizers: from the hub, from a folder, or with random weights."""

import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from unifmoe_dist.data.pretrained import Pretrained, quiet
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
class Encoder(Pretrained):
    """Where a sequence classifier and its tokenizer come from; the backbone may be `TINY`."""

    @property
    def known(self) -> str | None:
        """Its name among the BERTs whose sizes are known offline, if it is one; they take 512 tokens."""
        name = self.source.removeprefix("google-bert/")
        return name if name in _BERT_SIZES and not Path(name).is_dir() else None

    def tokenizer(self) -> Any:
        """Raises UserError where it cannot be had from the source, or has no padding token."""
        if self._is_tiny():
            return _tiny_tokenizer()
        tokenizer = super().tokenizer()
        if tokenizer.pad_token_id is None:
            raise UserError(f"the tokenizer of {self.source} has no padding token; choose a BERT-style model.backbone.")
        return tokenizer

    def config(self) -> Any:
        """The model's config; raises UserError where it cannot be had from the source."""
        return _tiny_config({}) if self._is_tiny() else super().config()

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
        with self._explained("weights"), quiet():
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
        self.check_whole([name for name in drawn if name.startswith(body) and ".pooler." not in name])
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
