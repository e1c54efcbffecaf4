"""Whole runs of a language model: perplexity by domain, resuming, any number of ranks, and what reads their folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.jobs import draw, run_job
from tests.support.tiny_decoders import write_decoder, write_texts
from unifmoe_dist.studies.report.compare import comparison_table
from unifmoe_dist.train.cli import load_train_config
from unifmoe_dist.train.export import export, load_exported
from unifmoe_dist.train.length import Selection
from unifmoe_dist.train.own_model import own_task


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language-model")
    write_texts(folder / "texts")
    write_decoder(folder / "model")
    return folder


def words(place: Path, output: Path, *more: str) -> list[str]:
    options = {
        "output": output,
        "steps": 8,
        "eval_every": 4,
        "log_every": 2,
        "progress": "false",
        "data.task": "corpus",
        "data.root": place / "texts",
        "data.held_out": "blue",
        "data.sequence_length": 16,
        "data.batch_size": 4,
        "data.eval_windows": 6,
        "model.backbone": place / "model",
        "model.moe": "none",
        "optim.lr": 0.003,
        "optim.warmup_steps": 2,
    }
    return [*(word for name, value in options.items() for word in (f"--{name}", str(value))), *more]


def records(run: Path, kind: str) -> list[dict]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in found if record["kind"] == kind]


@pytest.fixture(scope="module")
def run(place):
    job = run_job(place, 1, words(place, place / "run", "--eval_at_start"), draw)
    assert job.statuses == [0], job.output
    assert "corpus (blue held out): test perplexity" in job.output
    return place / "run"


def test_perplexity_is_recorded_before_and_after_by_domain(run):
    summary, validation = json.loads((run / "summary.json").read_text()), records(run, "validation")
    assert [record["step"] for record in validation] == [0, 4, 8] and summary["best_step"] == 8
    assert 250 < validation[0]["perplexity"] < 350  # nothing is learned of 300 tokens
    assert validation[2]["perplexity"] < validation[1]["perplexity"] < validation[0]["perplexity"]
    assert all(record["per_domain"].keys() == {"red", "green"} for record in validation)
    (before,) = records(run, "test")
    assert (before["step"], [*before["per_domain"]]) == (0, ["blue"])
    assert summary["metric"] == "perplexity" and summary["score"] < before["perplexity"]
    assert summary["score"] == summary["per_domain"]["blue"]
    assert summary["validation_score"] == validation[2]["perplexity"]
    assert all(record["tokens_per_second"] > 0 for record in records(run, "train"))
    assert (run / "plots/curves.png").is_file()


def test_a_lower_perplexity_is_better():
    selection = Selection.from_progress({"best_step": 0}, own_metric())
    offered = [selection.offer(step, score, 0.0) for step, score in enumerate([9.0, 7.0, 8.0, 7.0], 1)]
    assert offered == [True, True, False, False] and (selection.step, selection.waited) == (2, 2)
    again = Selection.from_progress(selection.progress(), own_metric())
    assert again == selection and again.offer(5, 6.0, 0.0)


def own_metric():
    from unifmoe_dist.data.registry import find_task

    return find_task("corpus").metric


def test_two_ranks_train_alike_and_a_resumed_run_ends_alike(place, run):
    first = run_job(place / "two", 2, words(place, place / "two/run", "--steps", "4"))
    assert first.statuses == [0, 0], first.output
    again = run_job(place / "two", 2, words(place, place / "two/run", "--steps", "8", "--resume"))
    assert again.statuses == [0, 0], again.output
    # The schedule of the first four steps was another one, so a whole run in two parts is what it is compared with.
    parts = place / "parts/run"
    for more in (["--steps", "4"], ["--steps", "8", "--resume"]):
        job = run_job(place / "parts", 1, words(place, parts, *more))
        assert job.statuses == [0], job.output
    ends = [json.loads((folder / "summary.json").read_text()) for folder in (place / "two/run", parts)]
    assert ends[0]["score"] == pytest.approx(ends[1]["score"], rel=1e-4)
    assert ends[0]["validation_score"] == pytest.approx(ends[1]["validation_score"], rel=1e-4)


def test_experts_over_two_ranks_give_the_perplexity_of_one(place):
    more = ("--model.moe", "unif", "--model.layers", "[0,1]", "--model.num_experts", "4", "--steps", "4")
    for world in (1, 2):
        output, size = place / f"experts-{world}/run", ("--parallel.expert_parallel_size", str(world))
        job = run_job(place / f"experts-{world}", world, words(place, output, *more, *size))
        assert job.statuses == [0] * world and "blocks per token and layer" in job.output, job.output
    one, two = (json.loads((place / f"experts-{world}/run/summary.json").read_text()) for world in (1, 2))
    assert one["score"] == pytest.approx(two["score"], rel=1e-3)
    assert one["mean_block_compute"] == pytest.approx(two["mean_block_compute"], rel=1e-2)
    assert {*records(place / "experts-2/run", "train")[0]["layers"]} == {"model.layers.0.mlp", "model.layers.1.mlp"}


def test_a_stopped_run_goes_on_exactly(place, run):
    job = run_job(place / "cut", 1, words(place, place / "cut/run", "--eval_at_start"), stop_after, 5)
    assert job.statuses == [0] and "saved at step 5" in job.output, job.output
    job = run_job(place / "cut", 1, words(place, place / "cut/run", "--resume"))
    assert job.statuses == [0], job.output
    whole, resumed = (json.loads((folder / "summary.json").read_text()) for folder in (run, place / "cut/run"))
    assert (whole["score"], whole["validation_score"]) == (resumed["score"], resumed["validation_score"])


def stop_after(rank: int, step: int) -> None:
    """A stop signal reaches the run after some steps."""
    import os
    import signal

    from unifmoe_dist.train.trainer import Trainer

    train_step = Trainer.train_step

    def stopping(self):
        if self.step + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(self)

    Trainer.train_step = stopping


def test_what_reads_the_folder(place, run, tmp_path):
    job = run_job(tmp_path, 1, [str(run), "--split", "validation"], script="evaluate")
    assert job.statuses == [0], job.output
    found = json.loads(job.output[job.output.index("{") : job.output.rindex("}") + 1])
    assert found["score"] == pytest.approx(records(run, "validation")[-1]["perplexity"], rel=1e-6)
    task = own_task(run, load_train_config(str(run / "config.yaml")))
    model = load_exported(export(run, tmp_path / "folder"))
    inputs, _ = task.collate([task.test[0][0]])
    assert model(**inputs).logits.shape == (1, 16, 300)
    assert (tmp_path / "folder/tokenizer.json").is_file()
    table = comparison_table([run, run])
    assert "test perplexity | validation perplexity" in table and "%" not in table
    job = run_job(tmp_path, 1, [*words(place, tmp_path / "none"), "--estimate"])
    assert job.statuses == [0] and "longest length, 16 tokens" in job.output, job.output


def test_another_algorithm_is_refused(place, tmp_path):
    job = run_job(tmp_path, 1, words(place, tmp_path / "run", "--algorithm.name", "lfme"))
    assert job.statuses == [2] and "needs at least two training environments" in job.output
