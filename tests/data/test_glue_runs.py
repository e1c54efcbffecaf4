"""Whole runs on GLUE's official layouts, and the shipped configurations."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from tests.support.glue_tables import OFFICIAL, write, write_rte
from tests.support.jobs import ROOT, draw, run_job
from unifmoe_dist.data.encoders import TINY
from unifmoe_dist.studies.report.compare import comparison_table
from unifmoe_dist.train import build, checkpoint
from unifmoe_dist.train.cli import load_train_config, parse_train_config
from unifmoe_dist.train.export import export

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
    job = run_job(tmp_path, 2, words(tmp_path, run, "cola", *more), draw, timeout=120)
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
