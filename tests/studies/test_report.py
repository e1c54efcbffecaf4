"""Reports: aggregation, tables and marks against numbers worked out by hand."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import pytest

from unifmoe_dist.data.registry import find_task
from unifmoe_dist.errors import UserError
from unifmoe_dist.studies import paper_numbers as paper
from unifmoe_dist.studies.paper_tables import DOMAINBED, GLUE, TABLES
from unifmoe_dist.studies.report import report_plots as report_plots
from unifmoe_dist.studies.report.entries import (
    Result,
    average,
    best_of_methods,
    cell,
    collect,
    grid_of,
    mean_over_methods,
)
from unifmoe_dist.studies.report.report_tables import Entry, as_csv, build_tables, latex, markdown
from unifmoe_dist.studies.report.sweep_report import write_report

OPTIONS = {"model.num_blocks": 8, "model.num_experts": 6, "optim.lambda_div": 0.01}


def result(task, held_out, method, seed, score=None, *, lr=None, validation=None, c_b=8.0, k=1.0, options=OPTIONS):
    if score is None:
        return Result(task, held_out, method, seed, lr, Path("absent"))
    validation = score if validation is None else validation
    return Result(task, held_out, method, seed, lr, Path("absent"), score, validation, c_b, k, options)


def every(method, task, score, seeds=(0, 1, 2), **more):
    """Runs of all environments of a data set; `score(environment index, seed)`."""
    environments = find_task(task).environments or (None,)
    return [result(task, e, method, s, score(i, s), **more) for i, e in enumerate(environments) for s in seeds]


# -- aggregation ------------------------------------------------------------------------------------------------------


def test_environments_are_averaged_first_then_seeds():
    scores = {("rot0", 0): 70.0, ("rot75", 0): 80.0, ("rot0", 1): 60.0, ("rot75", 1): 96.0}
    results = [result("digits", e, "dense", s, v, c_b=8.0 + s, k=2.0) for (e, s), v in scores.items()]
    entry = cell(results, "digits", "dense")
    # seeds: 75 and 78; mean 76.5; deviation over n - 1: sqrt((1.5^2 + 1.5^2) / 1) = 2.1213
    assert (entry.mean, entry.deviation) == (pytest.approx(76.5), pytest.approx(2.1213, abs=1e-4))
    assert (entry.done, entry.wanted, entry.by_seed) == (4, 4, (75.0, 78.0))
    assert (entry.block_compute, entry.expert_count, entry.ffns) == (8.5, 2.0, 8.5 / 8)
    one = cell(results, "digits", "dense", "rot75")
    assert (one.mean, one.deviation) == (pytest.approx(88.0), pytest.approx(11.3137, abs=1e-4))


def test_a_missing_run_leaves_the_entry_empty():
    results = [
        result("digits", "rot0", "dense", 0, 70.0),
        result("digits", "rot75", "dense", 0, 80.0),
        result("digits", "rot0", "unif", 0, 71.0),
        result("digits", "rot75", "unif", 0),
    ]
    assert cell(results, "digits", "dense").mean == 75.0
    entry = cell(results, "digits", "unif")
    assert (entry.mean, entry.done, entry.wanted) == (None, 1, 2)
    assert cell(results, "digits", "unif", "rot0").mean == 71.0  # of that environment all is there
    # a seed that only one method has: the others lack it, so that rows stay like for like
    more = [*results, result("digits", "rot0", "dense", 1, 70.0), result("digits", "rot75", "dense", 1, 80.0)]
    assert (cell(more, "digits", "unif").done, cell(more, "digits", "unif").wanted) == (1, 4)
    assert cell(more, "digits", "dense").mean == 75.0
    assert (cell(results, "digits", "gmoe").mean, cell(results, "digits", "gmoe").wanted) == (None, 2)


def test_the_learning_rate_is_chosen_by_validation_for_each_seed():
    table = {  # (seed, lr): (test, validation)
        (0, 2e-5): (90.0, 60.0),
        (0, 3e-5): (80.0, 61.0),
        (1, 2e-5): (70.0, 66.0),
        (1, 3e-5): (99.0, 65.0),
    }
    results = [result("rte", None, "unif", s, t, lr=lr, validation=v) for (s, lr), (t, v) in table.items()]
    assert cell(results, "rte", "unif").by_seed == (80.0, 70.0)
    assert grid_of(results, "rte").size == 4
    without = [r for r in results if (r.seed, r.lr) != (1, 3e-5)]
    assert (cell(without, "rte", "unif").mean, cell(without, "rte", "unif").done) == (None, 3)


def test_of_a_perplexity_the_lowest_is_best(tmp_path):
    table = {("unif", 1e-4): (30.0, 25.0), ("unif", 2e-4): (28.0, 24.0), ("dense", 1e-4): (29.0, 26.0)}
    table[("dense", 2e-4)] = (27.0, 27.0)
    results = [result("corpus", "learned", m, 0, t, lr=lr, validation=v) for (m, lr), (t, v) in table.items()]
    assert [cell(results, "corpus", method).mean for method in ("unif", "dense")] == [28.0, 29.0]
    (shown,) = build_tables(results)
    assert shown.title == "Texts: perplexity by held-out environment"
    assert "| UniF-MoE | **28.0** |" in markdown(shown) and "| Dense | 29.0 |" in markdown(shown)
    labels = {axis.get_xlabel() for axis in report_plots._scores(shown).axes if axis.get_visible()}
    assert labels == {"perplexity"}
    figure = report_plots._comparison(results, "corpus")
    assert figure.axes[0].get_ylabel() == "perplexity" and figure.axes[0].get_title() == "Perplexity and computation"


def test_averages_over_data_sets_need_every_one():
    results = every("unif", "pacs", lambda e, s: 80.0 + s) + every("unif", "vlcs", lambda e, s: 70.0 + 3 * s)
    cells = [cell(results, task, "unif") for task in ("pacs", "vlcs")]
    both = average(cells)  # seeds: 75, 77, 79
    assert (both.mean, both.deviation, both.done) == (pytest.approx(77.0), pytest.approx(2.0), 24)
    assert average([*cells, cell(results, "domainnet", "unif")]).mean is None
    assert average([]).mean is None


def test_what_was_not_planned_is_not_a_fraction_of_runs(tmp_path):
    """A sweep of one data set has no mean over five: neither "– (12/12)" nor "missing: 0/0" says so."""
    results = every("unif", "pacs", lambda e, s: 80.0) + every("dense", "pacs", lambda e, s: 79.0)
    table = next(table for table in build_tables(results) if table.name == "domainbed")
    lines = {line.split(" | ")[0]: line for line in markdown(table).splitlines()}
    assert "(12/12)" not in markdown(table) and "(0/0)" not in markdown(table)
    assert lines["| UniF-MoE"].startswith("| UniF-MoE | **80.0 ± 0.0** |  |  |  |  |  |")
    assert "No runs of VLCS, OfficeHome, TerraInc., DomainNet were planned, so that there is no mean" in markdown(table)
    assert "scriptsize" not in latex(table)
    assert report_plots._why_empty(Entry(None)) == "not planned"
    assert report_plots._why_empty(Entry(None, done=1, wanted=4)) == "1 of 4 runs finished"
    glue = every("top1", "cola", lambda e, s: 60.0, lr=1e-5) + every("top2", "cola", lambda e, s: 64.0, lr=1e-5)
    table = next(table for table in build_tables(glue) if table.name == "glue")
    assert "/" not in markdown(table).split("Mean ±")[0].replace("C_B / B", "")
    unfinished = [*results[:-1], replace(results[-1], score=None)]
    table = next(table for table in build_tables(unfinished) if table.name == "domainbed")
    assert "– (11/12)" in markdown(table)  # of a data set that was planned


def test_rows_over_the_standard_methods_as_in_the_paper():
    """The paper's own rows follow from its entries, which settles how they are made."""
    for task in GLUE:
        entries = [paper.GLUE[f"top{k}"][task] for k in (1, 2, 4, 8)]
        means = [score for score, _ in entries]
        stated, spread = paper.GLUE[paper.STANDARD_AVERAGE][task]
        assert stated == pytest.approx(mean(means), abs=0.0051)
        assert spread == pytest.approx(stdev(means), abs=0.0051)
        assert paper.GLUE[paper.STANDARD_BEST][task] == max(entries)
    results = [r for k, v in ((1, 60.0), (2, 64.0)) for r in every(f"top{k}", "cola", lambda e, s, v=v: v + s, lr=1e-5)]
    cells = [cell(results, "cola", name) for name in ("top1", "top2")]
    row = mean_over_methods(cells)  # 61 and 65
    assert (row.mean, row.deviation) == (pytest.approx(63.0), pytest.approx(8**0.5))
    assert best_of_methods(cells).mean == pytest.approx(65.0)
    assert best_of_methods([*cells, cell(results, "cola", "top4")]).mean is None


