"""DomainBed's settings, and whole runs on a tiny PACS."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.jobs import ROOT, run_job
from tests.support.tasks import domainbed_task
from tests.support.tiny_images import TINY
from unifmoe_dist.data.benchmarks import BENCHMARKS
from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.run_report import load_run
from unifmoe_dist.train.cli import load_train_config, parse_train_config
from unifmoe_dist.train.export import export, load_exported
from unifmoe_dist.train.folder import choose_folder

pytestmark = pytest.mark.filterwarnings("ignore:.*results cannot be compared")

# -- configurations -----------------------------------------------------------------------------------------------

PAPER = {
    "pacs": (3e-5, 1e-6, 5001),
    "vlcs": (3e-5, 1e-6, 5001),
    "officehome": (1e-5, 1e-6, 5001),
    "terraincognita": (5e-5, 1e-4, 5001),
    "domainnet": (5e-5, 0.0, 15001),
}


@pytest.mark.parametrize("name", PAPER)
def test_configurations_hold_the_papers_settings(name):
    held_out = BENCHMARKS[name].environments[-1].name
    words = ["--config", str(ROOT / f"configs/domainbed/{name}.yaml"), "--data.held_out", held_out]
    config = parse_train_config(words)
    config.validate(4)
    model, data, optim = config.model, config.data, config.optim
    assert (data.task, data.held_out, data.batch_size, data.eval_batch_size) == (name, held_out, 32, 64)
    assert (optim.name, optim.lr, optim.weight_decay, config.steps) == ("adam", *PAPER[name])
    assert (optim.schedule, optim.warmup_steps, optim.grad_clip, optim.lambda_div) == ("constant", 0, 0.0, 0.01)
    assert (model.backbone, model.layers) == ("deit_small_patch16_224", [8, 10])
    assert (model.moe, model.num_experts, model.num_blocks) == ("unif", 6, 8)
    assert (model.hidden_dropout, model.dropout, model.drop_path) == (0.1, 0.0, 0.1)
    assert (data.image_size, data.split_seed, data.sampling, optim.decay) == (224, None, "replacement", "all")
    assert config.eval_every == (500 if name == "domainnet" else 300)


@pytest.mark.parametrize(
    "name,value",
    [
        ("data.workers", "-1"),
        ("data.image_size", "0"),
        ("model.dropout", "1"),
        ("model.drop_path", "-0.1"),
        ("model.hidden_dropout", "1"),
        ("model.hidden_dropout", "-0.1"),
    ],
)
def test_values_out_of_range_are_refused(name, value):
    with pytest.raises(UserError, match=name):
        parse_train_config([f"--{name}", value]).validate(1)


# -- a whole run --------------------------------------------------------------------------------------------------

RUN = [
    "--config",
    str(ROOT / "configs/domainbed/pacs.yaml"),
    "--data.held_out",
    "sketch",
    "--data.image_size",
    "32",
    "--model.backbone",
    TINY,
    "--model.pretrained",
    "none",
    "--model.layers",
    "[9,11]",
    "--data.batch_size",
    "4",
    "--optim.lr",
    "1e-3",
    "--log_every",
    "1",
    "--eval_every",
    "4",
    "--progress",
    "false",
]


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(pacs, tmp_path_factory) -> Path:
    """A run of 9 steps on one rank, without workers."""
    folder = tmp_path_factory.mktemp("whole")
    words = [*RUN, "--data.root", str(pacs), "--data.workers", "0", "--output", str(folder / "run"), "--steps", "9"]
    job = run_job(folder, 1, words, timeout=120)
    assert job.statuses == [0], job.output
    assert "UniF-MoE on pacs (Sketch held out): test accuracy " in job.output  # its end is for people
    assert f"python launch/analyze.py {folder / 'run'}" in job.output and '"score"' not in job.output
    return folder / "run"


def test_a_run_selects_by_out_splits_and_reports_the_held_out_in_split(whole, tmp_path):
    summary = json.loads((whole / "summary.json").read_text())
    checks = {line["step"]: line for line in metrics(whole) if line["kind"] == "validation"}
    assert list(checks) == [4, 8, 9]  # every 4 steps, and the last
    for line in checks.values():
        assert len(line["per_environment"]) == 3
        assert line["accuracy"] == pytest.approx(sum(line["per_environment"]) / 3)
    best = max(checks, key=lambda step: checks[step]["accuracy"])  # the first of equals
    assert (summary["best_step"], summary["validation_accuracy"]) == (best, checks[best]["accuracy"])
    assert (summary["task"], summary["held_out"], summary["steps"]) == ("pacs", "Sketch", 9)
    # By hand: the best checkpoint on the 34 images of Sketch's in-split.
    config = load_train_config(str(whole / "config.yaml"))
    model = load_exported(export(whole, tmp_path / "exported"))
    (test,) = domainbed_task("pacs", 3, config.data.root, 0, image_size=32).test
    with torch.no_grad():
        hits = [int(model(test[i][0][None]).argmax() == test[i][1]) for i in range(len(test))]
    assert len(hits) == 34 and summary["test_accuracy"] == pytest.approx(sum(hits) / 34)


def test_a_run_is_scored_with_data_elsewhere(whole, pacs, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(whole, moved)
    text = (moved / "config.yaml").read_text().replace(str(pacs), "/nowhere")
    (moved / "config.yaml").write_text(text.replace("pretrained: none", "pretrained: /no.pth"))
    assert "/nowhere" in (moved / "config.yaml").read_text()
    blind = run_job(tmp_path, 1, [str(moved)], script="evaluate", timeout=120)
    assert blind.statuses == [2] and "error: data.root" in blind.output and "/nowhere" in blind.output
    job = run_job(tmp_path, 1, [str(moved), "--data-root", str(pacs)], script="evaluate", timeout=120)
    assert job.statuses == [0], job.output
    found = json.loads(job.output[job.output.index("{") : job.output.rindex("}") + 1])
    assert found["accuracy"] == json.loads((whole / "summary.json").read_text())["test_accuracy"]
    loaded = load_run(moved, data_root=pacs)  # what analysis reads
    assert len(loaded.task.test[0]) == 34


def test_a_run_with_workers_that_is_resumed_equals_the_whole_run(whole, pacs, tmp_path):
    """To the last bit, dropout and augmentation included; the second part reads without workers."""
    words = [*RUN, "--data.root", str(pacs), "--output", str(tmp_path / "run")]
    for more in (["--steps", "4", "--data.workers", "2"], ["--steps", "9", "--data.workers", "0", "--resume"]):
        job = run_job(tmp_path, 1, [*words, *more], timeout=200)
        assert job.statuses == [0], job.output
    assert metrics(tmp_path / "run") == metrics(whole)
    kept = ("test_accuracy", "validation_accuracy", "best_step", "mean_block_compute")
    ours, theirs = (json.loads((run / "summary.json").read_text()) for run in (tmp_path / "run", whole))
    assert [ours[name] for name in kept] == [theirs[name] for name in kept]


def test_resuming_knows_an_environment_by_any_name(whole):
    words = ["--resume", "--output", str(whole)]
    for same in ("Sketch", "3"):
        assert choose_folder(parse_train_config([*words, "--data.held_out", same])) == whole
    for name, value in (("data.held_out", "photo"), ("data.task", "vlcs")):
        with pytest.raises(UserError, match=f"was trained with {name}"):
            choose_folder(parse_train_config([*words, f"--{name}", value]))


def test_a_run_without_data_says_how_to_get_it(tmp_path):
    words = [*RUN, "--data.root", str(tmp_path / "none"), "--output", str(tmp_path / "run")]
    job = run_job(tmp_path, 1, words)
    assert job.statuses == [2] and "error: data.root" in job.output and "launch/data.py prepare pacs" in job.output
    assert "Traceback" not in job.output
