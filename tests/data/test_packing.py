"""Packed windows: nothing is lost, repeated or padded, and tokens are kept for the next start."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.tiny_decoders import tiny_tokenizer
from unifmoe_dist.data import packing
from unifmoe_dist.data.packing import Windows, collate_windows, split_documents, tokenise_documents


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def test_documents_are_joined_with_the_end_token(tokenizer):
    texts = ["The cat is here.", "A dog", "", "Naïve “quotes”\n\nand lines."]
    documents = tokenise_documents(tokenizer, texts)
    assert [tokenizer.decode(row[:-1]) for row in documents] == texts
    assert [row[-1] for row in documents] == [tokenizer.eos_token_id] * 4


@pytest.mark.parametrize("tokens,length", [(41, 4), (44, 4), (45, 4), (5, 4), (4, 4), (17, 16)])
def test_every_token_but_the_first_is_predicted_once(tokens, length):
    row = np.arange(100, 100 + tokens, dtype=np.int32)
    windows = Windows(row, length)
    assert len(windows) == (tokens - 1) // length
    inputs = [token for index in range(len(windows)) for token in windows[index][0].tolist()]
    labels = [token for index in range(len(windows)) for token in windows[index][1].tolist()]
    assert inputs == row[: len(inputs)].tolist() and labels == row[1 : len(labels) + 1].tolist()
    assert tokens - 1 - len(labels) < length


def test_some_windows_are_spread_evenly():
    windows = Windows(np.arange(101), 10, most=4)
    assert [int(windows[index][0][0]) for index in range(len(windows))] == [0, 20, 50, 70]
    assert len(Windows(np.arange(31), 10, most=4)) == 3
    inputs, labels = collate_windows([windows[1], windows[3]])
    assert inputs["input_ids"].tolist() == [[*range(20, 30)], [*range(70, 80)]]
    assert labels.tolist() == [[*range(21, 31)], [*range(71, 81)]]


def test_documents_are_split_by_the_seed_and_one_alone_is_cut():
    documents = [np.full(number + 1, number) for number in range(20)]
    splits = {seed: split_documents(documents, (0.8, 0.1, 0.1), seed) for seed in (0, 1)}
    for train, validation, test in splits.values():
        kinds = [set(part.tolist()) for part in (train, validation, test)]
        assert [len(kind) for kind in kinds] == [16, 2, 2] and set.union(*kinds) == set(range(20))
    assert any(a.tolist() != b.tolist() for a, b in zip(*splits.values(), strict=True))
    parts = split_documents([np.arange(50)], (0.9, 0.1), 0)
    assert [part.tolist() for part in parts] == [[*range(45)], [*range(45, 50)]]


def test_tokens_are_kept_for_the_next_start(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(packing, "_LARGE", 10)
    texts, calls = ["The first text.", "Another one, longer."], []

    class Counting:
        backend_tokenizer, eos_token_id = tokenizer.backend_tokenizer, tokenizer.eos_token_id

        def __call__(self, *args, **options):
            calls.append(args)
            return tokenizer(*args, **options)

    first, second = (tokenise_documents(Counting(), texts) for _ in range(2))
    assert len(calls) == 1 and [row.tolist() for row in first] == [row.tolist() for row in second]
    tokenise_documents(Counting(), texts[::-1])
    assert len(calls) == 2