# -- the paper's numbers ----------------------------------------------------------------------------------------------


def test_paper_numbers_retyped():
    assert paper.DOMAINBED["unif"]["pacs"] == (89.6, 0.1)
    assert paper.DOMAINBED["dense"]["terraincognita"] == (42.0, 0.8)
    assert paper.DOMAINBED["lfme"]["terraincognita"] == (53.4, 0.4)
    assert paper.DOMAINBED["dynmoe"]["terraincognita"] == (48.9, 0.5)
    assert paper.DOMAINBED["pcmoe"]["officehome"] == (74.1, None)
    assert "domainnet" not in paper.DOMAINBED["mass"] and "domainnet" not in paper.DOMAINBED["emoe"]
    assert paper.GLUE["unif"]["cola"] == (66.83, 0.19)
    assert paper.GLUE["top2"]["rte"] == (72.32, 3.54)
    assert paper.GLUE["mass"]["qnli"] == (92.62, 0.13)
    assert paper.ABLATION["unif-top2"] == {"domainbed": 68.9, "domainbed C_B": 13.41, "glue": 82.07, "glue C_B": 66.74}
    assert paper.COST["T-TPS"]["dynmoe"] == 3.32 and paper.COST["N"]["unif"] == 34.19


@pytest.mark.parametrize("numbers,tasks", [(paper.DOMAINBED, DOMAINBED), (paper.GLUE, GLUE)])
def test_the_papers_averages_are_those_of_its_entries(numbers, tasks):
    """Up to rounding: a slip of a digit would show. (MASS on GLUE is printed 0.012 above.)"""
    for method, row in numbers.items():
        assert (paper.AVERAGE in row) == all(task in row for task in tasks)
        if paper.AVERAGE in row:
            tolerance = 0.051 if tasks == DOMAINBED else 0.013
            assert row[paper.AVERAGE][0] == pytest.approx(mean(row[task][0] for task in tasks), abs=tolerance), method


