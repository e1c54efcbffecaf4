"""launch/analyze.py on real runs of a few steps: the page is whole, says what the numbers say, and quotes safely."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from launch import analyze, scale
from tests.support.jobs import draw, run_job
from tests.support.run_reports import (
    WORDS,
    check_page,
    make,
    no_figure_files,  # noqa: F401  the fixture empty_files
)
from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.registry import METHODS
from unifmoe_dist.runtime import heartbeat
from unifmoe_dist.studies.run_report import load_run, run_page, run_study
from unifmoe_dist.studies.run_report import method_costs as costs_module
from unifmoe_dist.studies.run_report.sample import draw_sample
from unifmoe_dist.studies.scaling.recorded_routing import read_routing
from unifmoe_dist.train.batches import TrainBatches

HOSTILE = "<b>x 'y' \"z\"; $(touch named) $\\frac$\n{0} %d"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Runs of two steps: unif (in a folder with a hostile name), top2, text."""
    folder = tmp_path_factory.mktemp("runs")
    apart = ["--optim.lr", "0.003", "--optim.warmup_steps", "0"]  # so that pairs of experts differ after two steps
    wanted = {HOSTILE: [], "top2": ["--model.moe", "topk", "--model.top_k", "2", *apart]}
    for name, more in wanted.items():
        job = run_job(folder / "logs", 1, [*WORDS, *more, "--output", str(folder / name)], draw, timeout=200)
        assert job.statuses == [0], job.output
    return folder


FEW = ("--router-steps", "3")


def test_unif_run_in_a_folder_with_a_hostile_name(runs, capsys):
    read, numbers, folder = make(runs / HOSTILE, "--tokens", "200")
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert not read.named("b") and f"UniF-MoE on digits: {HOSTILE}" in read.text
    (run,) = numbers["runs"]
    ((layer, usage),) = run["usage"].items()
    assert run["sample"] == {"items": 40, "tokens": {layer: 200}} and usage["tokens"] == 200
    (row,) = read.tables["usage"][1:]
    assert row[0] == layer
    assert [float(cell) for cell in row[1:]] == [
        usage["block_compute"]["mean"],
        usage["block_compute"]["quantiles"]["0.05"],
        usage["block_compute"]["quantiles"]["0.95"],
        usage["shared_demand"]["mean"],
        usage["shared_block_count"]["mean"],
        usage["expert_count"]["mean"],
        min(usage["expert_load"]),
        max(usage["expert_load"]),
        usage["mean_pair_coactivation"],
        usage["gram_distance"],
        usage["expert_distance"],
    ]
    with (folder / "tables/usage.csv").open() as handle:
        assert list(csv.reader(handle))[1] == row
    executed = run["executed"][layer]
    assert executed["block_compute"] == pytest.approx(usage["block_compute"]["mean"])
    assert executed["expert_load"] == pytest.approx(usage["expert_load"])
    keys = {float(values["value"]) for values in read.named("data")}
    summary = json.loads((runs / HOSTILE / "summary.json").read_text())
    assert run["summary"] == summary
    assert {summary["score"], summary["validation_score"], executed["block_compute"], run["costs"][0]["N_A"]} <= keys
    (cost,) = read.tables["cost"][1:]
    assert [float(cell) for cell in cost[1:]] == [run["costs"][0][name] for name in ("N", "N_A", "FLOPs")]
    assert {path.stem for path in (folder / "figures").glob("*.png")} == {
        "curves",
        "compute",
        "distributions",
        "loads",
        "coactivation",
        "router-gram",
        "patches-1",
        "element-usage-1",
    }
    elements = run["elements"]
    assert not elements["from_files"] and elements["names"] == {"0": "background", "1": "stroke"}
    assert sum(elements["layers"][layer]["patches"]) == 40 * 4 and "a pixel above 0.3 (of 1" in read.text
    for row, name, mean in zip(
        read.tables["elements-1"][1:], ("background", "stroke"), elements["layers"][layer]["compute"], strict=True
    ):
        assert row[0] == name and float(row[2]) == mean
    assert ["optim.warmup_steps", "2", "60"] in read.tables["options"]
    assert "--tokens 200" in read.text and "'" in read.text  # quoted for a shell


