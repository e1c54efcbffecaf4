"""Tokens on disk: a large set is tokenised once on a machine, not by every rank at every start.

One safetensors file per set in ~/.cache/unifmoe_dist/tokens (`XDG_CACHE_HOME`), named after everything that decides
what is in it. The rank that comes first writes it under a lock, and the others wait and read. Without a place to write
every rank tokenises for itself.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from unifmoe_dist.files import appearing, lock, user_cache

FEWEST = 50_000
"""Texts from which a file is worth it; fewer take a second or two."""

Tokens = dict[str, np.ndarray]
"""`ids` (T,) int32 and `types` (T,) uint8 of all texts in a row, and `lengths` (N,) int32 of each."""

_making = threading.Lock()  # between threads, which a file's lock does not tell apart


def fingerprint(tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, longest: int | None) -> str | None:
    """A name for the tokens of some texts; None for tokenizers that do not tell what they do.

    `longest` is None for documents, which are neither cut nor framed by special tokens.
    """
    if (core := getattr(tokenizer, "backend_tokenizer", None)) is None:
        return None
    rules = json.loads(core.to_str())
    for setting in ("truncation", "padding"):  # of the last call, not of the next
        rules.pop(setting, None)
    state = hashlib.sha256(json.dumps([rules, longest, tokenizers.__version__]).encode())
    for column in (texts, pairs or ()):
        state.update(f"{len(column)}\n".encode())
        for text in column:
            content = text.encode(errors="surrogatepass")
            state.update(f"{len(content)}\n".encode() + content)
    return state.hexdigest()


def remembered(name: str | None, texts: int, make: Callable[[], Tokens]) -> Tokens:
    """The tokens of that name, from `fingerprint`, from disk, or made and kept there; None keeps nothing."""
    if name is None:
        return make()
    try:
        path = user_cache("tokens") / f"{name}.safetensors"
    except RuntimeError:  # a user without a home
        return make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _making, path.with_suffix(".lock").open("a") as handle:
            lock(handle)
            if (found := _read(path, texts)) is not None:
                return found
            made = make()
            with appearing(path) as temporary:
                save_file(made, temporary)
            return made
    except (OSError, SafetensorError):  # no place, a full disk, no locks on this file system
        return make()


def _read(path: Path, texts: int) -> Tokens | None:
    """A file's tokens, or None if there is none or it is damaged."""
    with suppress(OSError, SafetensorError, KeyError, ValueError):
        found = load_file(path)
        kinds = [(found[name].dtype.name, found[name].ndim) for name in ("ids", "types", "lengths")]
        whole = found["lengths"].sum() == len(found["ids"]) == len(found["types"]) and len(found["lengths"]) == texts
        if whole and kinds == [("int32", 1), ("uint8", 1), ("int32", 1)]:
            return found
    return None
