"""GLUE: the official files with their traps, the metrics, pairs, epochs with patience, and whole small runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.glue_tables import MRPC_HEADER, OFFICIAL, write, write_official
from tests.support.tasks import glue_task
from unifmoe_dist.data.encoders import TINY, Encoder
from unifmoe_dist.data.glue_files import FORMATS, check_layout, read_glue
from unifmoe_dist.data.language import Examples
from unifmoe_dist.errors import UserError


def read(name: str, root: Path) -> tuple[list[tuple], list[tuple]]:
    train, validation = read_glue(name, root)
    assert check_layout(name, root)  # the quick look agrees

    def rows(part: Examples) -> list[tuple]:
        return [(*texts, label) for texts, label in zip(part.texts, part.labels, strict=True)]

    return rows(train), rows(validation)


@pytest.mark.parametrize("name", OFFICIAL)
def test_official_files_are_read_to_the_letter(name, tmp_path):
    write_official(tmp_path)
    assert read(name, tmp_path) == OFFICIAL[name]  # from the parent
    assert read(name, tmp_path / FORMATS[name].folder) == OFFICIAL[name]  # from the task's own folder


def test_mrpc_from_microsofts_files(tmp_path):
    rows = [f'{i % 2}\t{i}\t{i + 100}\tfirst {i}\tsecond "{i}' for i in range(5)]
    write(tmp_path / "msr_paraphrase_train.txt", MRPC_HEADER, *rows, end="\r\n", start="\ufeff")
    write(tmp_path / "msr_paraphrase_test.txt", MRPC_HEADER, "1\t8\t9\tx\ty", end="\r\n", start="\ufeff")
    every = [(f"first {i}", f'second "{i}', i % 2) for i in range(5)]
    with pytest.warns(UserWarning, match="do not compare with GLUE"):
        assert read("mrpc", tmp_path) == (every, [("x", "y", 1)])
    write(tmp_path / "dev_ids.tsv", "1\t101", "4\t104", "3\t102")  # the last is no pair of the file
    assert read("mrpc", tmp_path) == ([every[0], every[2], every[3]], [every[1], every[4]])


def test_folders_as_the_hub_stores_them(tmp_path):
    from datasets import Dataset, DatasetDict

    names = {"train": 0, "validation_matched": 1, "validation_mismatched": 1}
    splits = {}
    for split, which in names.items():
        premise, hypothesis, label = zip(*OFFICIAL["mnli"][which], strict=True)
        splits[split] = Dataset.from_dict({"premise": premise, "hypothesis": hypothesis, "label": label, "idx": label})
    DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    assert read("mnli", tmp_path / "saved") == OFFICIAL["mnli"]
    (tmp_path / "hub/mnli").mkdir(parents=True)
    for split, data in splits.items():
        data.to_parquet(str(tmp_path / f"hub/mnli/{split}-00000-of-00001.parquet"))
    assert read("mnli", tmp_path / "hub") == OFFICIAL["mnli"]
    with pytest.raises(UserError, match="no column 'question'.*QNLI"):
        DatasetDict({"train": splits["train"], "validation": splits["train"]}).save_to_disk(str(tmp_path / "qnli"))
        read_glue("qnli", tmp_path / "qnli")
    for look in (read_glue, check_layout):
        with pytest.raises(UserError, match="no split validation_matched"):
            look("mnli", tmp_path / "qnli")
    unlabelled = splits["train"].map(lambda row: {"label": -1})
    unlabelled.to_parquet(str(tmp_path / "hub/mnli/train-00000-of-00001.parquet"))
    with pytest.raises(UserError, match="the label -1"):
        read_glue("mnli", tmp_path / "hub")


@pytest.mark.parametrize(
    "name,file,lines,expected",
    [
        ("rte", "RTE/train.tsv", ["index\tsentence1\tsentence2\tlabel", "0\ta\tb"], r"train.tsv line 2 has 3 columns"),
        ("rte", "RTE/dev.tsv", ["index\tsentence1\tsentence2", "0\ta\tb"], "dev.tsv has no column 'label'"),
        ("rte", "RTE/dev.tsv", ["index\tsentence1\tsentence2\tlabel", "0\ta\tb\tyes"], "line 2 has the label 'yes'"),
        ("rte", "RTE/dev.tsv", ["index\tsentence1\tsentence2\tlabel"], "dev.tsv holds no examples"),
        ("cola", "CoLA/dev.tsv", ["index\tsentence", "0\ta"], "dev.tsv line 1 has 2 columns instead of 4"),
        ("cola", "CoLA/train.tsv", [], "train.tsv holds no examples"),
    ],
)
def test_bad_files_are_one_sentence(name, file, lines, expected, tmp_path):
    write_official(tmp_path)
    write(tmp_path / file, *lines)
    for look in (read_glue, check_layout):
        with pytest.raises(UserError, match=expected):
            look(name, tmp_path)


def test_missing_files_are_one_sentence(tmp_path):
    with pytest.raises(UserError, match="data.root .*nowhere is not a folder"):
        read_glue("rte", tmp_path / "nowhere")
    for look in (read_glue, check_layout):
        with pytest.raises(UserError, match="holds no MNLI data.*dev_matched.tsv"):
            look("mnli", tmp_path)
    write_official(tmp_path)
    with pytest.raises(UserError, match="no column 'question'.*not the official file of QNLI"):
        read_glue("qnli", tmp_path / "RTE")
    (tmp_path / "RTE/dev.tsv").write_bytes(b"index\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        read_glue("rte", tmp_path)


def test_without_a_network(tmp_path):
    """Tests run with HF_HUB_OFFLINE=1."""
    with pytest.raises(UserError, match=r"CoLA cannot be had from nyu-mll/glue .*data\.root"):
        glue_task("cola")
    write_official(tmp_path)
    with pytest.raises(UserError, match="tokenizer of bert-large-cased .*model.pretrained") as error:
        glue_task("cola", tmp_path)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="weights of bert-large-cased"):
        Encoder("bert-large-cased").classifier(2, 0.1)


def test_encoders_that_are_not_there(tmp_path):
    with pytest.raises(UserError, match="nowhere is not a folder"):
        Encoder("bert-large-cased", str(tmp_path / "nowhere")).tokenizer()
    with pytest.raises(UserError, match=f"the folder {tmp_path} cannot be had"):
        Encoder("bert-large-cased", str(tmp_path)).classifier(2, 0.1)
    with pytest.raises(UserError, match="tiny-bert has no pretrained weights"):
        Encoder(TINY).tokenizer()