def test_the_three_observations_on_a_top_2_run(runs, monkeypatch):
    said = io.StringIO()
    monkeypatch.setattr(heartbeat, "SECONDS", 0.01)
    monkeypatch.setattr(heartbeat.sys, "stderr", said)
    with heartbeat.beating():
        read, numbers, folder = make(runs / "top2", *FEW, "--batches", "1", "--delta", "0.95")
    assert "] reading the data of digits" in said.getvalue() and "] writing the page" in said.getvalue()
    (run,) = numbers["runs"]
    ((layer, found),) = run["diagnoses"].items()
    assert run["sample"]["items"] == 64 and found["tokens"] == 64 * 5
    first, second, third = (read.tables[f"observation-{n}"] for n in (1, 2, 3))
    assert found["settings"]["delta"] == 0.95 and "no channel of any pair" not in read.text
    ratios, frequencies = found["shared_ratio"], found["coactivation_frequency"]
    assert [float(cell) for cell in first[1][5:]] == [min(ratios), max(ratios), min(frequencies), max(frequencies)]
    assert [row[0] for row in second[1:]] == [f"{layer}, residual", f"{layer}, control"]
    for row, name in zip(second[1:], ("rank_transition", "rank_transition_control"), strict=True):
        transition = found[name]
        assert [float(cell) for cell in row[1:]] == [
            transition["same_pair"],
            transition["chance_same_pair"],
            transition["diagonal"],
            transition["chance_diagonal"],
        ]
    assert [row[0] for row in third[1:]] == [f"{layer}, ε = {e}" for e in ("0.05", "0.1", "0.2")]
    seen = [mean for mean in found["demand"][0]["mean_demand"] if mean is not None]
    assert float(third[1][1]) == pytest.approx(sum(seen) / len(seen))
    assert float(third[1][2]) == found["demand"][0]["groups"]["low"]["mean_demand"]
    assert float(third[1][5]) == found["demand"][0]["groups"]["high"]["success_at_2"]
    load = read.tables["load"][1]
    assert [float(cell) for cell in load[3:]] == run["executed"][layer]["expert_load"] and float(load[1]) == 2
    assert {"alignment-1", "ranks-1", "demand-1"} <= {path.stem for path in (folder / "figures").glob("*.png")}
    assert "trained on the task for 3 steps" in read.text
    assert "compute" not in {path.stem for path in (folder / "figures").glob("*.png")}  # it is fixed
    assert not (runs / "top2/plots/compute.png").exists() and (runs / "top2/plots/usage.png").is_file()


@pytest.mark.slow
def test_a_top_2_run_whose_experts_share_nothing(runs, empty_files):
    """No two value rows that were trained apart have a cosine of 1: the page says what that means for the rest."""
    read, numbers, _ = make(runs / "top2", *FEW, "--batches", "1", "--delta", "1")
    (found,) = numbers["runs"][0]["diagnoses"].values()
    assert max(found["shared_ratio"]) == 0
    assert found["rank_transition"] == found["rank_transition_control"]  # there is nothing to extract
    assert "In layer 3 no channel of any pair is shared at 1." in read.text
    shared = re.search(r"at (0\.\d+) a tenth of all channels or more is shared", read.text)
    assert shared is not None and 0 < float(shared[1]) < 1
    _, numbers, _ = make(runs / "top2", *FEW, "--batches", "1", "--delta", shared[1])
    (found,) = numbers["runs"][0]["diagnoses"].values()
    assert sum(found["shared_ratio"]) / 6 >= 0.1
    assert read.tables["observation-3"][1][2:] == ["–"] * 7  # no low and high group, no correlation