def test_every_table_of_the_paper_is_beside_its_methods():
    for name, numbers in (("domainbed", paper.DOMAINBED), ("glue", paper.GLUE)):
        assert set(TABLES[name].methods) == set(numbers) - {paper.STANDARD_AVERAGE, paper.STANDARD_BEST}
    assert set(TABLES["ablation"].methods) == set(paper.ABLATION)


# -- tables -----------------------------------------------------------------------------------------------------------


def test_layers_with_a_cosine_gate_stand_beside_the_papers_top_k_rows():
    results = [r for n in ("gmoe-top4", "top4") for r in every(n, "cola", lambda e, s: 64.0 + s, lr=2e-5)]
    tables = {table.name: table for table in build_tables(results)}
    here, there = tables["glue-cosine"].rows
    assert (here.label, here.source, here.entries[0].mean) == ("Cosine gate, top-4", "here", pytest.approx(65.0))
    assert (there.source, there.entries[0].mean) == ("paper", 64.12)
    assert [row.method for row in tables["glue"].rows[:1]] == ["top4"]
    assert "glue-cosine" not in {table.name for table in build_tables(every("top4", "cola", lambda e, s: 63.0))}


@pytest.fixture
def digits():
    scores = {"dense": ((70.0, 80.0), (60.0, 96.0)), "unif": ((91.0, 71.0), (88.0, None))}
    return [
        result("digits", e, method, s, scores[method][s][i], c_b=8.0 if method == "dense" else 10.5)
        for method in scores
        for s in (0, 1)
        for i, e in enumerate(("rot0", "rot75"))
    ]


def test_markdown(digits):
    (table,) = build_tables(digits)
    assert markdown(table).splitlines()[:6] == [
        "### Digits: by held-out environment (%)",
        "",
        "| method | `rot0` | `rot75` | Mean | C_B | C_B / B | k |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| Dense | 65.0 ± 7.1 | 88.0 ± 11.3 | 76.5 ± 2.1 | 8.00 | 1.00 | 1.00 |",
        "| UniF-MoE | **89.5 ± 2.1** | – (1/2) | – (3/4) |  |  |  |",
    ]


