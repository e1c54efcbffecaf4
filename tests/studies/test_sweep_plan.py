"""What a sweep plans: runs, options, hours and disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import sweep as sweep_command
from tests.support.sweeps import CONFIGS, plan
from unifmoe_dist.config import ModelConfig, TrainConfig
from unifmoe_dist.config.named import with_options
from unifmoe_dist.errors import UserError
from unifmoe_dist.methods.registry import METHODS, VARIANTS, find_method, in_order
from unifmoe_dist.studies.paper_tables import TABLES
from unifmoe_dist.studies.sweep.needs import estimate
from unifmoe_dist.studies.sweep.planned_runs import Selection, expand
from unifmoe_dist.studies.sweep.run_folder import State

# -- what is planned --------------------------------------------------------------------------------------------------

DOMAINBED_ENVIRONMENTS = 4 + 4 + 4 + 4 + 6
COUNTS = {
    "domainbed": DOMAINBED_ENVIRONMENTS * 3 * 10,
    "glue": 5 * 3 * 3 * 8,
    "glue-cosine": 5 * 3 * 3 * 4,
    "ablation": DOMAINBED_ENVIRONMENTS * 3 * 4 + 5 * 3 * 3 * 4,
    "diversity": 5 * 3 * 3 * 4,
    "coactivation": 4 * 3 * 2,
    "blocks": DOMAINBED_ENVIRONMENTS * 3 * 4,
    "digits": 6 * 3 * 25,
    "evidence": (3 * 16 + 12 + 4 * 16 + 4 * 14) * 3,
}


@pytest.mark.parametrize("table", TABLES)
def test_a_dry_run_prints_every_run_of_a_table(table, tmp_path, capsys):
    sweep_command.main(["--table", table, "--dry-run", "--output", str(tmp_path / "none")])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("to do ") for line in lines) == COUNTS[table]
    assert f"{COUNTS[table]} runs: {COUNTS[table]} to do, 0 half done, 0 finished" in lines
    assert any(line.startswith("time: ") for line in lines) and any(line.startswith("disk: ") for line in lines)
    assert not (tmp_path / "none").exists()  # nothing is written


def test_a_shipped_base_configuration_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = sweep_command.parser().parse_args("--config configs/digits.yaml --methods dense".split())
    assert {run.task for run in expand(sweep_command.selection(options), tmp_path, CONFIGS)} == {"digits"}


def test_every_method_of_every_table_changes_options_that_exist():
    names = {method for table in TABLES.values() for method in table.methods}
    for name in names | set(METHODS) | set(VARIANTS):
        config = with_options(TrainConfig(model=ModelConfig(num_experts=8)), find_method(name).options)
        for dotted, value in find_method(name).options.items():
            node = config
            for part in dotted.split("."):
                node = getattr(node, part)
            assert node == value
    assert TrainConfig().model.moe == "unif"  # the original is untouched
    with pytest.raises(KeyError):
        with_options(TrainConfig(), {"model.colour": 1})


def test_studies_are_methods_with_a_number():
    assert find_method("unif-lambda-0.001").options["optim.lambda_div"] == 0.001
    assert find_method("unif-lambda-1e-3").options["optim.lambda_div"] == 0.001
    assert find_method("unif-blocks-16").options["model.num_blocks"] == 16
    assert in_order({"unif-blocks-16", "mass", "unif-blocks-4", "dense"}) == [
        "dense",
        "mass",
        "unif-blocks-4",
        "unif-blocks-16",
    ]
    assert in_order({"gmoe-top8", "unif-lambda-0", "gmoe", "gmoe-top1"}) == [
        "gmoe",
        "gmoe-top1",
        "gmoe-top8",
        "unif-lambda-0",
    ]
    for name in ("unif-blocks-1.5", "unif-lambda", "colour", "unif-blocks--4"):
        with pytest.raises(UserError, match="not known"):
            find_method(name)


def test_a_run_has_its_options_and_a_folder_of_its_own(tmp_path):
    selection = Selection(("officehome", "rte"), ("unif-fixed-alpha",), seeds=(7,), settings=("data.batch_size=16",))
    runs = expand(selection, tmp_path, CONFIGS)
    assert [str(run.folder.relative_to(tmp_path)) for run in runs] == [
        *(f"officehome/{place}/unif-fixed-alpha/seed7" for place in ("art", "clipart", "product", "real-world")),
        *(f"rte/unif-fixed-alpha/seed7-lr{lr}" for lr in ("2e-05", "3e-05", "5e-05")),
    ]
    config = runs[3].config
    assert (config.data.task, config.data.held_out, config.seed) == ("officehome", "Real World", 7)
    assert (config.model.shared_demand, config.model.num_experts, config.data.batch_size) == (0.4, 6, 16)
    assert [run.config.optim.lr for run in runs[4:]] == [2e-5, 3e-5, 5e-5]
    assert runs[4].config.model.num_experts == 16  # the base configuration's, of the other data set


def test_a_method_may_have_other_options_on_a_data_set(tmp_path):
    runs = expand(Selection(("pacs", "digits", "qnli"), ("emoe", "dynmoe"), seeds=(0,)), tmp_path, CONFIGS)
    shapes = {(run.task, run.method): (run.config.model.num_experts, run.config.model.top_k) for run in runs}
    assert shapes["pacs", "emoe"] == (24, 4) and shapes["digits", "emoe"] == (16, 3)
    assert shapes["pacs", "dynmoe"][0] == 6 and shapes["qnli", "dynmoe"][0] == 8 and shapes["digits", "dynmoe"][0] == 6


def test_a_task_without_environments_has_no_method_that_compares_them(tmp_path):
    chosen = {("acceptability", "dense"): 3e-4, ("digit-sources", "dense"): 4e-3, ("digit-sources", "unif-lfme"): 1e-3}
    tasks, methods = ("acceptability", "digit-sources"), ("dense", "unif-lfme")
    runs = expand(Selection(tasks, methods, ("uci",), (0,), chosen_rates=chosen), tmp_path, CONFIGS)
    rates = {(run.task, run.method): run.config.optim.lr for run in runs}
    assert rates == chosen and {run.lr for run in runs} == {None}  # chosen before, so no part of what is compared
    with pytest.raises(UserError, match="unif-lfme compares environments or .* which acceptability lacks"):
        expand(Selection(tasks[:1], methods[1:]), tmp_path, CONFIGS)
    with pytest.raises(UserError, match="--lr-from lacks runs of top1 on digit-sources"):
        expand(Selection(tasks[1:], ("top1",), chosen_rates=chosen), tmp_path, CONFIGS)


@pytest.mark.parametrize(
    "changes,words",
    [
        (dict(held_out=("rot1",)), "rot1"),
        (dict(methods=()), "--methods"),
        (dict(seeds=(0, 0)), "more than once"),
        (dict(settings=("steps",)), "KEY=VALUE"),
        (dict(settings=("seed=3",)), "--seeds"),
        (dict(settings=("optim.lr=0.1",), learning_rates=(0.1,)), "one of them"),
        (dict(settings=("steps=0",)), "dense seed 0 cannot run: steps must be at least 1"),
        (dict(settings=("colour=1",)), "colour"),
        (dict(config=Path("absent.yaml")), "absent.yaml"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(changes, words, tmp_path):
    with pytest.raises(UserError, match=words):
        plan(tmp_path, **changes)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["--methods", "dense"], ["--config", "configs/digits.yaml"], ["--tasks", "digits"]])
def test_commands_that_name_too_little(words):
    with pytest.raises(UserError, match="name "):
        sweep_command.main([*words, "--dry-run"])


def test_hours_and_disk_by_hand(tmp_path):
    selection = Selection(("pacs",), ("dense", "gmoe", "lfme"), ("Art",), (0,), settings=("eval_every=300",))
    runs = expand(selection, tmp_path, CONFIGS)
    # 5001 steps of 96 images; 17 evaluations of 20 % of 3/4 of 9,991 images, the test on 80 % of 1/4, 64 at a time
    scored = (17 * 0.2 * 3 / 4 + 0.8 / 4) * 9991 / 64
    dense, gmoe, lfme = (estimate([run], [State.NEW]) for run in runs)
    assert dense.hours["pacs"] * 3600 == pytest.approx(5001 * 0.23 + scored * 0.04)
    assert gmoe.hours["pacs"] * 3600 == pytest.approx(5001 * 1.23 + scored * 0.31)
    assert lfme.hours["pacs"] * 3600 == pytest.approx(5001 * 0.23 * 4 + scored * 0.04)
    # two layers of five more copies of a DeiT-S FFN; the newest checkpoints and the best
    kept = runs[0].config.keep_checkpoints + 1
    assert gmoe.checkpoint_gb - dense.checkpoint_gb == pytest.approx(kept * 16 * 2 * 5 * 2 * 384 * 1536 / 1e9)
    selection = Selection(("domainnet",), ("unif",), ("Real",), (0,), settings=("eval_every=300",))
    hours = estimate(expand(selection, tmp_path, CONFIGS), [State.NEW]).hours["domainnet"]
    assert hours * 3600 == pytest.approx(15001 * 1.23 * 160 / 96 + (51 * 0.2 * 5 + 0.8) / 6 * 586575 / 64 * 0.17)


def test_an_option_given_twice_counts_twice():
    words = [
        "--config",
        str(CONFIGS / "digits.yaml"),
        "--methods",
        "dense",
        "--methods",
        "unif",
        "--seeds",
        "0",
        "--seeds",
        "1",
    ]
    chosen = sweep_command.selection(
        sweep_command.parser().parse_args([*words, "--set", "steps=2", "--set", "eval_every=2"])
    )
    assert (
        chosen.methods == ["dense", "unif"]
        and chosen.seeds == [0, 1]
        and chosen.settings == ["steps=2", "eval_every=2"]
    )
