"""A mistake in an option is one sentence that names the value and the fix."""

from __future__ import annotations

import os
import subprocess

import pytest

from unifmoe_dist.engine import failure
from unifmoe_dist.engine.cli import parse_train_config
from unifmoe_dist.errors import UserError


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
        ("--config nowhere.yaml", "--config: there is no file"),
    ],
)
def test_one_sentence(words, sentence):
    with pytest.raises(UserError) as caught:
        parse_train_config(words.split())
    assert str(caught.value).startswith(sentence)


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