def test_latex(digits):
    (table,) = build_tables(digits)
    lines = latex(table).splitlines()
    assert lines[4:12] == [
        r"\begin{tabular}{@{}lcccccc@{}}",
        r"\toprule",
        r"Method & rot0 & rot75 & Mean & $C_B$ & $C_B$ / B & $k$ \\",
        r"\midrule",
        r"Dense & $65.0\pm7.1$ & $88.0\pm11.3$ & $76.5\pm2.1$ & $8.00$ & $1.00$ & $1.00$ \\",
        r"UniF-MoE & $\mathbf{89.5}\pm2.1$ & -- {\scriptsize(1/2)} & -- {\scriptsize(3/4)} &  &  &  \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    assert r"(\%)" in lines[2] and "%" not in lines[2].replace(r"\%", "")
    ablation = every("unif-fixed-alpha", "pacs", lambda e, s: 80.0)
    text = next(latex(t) for t in build_tables(ablation) if t.name == "ablation")
    assert r"fixed $\alpha$ = 0.4" in text and "α" not in text


def test_csv(digits):
    (table,) = build_tables(digits)
    rows = list(csv.DictReader(io.StringIO(as_csv(table))))
    mean_of = {row["method"]: row for row in rows if row["column"] == "Mean"}
    assert mean_of["dense"] == {
        "table": "digits",
        "method": "dense",
        "label": "Dense",
        "source": "here",
        "column": "Mean",
        "mean": "76.5",
        "deviation": "2.12132",
        "runs": "4",
        "of": "4",
    }
    assert (mean_of["unif"]["mean"], mean_of["unif"]["runs"], mean_of["unif"]["of"]) == ("", "3", "4")


def test_domainbed_stands_beside_the_paper():
    results = [r for task in DOMAINBED for r in every("unif", task, lambda e, s: 80.0 + s)]
    results += [r for task in DOMAINBED[:-1] for r in every("dense", task, lambda e, s: 70.0)]
    table = next(t for t in build_tables(results) if t.name == "domainbed")
    lines = markdown(table).splitlines()
    assert lines[4:8] == [
        "| Dense | 70.0 ± 0.0 | 70.0 ± 0.0 | 70.0 ± 0.0 | 70.0 ± 0.0 | – (0/18) | – (48/66) |  |  |  |",
        "| *paper* | *86.2 ± 0.1* | *79.7 ± 0.0* | *72.2 ± 0.4* | *42.0 ± 0.8* | *47.3 ± 0.2* | *65.5* |  |  |  |",
        "| UniF-MoE | **81.0 ± 1.0** | **81.0 ± 1.0** | **81.0 ± 1.0** | **81.0 ± 1.0** | 81.0 ± 1.0 | 81.0 ± 1.0 "
        "| 8.00 | 1.00 | 1.00 |",
        "| *paper* | *89.6 ± 0.1* | *81.7 ± 0.3* | *74.2 ± 0.2* | *52.6 ± 0.3* | *49.4 ± 0.1* | *69.5* |  |  |  |",
    ]
    assert "only" not in table.notes[-1]
    part = [r for r in results if r.held_out != "Sketch"]
    notes = next(t for t in build_tables(part) if t.name == "domainbed").notes
    assert "PACS: only Art, Cartoon, Photo of 4 environments were planned to be held out." in notes


def test_glue_chooses_rates_and_has_the_rows_over_k():
    results = []
    for lr, gain in ((2e-5, 0.0), (3e-5, 1.0), (5e-5, -1.0)):
        for k, base in ((1, 60.0), (2, 64.0), (4, 62.0), (8, 66.0)):
            for task in GLUE:
                results += every(f"top{k}", task, lambda e, s, v=base + gain: v + s, lr=lr)
    table = next(t for t in build_tables(results) if t.name == "glue")
    rows = {row.method: row for row in table.rows if row.source == "here"}
    assert [e.text(" ± ", "–") for e in rows["top1"].entries[:6]] == ["62.00 ± 1.00"] * 6  # 60 + the best gain + seed
    assert rows["standard-average"].entries[0].mean == pytest.approx(65.0)  # 62, 66, 64 and 68
    assert rows["standard-average"].entries[5].text(" ± ", "–") == "65.00"
    assert rows["standard-best"].entries[0].text(" ± ", "–") == "68.00 ± 1.00"
    assert rows["top8"].entries[0].best and not rows["standard-best"].entries[0].best


def test_studies_are_labelled_by_their_values():
    def options(blocks):
        return {**OPTIONS, "model.num_blocks": blocks}

    results = [r for task in DOMAINBED for r in every("unif-blocks-4", task, lambda e, s: 80.0, options=options(4))]
    results += [r for task in DOMAINBED for r in every("unif", task, lambda e, s: 80.0, options=options(8))]
    table = next(t for t in build_tables(results) if t.name == "blocks")
    assert [row.label for row in table.rows] == ["UniF-MoE, B = 4", "UniF-MoE, B = 8"]
    assert [row.entries[-2].mean for row in table.rows] == [2.0, 1.0]  # C_B of 8 in FFNs of 4 and of 8 blocks


# -- folders ----------------------------------------------------------------------------------------------------------


def write_run(folder: Path, identity: dict, summary: dict | None = None, log: str | None = None) -> None:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(identity))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "config.yaml").write_text(CONFIG)
    if log is not None:
        (folder / "log.txt").write_text(log)


