"""What a text encoder can take: how many tokens, and which. Longer texts are cut to it; other tokens are refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from unifmoe_dist.data.text import MAX_LENGTH, EncodedTexts
from unifmoe_dist.errors import UserError

_FEWEST = 8
"""Tokens below which nothing of a pair of sentences is left beside the special ones."""

_AFTER_PADDING = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm")
"""Families that count positions from the padding token's number on, so that as many are lost."""


def longest_input(config: Any, tokenizer: Any, source: object) -> int:
    """Tokens of an input at most: 128, or fewer if the model has fewer positions.

    Args:
        config: The model's (Transformers).
        tokenizer: Its tokenizer.
        source: Where they come from, for the message.

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
