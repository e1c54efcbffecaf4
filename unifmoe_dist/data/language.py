"""What tasks of texts share: an encoder of Transformers with its tokenizer, and texts cut to what it takes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.data.task import Task, TaskData
from unifmoe_dist.errors import UserError

if TYPE_CHECKING:
    from unifmoe_dist.data.encoders import Encoder


@dataclass
class Examples:
    """One split: a tuple of one or two texts per item, and its class."""

    texts: list[tuple[str, ...]]
    labels: list[int]


class LanguageTask(Task):
    """A task of texts; a subclass says where its encoder comes from.

    Attributes:
        environment: Name of the one training environment; by default the task's.
    """

    language = True
    environment = ""

    def encoder(self, config: TrainConfig) -> Encoder:
        """Where backbone and tokenizer come from.

        Raises:
            UserError: they are not there.
        """
        raise NotImplementedError

    def input_size(self, config: TrainConfig) -> tuple[int, ...]:
        from unifmoe_dist.data.text import MAX_LENGTH, longest_input

        with suppress(UserError):
            encoder = self.encoder(config)
            if encoder.known:  # the hub, tried several times where there is no network, would say nothing new
                return (MAX_LENGTH,)
            return (longest_input(encoder.config(), None, encoder.source),)
        return (MAX_LENGTH,)

    def tokenizer(self, config: TrainConfig) -> Any:
        return self.encoder(config).tokenizer()

    def encoded(self, parts: Sequence[Examples], encoder: Encoder, dropout: float | None = None) -> TaskData:
        """Texts, tokenised to at most 128 tokens, or fewer if the model takes fewer, and padded batch by batch.

        Args:
            parts: To train on, to validate on and to test on; without the last, what validates tests too.
            encoder: Backbone and tokenizer.
            dropout: Dropout of the backbone's embeddings and outputs; None keeps the model's own.

        Returns:
            `collate` gives `input_ids`, `attention_mask` and, where the tokenizer uses them, `token_type_ids`, each
            `(N, T) int64`; the model returns an object with `.logits (N, classes)`.

        Raises:
            UserError: config, tokenizer or (from `build_model`) weights are missing, unreadable or do not fit.
        """
        from unifmoe_dist.data.text import EncodedTexts, PadCollator, check_tokens, longest_input

        tokenizer, config = encoder.tokenizer(), encoder.config()
        longest = longest_input(config, tokenizer, encoder.source)

        def tokenised(part: Examples) -> EncodedTexts:
            first, *second = zip(*part.texts, strict=True)
            return EncodedTexts(first, part.labels, tokenizer, second[0] if second else None, longest)

        train, validation, *test = map(tokenised, parts)
        check_tokens(config, [train, validation, *test], encoder.source)
        return TaskData(
            name=self.name,
            num_classes=self.num_classes,
            train=[train],
            validation=[validation],
            test=[*(test or [validation])],
            environments=(self.environment or self.name,),
            collate=PadCollator(int(tokenizer.pad_token_id), "token_type_ids" in tokenizer.model_input_names),
            build_model=partial(encoder.classifier, self.num_classes, dropout),
            metric=self.metric,
        )