@pytest.mark.parametrize("costly", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "cost"])
def test_two_runs_side_by_side_with_the_cost_of_every_method(costly, runs, tmp_path, empty_files, monkeypatch):
    monkeypatch.setattr(costs_module, "measure_cost", partial(costs_module.measure_cost, repeats=1, warmup=0))
    other = shutil.copytree(runs / HOSTILE, tmp_path / "without")
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("lambda_div: 0.01", "lambda_div: 0.0"))
    read, numbers, _ = make(runs / HOSTILE, "--compare", str(other), "--tokens", "100", *["--cost"] * costly)
    assert [run["name"] for run in numbers["runs"]] == [HOSTILE, "without"]
    change = numbers["comparison"]
    assert (change["from"], change["to"]) == ("without", HOSTILE)  # without the Gram loss first
    assert list(change["coactivation_change"].values()) == [0]  # the same weights
    assert read.tables["coactivation-change"][0][1:] == ["without (λ = 0)", f"{HOSTILE} (λ = 0.01)", "change"]
    assert read.tables["comparison"][0] == ["number", HOSTILE, "without"]
    costs = numbers["runs"][0]["costs"]
    if not costly:
        assert [cost["method"] for cost in costs] == ["unif"]
        return
    assert [cost["method"] for cost in costs] == [  # of 4 experts, and no combination of a layer with an algorithm
        name for name, row in METHODS.items() if name != "top8" and row.family != "combined"
    ]
    assert numbers["runs"][0]["costs_missing"] == {"Standard MoE, top-8": "there are 4 experts"}
    assert [cost["method"] for cost in costs if cost["trained"]] == ["unif"]
    by_method = {cost["method"]: cost for cost in costs}
    assert by_method["lfme"]["N"] == by_method["dense"]["N"]  # one model is deployed, six are trained
    assert by_method["lfme"]["T-RTM"] > 2 * by_method["dense"]["T-RTM"]
    assert by_method["dense"]["N"] < by_method["gmoe"]["N"] < by_method["unif"]["N"]
    assert all(cost[name] > 0 for cost in costs for name in ("T-TPS", "I-TPS", "T-RTM", "I-RTM"))
    rows = read.tables["cost"][1:]
    assert [float(row[1]) for row in rows[: len(costs)]] == [cost["N"] for cost in costs]
    assert "(34.19)" in read.text and "(8.57)" in read.text


def test_several_runs_together(runs, tmp_path, empty_files, monkeypatch):
    """Two runs with the observations, two with another weight of the Gram loss, and images of one class."""
    twin, other = (shutil.copytree(runs / name, tmp_path / new) for name, new in (("top2", "twin"), (HOSTILE, "other")))
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("lambda_div: 0.01", "lambda_div: 0.1"))
    monkeypatch.setattr(run_page, "MOST_ALONE", 3)
    drawn = []
    draw_patches = run_page.figures.patch_figure
    monkeypatch.setattr(run_page.figures, "patch_figure", lambda *a: drawn.append(a) or draw_patches(*a))
    words = ["--images", "2", "--class", "3", "--threshold", "9", *FEW, "--batches", "1", "--delta", "0.95"]
    folders = [runs / "top2", twin, runs / HOSTILE, other]
    analyze.main([*map(str, folders), *words, "--output", str(tmp_path / "report")])
    read = check_page((tmp_path / "report/report.html").read_text(), tmp_path / "report")
    numbers = json.loads((tmp_path / "report/numbers.json").read_text())
    names = ["top2", "twin", HOSTILE, "other"]
    assert read.tables["comparison"][0] == ["number", *names] and "comparison" not in numbers
    rows = read.tables["all-observation-3"]
    assert [row[0] for row in rows[1:4]] == [f"layer 3, ε = 0.05, {name}" for name in ("top2", "twin", "mean of 2")]
    assert len(rows) == 10 and rows[1][1:] == rows[2][1:]  # the same weights in both
    assert rows[3][1:] == [rows[1][1], "–", "–", *rows[1][4:]]
    diagnosis = numbers["runs"][0]["diagnoses"]["layer 3"]
    demand, low, high = (found := diagnosis["demand"][0]), *found["groups"].values()
    expected = [demand["correlation"], *demand["interval"], diagnosis["demand_uniform_averaging"][0]["correlation"]]
    assert list(map(float, rows[1][1:5])) == expected
    means = [low["mean_demand"], high["mean_demand"], low["success_at_2"], high["success_at_2"]]
    assert list(map(float, rows[1][6:])) == means
    assert "Of 4 runs this page has what they show together" in read.text
    assert not any(name.startswith("run-1-obs") for name in read.tables)
    ratios = read.tables["all-coactivation"]
    assert [row[0] for row in ratios[1:]] == ["λ = 0.01", "λ = 0.1"] and float(ratios[2][3]) == 0
    (usage,) = numbers["runs"][2]["usage"].values()
    assert float(ratios[1][2]) == pytest.approx(usage["mean_pair_coactivation"])

    assert "2 images of each run, of the class 3, on one scale" in read.text
    loaded = load_run(runs / HOSTILE)
    threes = torch.stack([image for image, label in map(loaded.task.test[0].__getitem__, range(239)) if label == 3])
    ((images, computes, threshold, titles, _),) = drawn
    assert len(images) == 4 and threshold == 9
    assert titles == [f"{run_page.style.plain(name)}\n3" for name in (HOSTILE, HOSTILE, "other", "other")]
    (layer,) = loaded.layers.values()
    seen = []
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        loaded.model(x=threes)
    computed = layer.route(seen[0].flatten(0, 1)).block_compute.view(len(threes), 5)[:, 1:].view(-1, 2, 2)
    shown = run_page.pixels(loaded, threes)
    for image, compute in zip(images, computes, strict=True):  # both runs have these weights
        (place,) = (shown == image).flatten(1).all(1).nonzero().flatten().tolist()
        assert torch.equal(compute, computed[place])

    for words, sentence in (
        ([HOSTILE, "--class", "10"], "--class '10' is no class of Digits; give one of 0, 1"),
        (["top2", "--images", "2"], "and no layer of top2 is one, so --images would change nothing"),
        (["top2", "top2"], "top2 is named twice; give another run"),
    ):
        places = [str(runs / word) if (runs / word).is_dir() else word for word in words]
        with pytest.raises(UserError, match=sentence):
            analyze.main([*places, "--output", str(tmp_path / "none")])


