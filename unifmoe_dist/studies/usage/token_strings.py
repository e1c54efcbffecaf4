"""Tokens as readers know them."""

from collections.abc import Iterable
from typing import Any


def token_strings(tokenizer: Any, ids: Iterable[int]) -> list[str]:
    """A string per token: of byte-level vocabularies its text, of others the token as the vocabulary has it."""
    numbers = [int(token) for token in ids]
    names = tokenizer.convert_ids_to_tokens(numbers)
    if not any("Ġ" in name for name in names):  # byte-level: Ġ stands for a space
        return names
    return [tokenizer.decode([number]).replace("\n", "↵") for number in numbers]
