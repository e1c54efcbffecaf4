"""A mistake in an option is one sentence that names the value and the fix."""

from __future__ import annotations

import importlib
import os
import subprocess
from pathlib import Path

import pytest

from docs.site_hooks import options
from tests.support.jobs import ROOT
from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime import failure
from unifmoe_dist.train.cli import load_train_config, parse_train_config, train_parser
from unifmoe_dist.train.options import OptionParser


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--stpes 5", "there is no option --stpes; did you mean --steps?"),
        ("--num_experts 8", "there is no option --num_experts; did you mean --model.num_experts?"),
        ("--optim.lambda 1", "there is no option --optim.lambda; did you mean --optim.lambda_div"),
        ("--qqq 1", "there is no option --qqq; see --help for all."),
        ("--num_gpus 2", "--num_gpus is an option of the launcher, so it stands before launch/train.py"),
        ("--steps abc", "--steps must be a whole number, not abc."),
        ("--epochs x", "--epochs must be a whole number or null, not x."),
        ("--optim.lr fast", "--optim.lr must be a number, not fast."),
        ("--model.layers 2,4", "--model.layers must be a list such as [2,4], not 2,4."),
        ("--parallel.precision fp8", "--parallel.precision must be fp32, bf16 or fp16, not fp8."),
        ("--parallel.expert_parallel_size x", "--parallel.expert_parallel_size must be a whole number or auto, not x."),
        ("--model 3", "--model holds options, which are given one by one, such as --model.backbone."),
        ("--config nowhere.yaml", "--config: there is no file"),
        ("--parallel.expert_placement x", "--parallel.expert_placement must be near, far or balanced, not x."),
        ("--parallel.zero_stage 3", "parallel.zero_stage 3 leaves no weight whole on any rank"),
        ("--parallel.zero_stage 4", "--parallel.zero_stage must be 0, 1 or 2, not 4."),
        ("--steps", "--steps needs a value"),
        ("--steps=", "--steps must be a whole number, not empty."),
        ("--optim.betas [0.9,0.95,1]", "--optim.betas must be 2 numbers, not [0.9, 0.95, 1]."),
        ("--optim.betas 0.9", "--optim.betas must be 2 numbers, not 0.9."),
        ("steps 3", "'steps' is one word too many; an option's value stands behind its name"),
        ("--no-baseline true", "'true' is one word too many"),
        ("-s 3", "there is no option -s; see --help for all."),
        ("--config configs", f"--config '{ROOT / 'configs'}' is no file; give a YAML file of options."),
        ("--config=", "--config empty is no file; give a YAML file of options."),
    ],
)
def test_one_sentence(words, sentence, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError) as caught:
        parse_train_config(words.split())
    assert str(caught.value).startswith(sentence)


def test_help_offers_what_works_and_begins_shortly(capsys):
    with pytest.raises(SystemExit):
        parse_train_config(["--help"], prog="train.py")
    shown = capsys.readouterr().out
    assert shown.splitlines()[:2] == ["usage: train.py [--config FILE] [--OPTION VALUE ...]", ""]
    assert "{0,1,2}" in shown.replace("\n", "") and "0,1,2,3" not in shown


@pytest.mark.parametrize(
    "words, switches",
    [
        ("--baseline --no-progress", (True, False, False)),
        ("--no-baseline", (False, True, False)),
        ("--parallel.gradient_checkpointing --steps 3", (True, True, True)),
        ("--baseline false --progress=false --parallel.gradient_checkpointing true", (False, False, True)),
        ("--no-parallel.gradient_checkpointing", (True, True, False)),
    ],
)
def test_switches_stand_alone(words, switches):
    config = parse_train_config(words.split())
    assert (config.baseline, config.progress, config.parallel.gradient_checkpointing) == switches


def test_only_switches_can_be_turned_off():
    with pytest.raises(UserError, match="there is no option --no-steps"):
        parse_train_config(["--no-steps"])


@pytest.fixture
def parser() -> OptionParser:
    result = OptionParser("some.py", description="Does something.")
    result.add_argument("run", type=Path)
    result.add_argument("--split", choices=("test", "validation"))
    result.add_argument("--count", type=int, nargs="+")
    result.add_argument("--rate", type=float, default=0.5)
    return result


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("run --splt test", "there is no option --splt; did you mean --split?"),
        ("run --qqq=1", "there is no option --qqq; see --help."),
        ("run other", "'other' is one word too many; see --help for what the command takes."),
        ("run --split tset", "--split must be test or validation, not tset; did you mean test?"),
        ("run --count x", "--count must be a whole number, not x."),
        ("run --rate x", "--rate must be a number, not x."),
        ("run --rate", "--rate needs a value; see --help."),
        ("run --count", "--count needs one value or more; see --help."),
        ("run --spl test", "there is no option --spl; did you mean --split?"),
        ("", "run must be given; see --help."),
    ],
)
def test_one_sentence_in_every_script(parser, words, sentence):
    with pytest.raises(UserError) as caught:
        parser.parse_args(words.split())
    assert str(caught.value) == sentence