def test_usage_by_element_from_masks(runs, tmp_path, empty_files):
    """Three images of the test data with a mask of four quarters: patches 0, 1, 2 are elements, the last is void."""
    for index in (0, 17, 33):
        quarters = Image.fromarray(np.repeat(np.repeat(np.uint8([[0, 1], [2, 255]]), 8, 0), 8, 1))
        quarters.save(tmp_path / f"{index:04d}.png")
    (tmp_path / "labels.json").write_text('{"1": "upper <i>right"}')
    read, numbers, _ = make(runs / HOSTILE, "--tokens", "200", "--masks", str(tmp_path))
    found = numbers["runs"][0]["elements"]
    assert (found["images"], found["from_files"]) == (3, True) and not read.named("i")
    assert "3 of 239 test images have one, and 3 of these" in read.text
    (usage,) = found["layers"].values()
    assert (usage["elements"], usage["patches"]) == ([0, 1, 2], [3, 3, 3])

    loaded = load_run(runs / HOSTILE)
    (layer,) = loaded.layers.values()
    seen = []
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        loaded.model(x=torch.stack([loaded.task.test[0][index][0] for index in (0, 17, 33)]))
    routing = layer.route(seen[0][:, 1:4].reshape(9, -1))  # after the class token
    means = [
        getattr(routing, name).double().view(3, 3).mean(0).tolist()
        for name in ("block_compute", "shared_demand", "shared_block_count", "expert_count")
    ]
    names = ("compute", "shared_demand", "shared_block_count", "expert_count")
    assert [usage[name] for name in names] == [pytest.approx(mean) for mean in means]
    rows = read.tables["elements-1"][1:]
    assert [row[0] for row in rows] == ["0", "upper <i>right", "2"]
    assert [[float(row[2 + n]) for row in rows] for n in range(4)] == [usage[name] for name in names]

    with pytest.raises(UserError, match="--masks shows what UniF-MoE layers use, but top2 has none"):
        analyze.main([str(runs / "top2"), "--masks", str(tmp_path), "--output", str(tmp_path / "report")])
    Image.new("L", (8, 8)).save(tmp_path / "5.png")
    with pytest.raises(UserError, match="5.png is 8 x 8 pixels, but its image is 16 x 16"):
        analyze.main([str(runs / HOSTILE), "--masks", str(tmp_path), "--output", str(tmp_path / "report")])


@pytest.mark.parametrize("sampling", ["epochs", "replacement"])
def test_a_router_sees_batches_drawn_as_in_training(sampling, runs):
    run = load_run(runs / "top2")
    run.config.data.sampling, run.config.data.batch_size = sampling, 200
    labels = torch.cat([labels for _, labels in run_study._training_batches(run, 1, "")])
    drawn = TrainBatches(run.task, 200, run.config.seed, 0, 1, 1, 0, sampling == "replacement").step(0)
    assert torch.equal(labels, torch.cat([labels for _, labels in drawn]))