CONFIG = "model: {num_blocks: 8, num_experts: 6}\noptim: {lambda_div: 0.01, lr: 0.002}\n"
SUMMARY = {"test_accuracy": 0.5, "validation_accuracy": 0.75, "mean_block_compute": 8.0, "mean_expert_count": 0.0}
IDENTITY = {"task": "cola", "held_out": None, "method": "dense", "seed": 0, "lr": 2e-5}


def test_runs_are_read_and_missing_ones_named(tmp_path):
    write_run(tmp_path / "a", IDENTITY, {**SUMMARY, "score": -0.125, "validation_score": 0.25})
    write_run(tmp_path / "b", {**IDENTITY, "lr": 3e-5}, log="one\nValueError: two\n\n")
    write_run(tmp_path / "c", {**IDENTITY, "lr": 5e-5})
    first, *_ = collect(tmp_path)
    assert (first.score, first.validation) == (-12.5, 25.0)  # a task's own metric, where it has one
    page = write_report(tmp_path, tmp_path / "report")
    assert "1 of 3 planned runs have finished." in page
    assert f"- cola dense seed 0 lr 3e-05: `ValueError: two` ({tmp_path / 'b' / 'log.txt'})" in page
    assert "- cola dense seed 0 lr 5e-05: not begun" in page
    assert "| Dense | – (1/3) |" in page
    assert not (tmp_path / "report" / "glue.png").exists()  # nothing to draw


def test_the_page_shows_both_plots_of_a_comparison(tmp_path):
    write_run(tmp_path / "a", {**IDENTITY, "task": "digits", "held_out": "rot0"}, SUMMARY)
    page = write_report(tmp_path, tmp_path / "report")
    for name in ("digits.png", "digits-scores.png"):
        assert f"({name})" in page
        assert (tmp_path / "report" / name).exists()


def test_folders_that_hold_no_sweep(tmp_path):
    with pytest.raises(UserError, match="holds no runs of a sweep"):
        write_report(tmp_path, tmp_path / "report")
    write_run(tmp_path / "a", IDENTITY, {"test_accuracy": 0.5})
    with pytest.raises(UserError, match="does not hold a readable run"):
        collect(tmp_path)
    for garbage in ("{", "[]", json.dumps({**IDENTITY, "method": "x"}), json.dumps({**IDENTITY, "task": "x"})):
        (tmp_path / "a" / "run.json").write_text(garbage)
        with pytest.raises(UserError, match="does not hold a readable run"):
            collect(tmp_path)


@pytest.mark.parametrize("garbage", ["", "{", "[1]", "3", json.dumps({**SUMMARY, "test_accuracy": "x"})])
def test_a_summary_that_is_none(tmp_path, garbage):
    write_run(tmp_path / "a", IDENTITY, SUMMARY)
    (tmp_path / "a" / "summary.json").write_text(garbage)
    with pytest.raises(UserError, match="does not hold a readable run"):
        collect(tmp_path)


def test_two_sweeps_in_one_folder(tmp_path):
    write_run(tmp_path / "one" / "a", IDENTITY, SUMMARY)
    write_run(tmp_path / "two" / "a", IDENTITY)
    with pytest.raises(UserError, match=r"one/a and .*two/a both hold cola dense seed 0"):
        collect(tmp_path)


def test_every_table_has_its_plot(tmp_path):
    """Every kind of plot is drawn, with entries missing here and there."""
    from unifmoe_dist.studies.report.report_plots import plot_table

    results = []
    for task in (*DOMAINBED, "digits"):
        for method in ("dense", "unif", "unif-prefix", "unif-blocks-4", "unif-lambda-0"):
            results += every(method, task, lambda e, s: 80.0 + s, seeds=(0, 1))
    results = [r for r in results if (r.task, r.method, r.seed) != ("vlcs", "dense", 1)]
    results += [r for task in GLUE for r in every("unif", task, lambda e, s: 80.0 + s, lr=1e-5)]
    for task in GLUE:
        for method in ("unif-lambda-0", "unif-fixed-alpha"):
            results += every(method, task, lambda e, s: 80.0 + s, lr=1e-5)
    tables = [t for t in build_tables(results) if not t.name.startswith("domainbed-")]
    assert [t.name for t in tables] == ["domainbed", "glue", "diversity", "blocks", "ablation", "digits"]
    for table in tables:
        assert plot_table(table, results, tmp_path)
        assert (tmp_path / f"{table.name}.png").stat().st_size > 10_000
