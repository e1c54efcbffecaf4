"""Documents as one row of tokens, cut into windows: every token but the first is predicted once, and none is padding.

Documents are joined with the tokenizer's end token. A window of T inputs is T + 1 tokens, the last of which is the
first of the next window: its labels are its inputs moved by one. What is left at the end is too short and dropped.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from unifmoe_dist.data import token_cache
from unifmoe_dist.data.task import Batch
from unifmoe_dist.data.token_cache import Tokens

_LARGE = 200_000
"""Characters from which tokens are worth a file; fewer take a fraction of a second."""

_AT_ONCE = 1_000  # documents that are tokenised together: bounds what the tokenizer's own lists take


def tokenise_documents(tokenizer: Any, documents: Sequence[str]) -> list[np.ndarray]:
    """Token ids (int32) of every document, its end token included; from the cache where there is much of it."""

    def make() -> Tokens:
        rows = [np.zeros(0, np.int32)]
        for first in range(0, len(documents), _AT_ONCE):
            part = list(documents[first : first + _AT_ONCE])
            encoded = tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
            rows += [np.asarray([*row, tokenizer.eos_token_id], np.int32) for row in encoded]
        ids = np.concatenate(rows)
        lengths = np.array([len(row) for row in rows[1:]], np.int32)
        return {"ids": ids, "types": np.zeros(len(ids), np.uint8), "lengths": lengths}

    name = None
    if sum(map(len, documents)) >= _LARGE:
        name = token_cache.fingerprint(tokenizer, [*documents, str(tokenizer.eos_token_id)], None, None)
    tokens = token_cache.remembered(name, len(documents), make)
    return np.split(tokens["ids"], np.cumsum(tokens["lengths"])[:-1])


class Windows(Dataset):
    """Windows of a row of tokens; an item is its inputs and its labels, each (T,) int64.

    Args:
        ids: (n,) token ids.
        length: T, inputs of a window.
        most: Windows to keep at most, spread evenly over the row; None keeps all.
    """

    def __init__(self, ids: np.ndarray, length: int, most: int | None = None) -> None:
        self._ids, self._length = ids, length
        whole = max(0, (len(ids) - 1) // length)
        kept = whole if most is None else min(most, whole)
        self._places = (np.arange(kept) * whole) // max(1, kept)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        first = int(self._places[index]) * self._length
        window = torch.from_numpy(self._ids[first : first + self._length + 1].astype(np.int64))
        return window[:-1], window[1:]


def collate_windows(items: Sequence[tuple[Tensor, Tensor]]) -> Batch:
    """Windows as ``({"input_ids": (N, T)}, labels (N, T))``: a label is the token that follows."""
    inputs, labels = zip(*items, strict=True)
    return {"input_ids": torch.stack(inputs)}, torch.stack(labels)


def split_documents(documents: Sequence[np.ndarray], parts: Sequence[float], seed: int) -> list[np.ndarray]:
    """Documents in a random order, as rows of tokens that hold about such shares of them; a single one is cut.

    Args:
        documents: Token ids of each.
        parts: Shares of the rows, which sum to 1; what they leave over goes to the first.
        seed: Decides the order.
    """
    if len(documents) < 2 * len(parts):  # too few to share out: cut where the tokens are
        row = np.concatenate(documents)
        bounds = np.round(np.cumsum(parts)[:-1] * len(row)).astype(int)
        return np.split(row, bounds)
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
    counts = [max(1, int(share * len(documents))) for share in parts[1:]]
    ends = np.cumsum([len(documents) - sum(counts), *counts])[:-1]
    return [np.concatenate([documents[i] for i in rows]) for rows in np.split(np.array(order), ends)]
