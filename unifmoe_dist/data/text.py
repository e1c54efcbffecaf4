"""Sentences and pairs of sentences as token ids, their padding, and what an encoder can take of them.

Texts with more tokens than the encoder takes are cut; tokens that it has no embedding for are refused.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from unifmoe_dist.data import token_cache
from unifmoe_dist.data.task import Batch
from unifmoe_dist.data.token_cache import Tokens
from unifmoe_dist.errors import UserError

MAX_LENGTH = 128
"""Longest input, in tokens."""

_FEWEST = 8
"""Tokens below which nothing of a pair of sentences is left beside the special ones."""

_AFTER_PADDING = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm")
"""Families that count positions from the padding token's number on, so that as many are lost."""

_AT_ONCE = 10_000  # texts that are tokenised together: bounds what the tokenizer's own lists take


class EncodedTexts(Dataset):
    """Texts tokenised once, kept in flat arrays (a list of lists takes ten times the memory).

    Items are `(token ids, token types, label)`: two lists of equal length and a class. Of a pair that
    is too long, the longer text is cut first.

    Args:
        texts: First (or only) text of every item.
        labels: Class of every item.
        tokenizer: A Transformers tokenizer.
        pairs: Second text of every item; None for single sentences.
        longest: Tokens of an item, at most.
    """

    def __init__(
        self,
        texts: Sequence[str],
        labels: Sequence[int],
        tokenizer: Any,
        pairs: Sequence[str] | None = None,
        longest: int = MAX_LENGTH,
    ) -> None:
        self.texts, self.labels = list(texts), list(labels)
        self.pairs = None if pairs is None else list(pairs)
        large = len(self.texts) >= token_cache.FEWEST
        make = partial(tokenise, tokenizer, self.texts, self.pairs, longest)
        name = token_cache.fingerprint(tokenizer, self.texts, self.pairs, longest) if large else None
        tokens = token_cache.remembered(name, len(self.texts), make)
        self._ends = np.concatenate([[0], np.cumsum(tokens["lengths"], dtype=np.int64)])
        self._ids, self._types = tokens["ids"], tokens["types"]

    def largest(self) -> tuple[int, int]:
        """The largest token id and token type; -1 without tokens."""
        return int(self._ids.max(initial=-1)), int(self._types.astype(np.int64).max(initial=-1))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[list[int], list[int], int]:
        part = slice(self._ends[index], self._ends[index + 1])
        return self._ids[part].tolist(), self._types[part].tolist(), self.labels[index]


def tokenise(tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, longest: int = MAX_LENGTH) -> Tokens:
    """Texts, or pairs of texts, as flat arrays."""
    ids, types, lengths = [np.zeros(0, np.int32)], [np.zeros(0, np.uint8)], [np.zeros(0, np.int32)]
    for first in range(0, len(texts), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        second = None if pairs is None else pairs[part]
        encoded = tokenizer(texts[part], second, truncation=True, max_length=longest, return_token_type_ids=True)
        lengths.append(np.array([len(row) for row in encoded["input_ids"]], dtype=np.int32))
        ids.append(np.concatenate([np.asarray(row, dtype=np.int32) for row in encoded["input_ids"]]))
        types.append(np.concatenate([np.asarray(row, dtype=np.uint8) for row in encoded["token_type_ids"]]))
    return {"ids": np.concatenate(ids), "types": np.concatenate(types), "lengths": np.concatenate(lengths)}


def longest_input(config: Any, tokenizer: Any, source: object) -> int:
    """Tokens of an input at most: 128, or fewer if the model (of Transformers) has fewer positions.

    Raises:
        UserError: too few for a sentence.
    """
    positions = getattr(config, "max_position_embeddings", None) or MAX_LENGTH
    if config.model_type in _AFTER_PADDING:
        positions -= (config.pad_token_id if config.pad_token_id is not None else 1) + 1
    longest = min(MAX_LENGTH, positions, getattr(tokenizer, "model_max_length", None) or MAX_LENGTH)
    if longest < _FEWEST:
        raise UserError(
            f"{source} takes inputs of {max(longest, 0)} tokens, too few for a sentence; choose a model with at least "
            f"{_FEWEST} positions."
        )
    return longest


def check_tokens(config: Any, parts: Iterable[EncodedTexts], source: object) -> None:
    """See that the model has an embedding for every token and token type.

    Raises:
        UserError: it has not: tokens were added to the tokenizer, or it belongs to another model.
    """
    largest = [part.largest() for part in parts]
    token, kind = max(t for t, _ in largest), max(k for _, k in largest)
    if token >= config.vocab_size:
        raise UserError(
            f"the tokenizer of {source} gives token {token}, but its model has embeddings for {config.vocab_size}; "
            "give a tokenizer and a model that belong together, or save the model after resize_token_embeddings."
        )
    kinds = getattr(config, "type_vocab_size", None)
    if kinds is not None and kind >= kinds:
        raise UserError(
            f"the tokenizer of {source} gives token type {kind}, but its model knows {kinds}; give a tokenizer and a "
            "model that belong together."
        )


@dataclass(frozen=True)
class PadCollator:
    """Pads `(token ids, label)` or `(token ids, token types, label)` items on the right to the longest of the batch.

    Gives `input_ids`, `attention_mask` (1 on tokens, 0 on padding) and `token_type_ids` (0 on padding), each
    `(N, T) int64`, and the labels `(N,) int64`.

    Attributes:
        pad_token_id: Token in padded places.
        token_types: Whether the model takes `token_type_ids` (DistilBERT does not).
    """

    pad_token_id: int = 0
    token_types: bool = True

    def __call__(self, items: Sequence[tuple]) -> Batch:
        rows = [torch.tensor(item[0], dtype=torch.int64) for item in items]
        inputs: dict[str, Tensor] = {
            "input_ids": pad_sequence(rows, True, self.pad_token_id),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], True),
        }
        if self.token_types:
            types = [
                torch.tensor(t[0]) if t else torch.zeros_like(row) for row, (_, *t, _) in zip(rows, items, strict=True)
            ]
            inputs["token_type_ids"] = pad_sequence(types, True)
        return inputs, torch.tensor([item[-1] for item in items], dtype=torch.int64)
