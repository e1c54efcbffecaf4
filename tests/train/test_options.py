"""Options of a run: words, files and groups that do not fit, and what a resumed run keeps."""

from __future__ import annotations

import pytest

from tests.support.jobs import ROOT
from tests.support.training import make_config
from unifmoe_dist.config import TrainConfig
from unifmoe_dist.errors import UserError
from unifmoe_dist.train.cli import dump_train_config, load_train_config, parse_train_config
from unifmoe_dist.train.folder import choose_folder

# -- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words,expected",
    [
        (["--model.num_exprts", "4"], ["num_exprts"]),
        (["--steps", "many"], ["steps", "many"]),
        (["--optim.name", "adagrad9"], ["optim.name", "adagrad9"]),
        (["--config", "nowhere.yaml"], ["nowhere.yaml"]),
    ],
)
def test_bad_words_on_the_command_line(words, expected):
    with pytest.raises(UserError) as error:
        parse_train_config(words)
    assert all(word in str(error.value) for word in expected) and "\n" not in str(error.value)


def test_unknown_key_in_a_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model:\n  num_exprts: 4\n")
    with pytest.raises(UserError, match="num_exprts"):
        parse_train_config(["--config", str(path)])


@pytest.mark.parametrize(
    "words,world,expected",
    [
        (["--parallel.expert_parallel_size", "4"], 4, ["6", "4"]),
        (["--parallel.expert_parallel_size", "3"], 2, ["3", "2"]),
        (["--data.batch_size", "9"], 2, ["9", "2"]),
        (["--model.layers", "[]"], 1, ["model.layers"]),
        (["--steps", "0"], 1, ["steps", "0"]),
        (["--resume"], 1, ["--output"]),
        (["--parallel.precision", "bf16", "--parallel.zero_stage", "0"], 1, ["bf16"]),
        (["--parallel.zero_stage", "3"], 2, ["zero_stage 3", "zero_stage 2"]),
        (["--parallel.zero_stage", "0", "--parallel.offload_optimizer", "true"], 1, ["offload_optimizer", "1 or 2"]),
        (["--seed", "-1"], 1, ["seed", "-1"]),
        (["--data.split_seed", "9" * 20], 1, ["split_seed", "9" * 20]),
        (["--optim.betas", "[0.9,1.5]"], 1, ["optim.betas", "1.5"]),
        (["--optim.lr", ".inf"], 1, ["optim.lr", "inf"]),
        (["--optim.momentum", "-1"], 1, ["optim.momentum"]),
        (["--optim.weight_decay", "-1"], 1, ["weight_decay"]),
        (["--optim.warmup_steps", "-5"], 1, ["warmup_steps"]),
        (["--optim.grad_clip", "-1"], 1, ["grad_clip"]),
        (["--optim.lambda_div", ".nan"], 1, ["lambda_div", "nan"]),
        (["--model.backbone", "deit"], 1, ["model.backbone", "digits"]),
        (["--data.root", "there"], 1, ["data.root", "digits"]),
        (["--model.dropout", "0.1"], 1, ["dropout", "digits"]),
        (["--data.task", "cola", "--model.drop_path", "0.1"], 1, ["drop_path", "cola"]),
        (["--data.task", "acceptability", "--data.image_size", "32"], 1, ["image_size", "acceptability"]),
        (["--optim.auxiliary_weight", "0.1"], 1, ["auxiliary_weight 0.1", "lambda_div"]),
        (["--model.num_experts", "0"], 1, ["num_experts", "0"]),
        (["--model.moe", "none", "--model.num_blocks", "0"], 1, ["num_blocks", "0"]),
    ],
)
def test_options_that_do_not_fit(words, world, expected):
    with pytest.raises(UserError) as error:
        parse_train_config(words).validate(world)
    assert all(word in str(error.value) for word in expected)


@pytest.mark.parametrize("text,group", [("model: 3", "model"), ("data: []", "data"), ("optim: null", "optim")])
def test_a_group_of_options_that_is_none(tmp_path, text, group):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=f"{group} is .* must hold options"):
        parse_train_config(["--config", str(tmp_path / "config.yaml")])
    with pytest.raises(UserError, match=f"{group} is .* must hold options"):
        load_train_config(str(tmp_path / "config.yaml"))


def test_a_file_of_options_that_is_no_text(tmp_path):
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="utf-8"):
        parse_train_config(["--config", str(tmp_path / "config.yaml")])
    with pytest.raises(UserError, match="config.yaml"):
        load_train_config(str(tmp_path / "config.yaml"))


def test_resume_keeps_the_options_of_the_run(tmp_path):
    words = ["--model.num_experts", "4", "--optim.lr", "0.01", "--output", str(tmp_path)]
    (tmp_path / "config.yaml").write_text(dump_train_config(parse_train_config([*words, "--steps", "30"])))
    resumed = parse_train_config(["--resume", "--output", str(tmp_path), "--optim.lr", "0.02"])
    assert (resumed.model.num_experts, resumed.steps, resumed.optim.lr, resumed.resume) == (4, 30, 0.02, True)


def test_yaml_round_trip_and_shipped_configs(tmp_path):
    config = parse_train_config(["--model.layers", "[1,2]", "--optim.betas", "[0.8,0.9]", "--resume", "--output", "x"])
    assert config.resume and config.model.layers == [1, 2]
    path = tmp_path / "c.yaml"
    path.write_text(dump_train_config(config))
    assert load_train_config(str(path)) == config
    for shipped in (ROOT / "configs").glob("*.yaml"):
        parse_train_config(["--config", str(shipped)]).validate(2)
    assert parse_train_config(["--config", str(ROOT / "configs/digits.yaml")]) == TrainConfig()


@pytest.mark.parametrize("inside", ["", "run"])
def test_output_that_is_a_file(inside, tmp_path):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UserError, match="--output .*file"):
        choose_folder(make_config(tmp_path / "file" / inside))
