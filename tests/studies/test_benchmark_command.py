"""launch/benchmark.py: what it writes, what it leaves as it was, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.support.benchmarks import CPU, SMALL
from tests.support.jobs import ROOT, run_job
from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.benchmark import benchmark_results as results_of
from unifmoe_dist.studies.benchmark import decoding, side_by_side
from unifmoe_dist.studies.benchmark import layers_and_models as benchmark
from unifmoe_dist.studies.benchmark.peers import PEERS


@pytest.fixture
def command():
    """launch/benchmark.py as a module."""
    spec = importlib.util.spec_from_file_location("launch_benchmark", ROOT / "launch/benchmark.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_kind_of_benchmark_leaves_the_results_of_others(command, tmp_path, monkeypatch):
    """In-process, with timings that take no time: files of layers, whole models and number formats stay apart."""
    timed = [benchmark.run_layer(replace(SMALL, tokens=8), CPU, torch.float32, 0.0, lambda: None, 1e9, brief=True)]
    monkeypatch.setattr(benchmark, "run_layer", lambda *args, **more: timed[0])
    monkeypatch.setattr(benchmark, "run_model", lambda *args, **more: timed[0])
    monkeypatch.setattr(side_by_side, "matmul_rate", lambda *args: 1e9)
    monkeypatch.setattr(results_of, "plot", lambda results, where, path: path.write_text("picture"))
    kept = {}
    for words in (["--shapes", "vision"], ["--models", "deit-s"], ["--shapes", "vision", "--dtype", "bf16"]):
        command.main([*words, "--output", str(tmp_path)])
        assert all((tmp_path / name).stat().st_mtime_ns == time for name, time in kept.items())
        kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    stems = ("benchmark", "models", "benchmark-bf16")
    assert kept.keys() == {f"{stem}.{suffix}" for stem in stems for suffix in ("md", "json", "png")}
    assert json.loads((tmp_path / "models.json").read_text()).keys() >= {"where", "models"}


def test_command_line(tmp_path):
    words = ["--tokens", "32", "--seconds", "0.1", "--shapes", "vision", "--threads", "1", "--output", str(tmp_path)]
    job = run_job(tmp_path, 1, words, timeout=200, script="benchmark")
    assert job.statuses == [0], job.output
    (result,) = json.loads((tmp_path / "benchmark.json").read_text())["layers"]
    rounds = {len(t[kind]) for t in result["timings"] for kind in ("forward", "training")}
    assert len(rounds) == 1 and rounds.pop() >= 3  # interleaved: all have as many
    listed = {t["contender"] for t in result["timings"]} | result["skipped"].keys()
    assert {f"{peer} top-{k}" for peer in PEERS for k in (1, 2)} <= listed  # none is missing without a word
    text = (tmp_path / "benchmark.md").read_text()
    assert "| UniF-MoE |" in text and "UniF-MoE keeps" in text
    assert all(name in text for name in listed)
    assert (tmp_path / "benchmark.png").stat().st_size > 10_000


def test_few_tokens(command, tmp_path, monkeypatch):
    """Each row is of the layer that it names; the folder's other results stay."""
    monkeypatch.setattr(decoding, "DIM", 24)
    monkeypatch.setattr(decoding, "HIDDEN", 48)
    monkeypatch.setattr(decoding, "TOKENS", (1, 3))
    (tmp_path / "benchmark.md").write_text("kept")
    command.main(["--decoding", "--seconds", "0.01", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "decoding.json").read_text())["rows"]
    assert [(row["ffn"], row["tokens"]) for row in rows] == [("plain", 1), ("plain", 3), ("gated", 1), ("gated", 3)]
    for row in rows:
        assert 1 - 1 / 8 <= row["work"] <= 6 and all(value > 0 for value in list(row.values())[2:])
    text = (tmp_path / "decoding.md").read_text()
    assert "d=24, H=48" in text and len([line for line in text.splitlines() if line.startswith("| ")]) == 6
    assert (tmp_path / "benchmark.md").read_text() == "kept" and not (tmp_path / "benchmark.json").exists()


def test_compiled_beside_eager(command, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setitem(benchmark.PAPER, "vision", replace(SMALL, tokens=8))
    monkeypatch.setitem(benchmark.CPU_TOKENS, "vision", 8)
    words = ["--compile", "--shapes", "vision", "--seconds", "0.01", "--threads", "1", "--output", str(tmp_path)]
    command.main(words)
    (result,) = json.loads((tmp_path / "benchmark-compile.json").read_text())["layers"]
    names = [timing["contender"] for timing in result["timings"]]
    assert names == ["dense FFN", "dense FFN, compiled", "UniF-MoE", "UniF-MoE, compiled"] and not result["skipped"]
    with pytest.raises(UserError, match="--compile belongs to --shapes and --models, and neither is given"):
        command.parse(["--compile", "--sweep"])


def test_names_given_twice_count_twice(command):
    options = command.parse("--shapes vision --models --models deit-s --shapes language --models bert-large".split())
    assert options.shapes == ["vision", "language"] and options.models == ["deit-s", "bert-large"]
    assert command.parse([]).shapes is None and command.parse(["--models"]).models == []


def test_gated_layers_have_files_of_their_own(command, tmp_path, monkeypatch):
    shapes = []
    timed = benchmark.run_layer(replace(SMALL, tokens=8), CPU, torch.float32, 0.0, lambda: None, 1e9, brief=True)
    monkeypatch.setattr(benchmark, "run_layer", lambda shape, *args, **more: shapes.append(shape) or timed)
    monkeypatch.setattr(side_by_side, "matmul_rate", lambda *args: 1e9)
    command.main(["--gated", "--shapes", "vision", "--output", str(tmp_path)])
    assert [shape.gated for shape in shapes] == [True] and (tmp_path / "benchmark-gated.md").is_file()
    with pytest.raises(UserError, match="--gated belongs to --shapes and --sweep"):
        command.parse(["--gated", "--models"])


@pytest.mark.parametrize("option", ["--tokens", "--batch", "--seconds", "--threads"])
def test_command_line_refuses(option, command):
    with pytest.raises(UserError, match=f"{option} must be above 0 and finite, not 0"):
        command.parse([option, "0"])
    assert set(command.SHAPES) == benchmark.PAPER.keys() and set(command.MODELS) == benchmark.MODELS.keys()


def test_times_and_folders_that_cannot_be(tmp_path, command):
    for value in ("nan", "inf"):
        with pytest.raises(UserError, match=f"--seconds must be above 0 and finite, not {value}"):
            command.parse(["--seconds", value])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output .*file cannot be used"):
        command.main(["--shapes", "vision", "--output", str(tmp_path / "file")])
