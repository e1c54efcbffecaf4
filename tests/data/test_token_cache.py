"""Tokens on disk: made once whoever comes first, the same as without, and never trusted blindly."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from unifmoe_dist.data import token_cache
from unifmoe_dist.data.encoders import TINY, Encoder
from unifmoe_dist.data.text import EncodedTexts

TEXTS, PAIRS = ["ab", "a longer text", 'say "so', ""], ["c", "d e", "", "f"]


class Counting:
    """A tokenizer that counts its calls."""

    def __init__(self) -> None:
        self.own, self.calls = Encoder(TINY, "none").tokenizer(), 0

    def __call__(self, *args, **options):
        self.calls += 1
        return self.own(*args, **options)

    @property
    def backend_tokenizer(self):
        return self.own.backend_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(token_cache, "FEWEST", 4)
    return tmp_path / "unifmoe_dist/tokens"


def items(tokenizer, texts=TEXTS, pairs=PAIRS) -> list:
    data = EncodedTexts(texts, [0] * len(texts), tokenizer, pairs)
    return [data[index] for index in range(len(data))]


def test_the_second_start_reads_what_the_first_wrote(cache, monkeypatch):
    first, second = Counting(), Counting()
    written = items(first)
    assert items(second) == written and (first.calls, second.calls) == (1, 0)
    assert [path.suffix for path in sorted(cache.iterdir())] == [".lock", ".safetensors"]
    monkeypatch.setattr(token_cache, "FEWEST", 5)
    plain = Counting()
    assert items(plain) == written and plain.calls == 1


@pytest.mark.parametrize(
    "texts,pairs", [(TEXTS[::-1], PAIRS), (TEXTS, PAIRS[::-1]), (TEXTS, None), (["a", "b", "ab", ""], None)]
)
def test_other_texts_are_others(texts, pairs):
    items(Counting())
    other = Counting()
    items(other, texts, pairs)
    assert other.calls == 1


def test_other_rules_are_others():
    items(Counting())
    other = Counting()
    other.own.backend_tokenizer.normalizer = None
    items(other)
    assert other.calls == 1


def test_ranks_that_come_together_share_the_work():
    tokenizers, found = [Counting() for _ in range(4)], {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: items(tokenizers[i])})) for i in range(len(tokenizers))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(tokenizer.calls for tokenizer in tokenizers) == 1
    assert all(found[i] == found[0] for i in range(4))


@pytest.mark.parametrize("how", ["cut", "other", "lengths", "pickle"])
def test_a_damaged_file_is_made_anew(how, cache):
    written = items(Counting())
    (path,) = cache.glob("*.safetensors")
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-3])
    elif how == "pickle":
        path.write_bytes(b"\x80\x04N.")
    else:
        tokens = token_cache.load_file(path)
        changed = {"lengths": tokens["lengths"] + 1} if how == "lengths" else {"ids": tokens["ids"].astype(np.int64)}
        token_cache.save_file({**tokens, **changed}, path)
    again = Counting()
    assert items(again) == written and again.calls == 1


def test_without_a_place_to_write(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    tokenizer = Counting()
    assert len(items(tokenizer)) == 4 and tokenizer.calls == 1


def test_a_tokenizer_that_does_not_tell_its_rules(cache):
    own = Encoder(TINY, "none").tokenizer()
    assert len(items(lambda *args, **options: own(*args, **options))) == 4
    assert not os.path.exists(cache)


def test_a_user_without_a_home_goes_without(monkeypatch):
    def nowhere() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(token_cache.Path, "home", nowhere)
    assert items(Counting())
