"""The task of next tokens: its splits by domain, its perplexity, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.ranks import run_ranks
from tests.support.tiny_decoders import write_decoder, write_texts
from unifmoe_dist.config import DataConfig, ModelConfig, TrainConfig
from unifmoe_dist.data import token_loss
from unifmoe_dist.data.metrics import PERPLEXITY, metric_named
from unifmoe_dist.data.registry import find_task
from unifmoe_dist.data.token_loss import cross_entropy, token_losses
from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime.ranks import Ranks
from unifmoe_dist.studies.memory.fake_step import estimate, task_of_sizes
from unifmoe_dist.train.evaluate import evaluate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("corpus")
    write_texts(place / "texts")
    write_decoder(place / "model")
    return place


def make_config(folder, **data) -> TrainConfig:
    given = {"root": str(folder / "texts"), "held_out": "blue", "sequence_length": 16, **data}
    return TrainConfig(
        data=DataConfig(task="corpus", **given), model=ModelConfig(moe="none", backbone=str(folder / "model"))
    )


def read(folder, **data):
    config = make_config(folder, **data)
    return find_task("corpus").read(config)


def text_of(folder, task, part) -> str:
    tokenizer = find_task("corpus").tokenizer(make_config(folder))
    return tokenizer.decode([token for data in part for window in data for token in window[0].tolist()])


# -- splits -----------------------------------------------------------------------------------------------------------


def test_a_domain_is_held_out_and_of_the_others_a_part_validates(folder):
    task = read(folder)
    assert task.domains == {"validation": ("green", "red"), "test": ("blue",)}
    assert (len(task.train), len(task.validation), len(task.test)) == (1, 2, 1)
    shown = {name: text_of(folder, task, getattr(task, name)) for name in ("train", "validation", "test")}
    for domain in ("red", "green"):
        texts = [path.read_text() for path in sorted((folder / "texts" / domain).iterdir())]
        inside = {name: [text[:40] in found for text in texts] for name, found in shown.items()}
        assert sum(inside["train"]) >= 10 and sum(inside["validation"]) == 1 and not any(inside["test"])
        assert not any(a and b for a, b in zip(inside["train"], inside["validation"], strict=True))
    assert read(folder, held_out="Red").domains["test"] == ("red",)


def test_nothing_held_out_tests_a_part_of_every_domain(folder):
    task = read(folder, held_out="none", eval_windows=3)
    assert task.domains == {"validation": ("blue", "green", "red"), "test": ("blue", "green", "red")}
    assert [len(data) for data in (*task.validation, *task.test)] == [3] * 6
    seeds = [text_of(folder, read(folder, held_out="none", split_seed=seed), task.test) for seed in (0, 0)]
    assert seeds[0] == seeds[1]


@pytest.mark.parametrize(
    "data,expected",
    [
        ({"held_out": "rot75"}, "is no environment of the texts; give --data.held_out one of blue, green, red"),
        ({"sequence_length": 65}, "sequence_length 65 is more than the 64 positions"),
        ({"root": "red"}, "have one domain, a, so none can be held out; set data.held_out none"),
        ({"root": "red", "held_out": "none"}, r"the validation texts of a have \d tokens, too few for a window"),
    ],
)
def test_data_that_are_refused(folder, tmp_path, data, expected):
    if "root" in data:
        (tmp_path / "a.txt").write_text("The number is here and it is long enough.")
        data = {**data, "root": str(tmp_path)}
    with pytest.raises(UserError, match=expected):
        read(folder, **data)


def test_genres_are_four_of_a_corpus_each_held_out_in_turn(folder, tmp_path):
    task = find_task("genres")
    write_texts(tmp_path, (*task.environments, "mystery"), documents=4)

    def config(root, held_out="learned"):
        found = make_config(folder, root=str(root), held_out=held_out)
        return replace(found, data=replace(found.data, task="genres"))

    for held_out in task.environments:
        found = task.read(config(tmp_path, held_out))
        seen = tuple(name for name in task.environments if name != held_out)
        assert found.name == "genres" and found.domains["test"] == (held_out,)
        assert sorted(found.domains["validation"]) == sorted(seen)
    with pytest.raises(
        UserError, match="'mystery' is no environment of the texts; give --data.held_out one of news, rel"
    ):
        task.held_out(config(tmp_path, "mystery"))
    with pytest.raises(UserError, match="has no genre learned of Brown; leave it out, .* or set data.task corpus"):
        task.read(config(folder / "texts"))


def test_a_tokenizer_of_another_model(folder, tmp_path):
    write_decoder(tmp_path / "model", vocab_size=50)
    (tmp_path / "texts").symlink_to(folder / "texts")
    with pytest.raises(UserError, match="the tokenizer gives token .* embeddings for 50"):
        read(tmp_path)


def test_estimates_see_a_label_for_every_token(folder):
    config = make_config(folder)
    inputs, labels = task_of_sizes(config).collate([0, 1, 2])
    assert inputs["input_ids"].shape == labels.shape == (3, 16) and inputs.keys() == {"input_ids"}
    weights = sum(parameter.numel() for parameter in task_of_sizes(config).build_model().parameters())
    found = estimate(config, gpu=False)
    assert 0 <= found.device["weights"] - 4 * weights < 100  # rotary frequencies; the tied head is no second tensor
    assert found.parameters == weights


# -- loss and perplexity ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_in_chunks_are_those_of_all_at_once(dtype, monkeypatch):
    logits = torch.randn(3, 7, 11, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 11, (3, 7))
    whole = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
    (wanted,) = torch.autograd.grad(whole, logits)
    monkeypatch.setattr(token_loss, "_AT_ONCE", 44)  # four rows
    loss = cross_entropy(logits, labels)
    (found,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(found, wanted)
    assert token_losses(logits, labels).shape == labels.shape and loss.dtype == torch.float32


def test_perplexity_by_hand():
    rows = np.array([[math.log(4) * 2, math.log(2)], [2.0, 1.0], [1.0, 1.0]])
    assert PERPLEXITY.compute(*rows) == pytest.approx(32 ** (1 / 3))
    assert PERPLEXITY.overall([rows[:, :1], rows[:, 1:]]) == PERPLEXITY.compute(*rows)
    assert PERPLEXITY.accuracy(*rows) == pytest.approx(2 / 3)
    assert PERPLEXITY.compute(np.array([5000.0]), np.array([1.0]), np.array([0.0])) == math.inf
    assert PERPLEXITY.better(3.0, 4.0) and not PERPLEXITY.better(4.0, 4.0)
    assert metric_named("perplexity") is PERPLEXITY and PERPLEXITY.shown(12.345) == "12.35"
    assert metric_named("accuracy").shown(0.912) == metric_named("of a task's own").shown(0.912) == "91.2 %"


def scores(rank, world, folder, batch_size):
    """Perplexity by domain over these ranks."""
    from pathlib import Path

    task = read(Path(folder))
    torch.manual_seed(1)
    found = evaluate(task.build_model(), task, task.validation, batch_size, Ranks(rank, world, torch.device("cpu")))
    return found.value, found.per_dataset, found.accuracy


def test_perplexity_is_the_same_on_any_ranks_and_batches(folder):
    value, domains, accuracy = scores(0, 1, folder, 5)
    assert 200 < value < 400 and min(domains) <= value <= max(domains)  # about the vocabulary: nothing is learned
    others = [scores(0, 1, folder, 64), *run_ranks(2, scores, str(folder), 3)]
    assert others[1] == others[2]
    for other in others:
        assert other[0] == pytest.approx(value, rel=1e-6) and other[1] == pytest.approx(domains, rel=1e-6)
        assert other[2] == pytest.approx(accuracy, abs=1e-9)