def test_routing_of_a_run_is_recorded_from_its_validation_data(runs, capsys):
    scale.main(["--record", str(runs / HOSTILE), "--tokens", "50"])
    assert capsys.readouterr().out.strip() == str(runs / HOSTILE / "routing.npz")
    task, (recorded,) = read_routing(runs / HOSTILE)
    loaded = load_run(runs / HOSTILE, "latest")
    (layer,) = loaded.layers.values()
    sample = draw_sample(replace(loaded, task=replace(loaded.task, test=loaded.task.validation)), 50)
    seen = []
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].flatten(0, 1)))
    for batch in sample.batches(""):
        with torch.no_grad():
            loaded.model(**batch)
    routing = layer.route(torch.cat(seen))
    assert task == "digits" and recorded.gated is False and recorded.model_dim == layer.config.model_dim
    assert np.array_equal(recorded.active, (routing.gates != 0).numpy()) and len(recorded) == 50
    assert np.array_equal(recorded.shared, routing.shared_blocks.numpy())
    with pytest.raises(UserError, match="top2 has no UniF-MoE layer"):
        scale.main(["--record", str(runs / "top2")])


def test_no_report_of_a_run_takes_the_place_of_another(runs, tmp_path, empty_files, capsys):
    """By default each kind of content has its folder; what they are called is for `folder_name` to say."""
    run = shutil.copytree(runs / HOSTILE, tmp_path / "mine")
    Image.fromarray(np.zeros((16, 16), np.uint8)).save(tmp_path / "0.png")
    for more in (["--masks", str(tmp_path)], ["--methods"], []):
        analyze.main([str(run), "--tokens", "50", *more])
    pages = [Path(line).read_text() for line in capsys.readouterr().out.splitlines() if line.endswith("report.html")]
    assert [("Masks are those of the folder" in page, "Standard MoE, top-1" in page) for page in pages] == [
        (True, False),
        (False, True),
        (False, False),
    ]
    assert (run / "analysis/report.html").read_text() == pages[-1]


@pytest.mark.parametrize(
    "more, sentence",
    [
        (["--router-steps", "3"], "and mine has none, so --router-steps would change nothing"),
        (["--delta", "0.98", "--tokens", "9"], "and mine has none, so --delta would change nothing"),
        (
            ["--delta", "0.9", "--router-steps", "400", "--compare", "theirs"],
            "and neither mine nor theirs has any, so --router-steps and --delta would change nothing",
        ),
    ],
)
def test_options_of_the_observations_are_refused_without_layers_for_them(more, sentence, runs, tmp_path, monkeypatch):
    for name in ("mine", "theirs"):
        shutil.copytree(runs / HOSTILE, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=sentence):
        analyze.main(["mine", *more])
    assert not (tmp_path / "mine/analysis").exists()


def test_what_is_no_run_is_one_sentence(runs, tmp_path):
    job = run_job(tmp_path, 1, [str(tmp_path)], script="analyze", timeout=200)
    assert job.statuses == [2]
    assert job.output.strip() == f"error: {tmp_path} is not a run; give the folder that a training run wrote."
    with pytest.raises(UserError, match="--tokens must be at least 1, not 0"):
        analyze.main([str(runs / "top2"), "--tokens", "0"])
    with pytest.raises(UserError, match="names .*top2 itself; give another run"):
        analyze.main([str(runs / "top2"), "--compare", str(runs / "top2")])
    with pytest.raises(UserError, match="holds no checkpoint step-7; it holds: "):
        analyze.main([str(runs / "top2"), "--checkpoint", "step-7"])
    begun = tmp_path / "begun"
    begun.mkdir()
    shutil.copy(runs / "top2/config.yaml", begun)
    with pytest.raises(UserError, match=r"begun holds no checkpoint yet.*its first evaluation \(every 2 steps"):
        analyze.main([str(begun)])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output .*file cannot be used"):
        analyze.main([str(runs / "top2"), "--output", str(tmp_path / "file")])