def test_options_that_change_nothing_are_refused(parser):
    assert parser.given(["run", "--rate", "0.5"]) == {"rate": "--rate"}
    parser.refuse_others(["run", "--rate", "1"], ["rate"], "it takes --rate alone")
    with pytest.raises(UserError, match="it takes --rate alone, so --split and --count would change nothing"):
        parser.refuse_others("run --rate 1 --count 3 --split test".split(), ["rate"], "it takes --rate alone")


def test_every_script_parses_alike():
    """A parser of argparse's own would exit with its usage in place of one sentence."""
    for path in (ROOT / "launch").glob("*.py"):
        assert "ArgumentParser(" not in path.read_text(), path


@pytest.mark.parametrize(
    "script, words, sentence",
    [
        ("scale", "--predict runs/x --experts 4 --zero 1", "so --experts and --zero would change nothing"),
        ("scale", "--predict runs/x --ranks 2", "so --ranks would change nothing"),
        ("scale", "--volume --ranks 2", "--volume takes no other option: --ranks 2 would change nothing"),
        ("scale", "--nodes 3 --experts 4", "--nodes belongs to --predict"),
        ("rehearse", "cut flood", "there is no scenario 'flood'; choose among cut, kill, slow, slow-link."),
        ("benchmark", "--batch 3", "--batch belongs to --models"),
        ("benchmark", "--models deit-s --tokens 3", "--tokens belongs to --shapes"),
        ("memory", "--ranks 2", "--ranks is for a configuration that is given"),
    ],
)
def test_what_a_script_would_ignore(script, words, sentence, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "launch")
    with pytest.raises(UserError) as caught:
        importlib.import_module(script).main(words.split())
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("step: 3", "line 1: there is no option step; did you mean steps?"),
        ("# mine\nmodel:\n  num_expert: 3", "line 3: there is no option model.num_expert; did you mean model.num"),
        ("num_experts: 4", "line 1: there is no option num_experts; did you mean model.num_experts?"),
        ("algorithm: {lfme: {weight: 1}}", "line 1: there is no option algorithm.lfme.weight; did you mean algorithm"),
        ("qqqq: 1", "line 1: there is no option qqqq; see --help for all."),
        ("", "is empty; write options such as `steps: 200` into it"),
        ("# nothing yet\n", "is empty; write options"),
        ("hello", "holds no options; write them as lines"),
        ("- steps", "holds no options; write them as lines"),
        ("seed: 1\nsteps: many", "line 2: steps must be a whole number, not many."),
        (
            "data:\n  task: digit",
            "line 2: data.task must be digits, digit-sources, emoji, emoji-seen, acceptability, pacs",
        ),
        ("steps: null", "line 1: steps must have a value, not null; leave it out for the default."),
        ("seed: 1\nsteps:", "line 2: steps must have a value, not empty; leave it out for the default."),
        ("model: 3", "line 1: model is 3, but must hold options, such as model.backbone."),
        ("steps: 3\nseed: 1\nsteps: 4", "line 3: steps is given twice, first in line 1; keep one of them."),
        ("model.top_k: 1\nmodel:\n  top_k: 2", "line 3: model.top_k is given twice, first in line 1"),
        ("seed: 1\noptim: {betas: 0.9}", "line 2: optim.betas must be 2 numbers, not 0.9."),
        ("[steps]: 3", "line 1: there is no option a list; see --help for all."),
        ("steps: [1", "this is no YAML: while parsing a flow sequence expected"),
        ("model:\n\ttop_k: 2", "line 2: this is no YAML: while scanning"),
    ],
)
def test_a_mistake_in_a_file_names_file_line_and_nearest_option(text, sentence, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    for read in (
        lambda: parse_train_config(["--steps", "3", "--config", str(path)]),
        lambda: parse_train_config([f"--config={path}", "--steps", "3"]),
        lambda: load_train_config(str(path)),
    ):
        with pytest.raises(UserError) as caught:
            read()
        assert str(caught.value).startswith(str(path)) and sentence in str(caught.value)


def test_files_that_are_right_are_read_as_before(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model: {top_k: 3}\noptim: {lr: 0.1}\nmodel.num_blocks: 4\nepochs: null\n")
    config = parse_train_config(["--config", str(path), "--model.num_experts", "5"])
    assert (config.model.top_k, config.model.num_blocks, config.model.num_experts) == (3, 4, 5)
    assert (config.optim.lr, config.epochs) == (0.1, None)


def test_every_option_is_listed_with_its_default_and_explanation():
    listed = {option.name: option for option in options()}
    assert set(listed) == set(train_parser().get_defaults().keys()) - {"config"}
    for name, option in listed.items():
        assert option.text.endswith(".") and option.values, name
    assert listed["steps"].values == "a whole number" and listed["epochs"].may_be_null
    assert (listed["optim.betas"].values, listed["model.layers"].values) == ("2 numbers", "a list of whole numbers")


def test_claims_of_ended_launchers_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(failure.tempfile, "gettempdir", lambda: str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    old = tmp_path / f"unifmoe-failure-{os.getuid()}-{ended.pid}"
    alive, other = old.with_name(f"unifmoe-failure-{os.getuid()}-1"), tmp_path / "unifmoe-failure-notes"
    for path in (old, alive, other):
        path.write_text("{}")
    assert failure._claim(0, "a sentence") is None
    own = old.with_name(f"unifmoe-failure-{os.getuid()}-{os.getppid()}")
    assert {*tmp_path.iterdir()} == {alive, other, own}
