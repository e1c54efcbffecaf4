"""The registry of tasks: a task is one file and one line."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_ranks
from unifmoe_dist.data.registry import TASKS, find_task, register_task
from unifmoe_dist.errors import UserError

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "CONTRIBUTING.md").read_text().partition("## How to add a task")[2].partition("\n## ")[0]
FILE, LINE = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
WORDS = ["--data.task", "stripes", "--data.held_out", "Bright", "--data.batch_size", "4", "--model.num_experts", "2"]


def add_stripes(folder: str) -> None:
    """Add the task of CONTRIBUTING.md as it says, from a folder in place of the package."""
    Path(folder, "stripes.py").write_text(FILE)
    name, place = re.fullmatch(r'"(.*)": "unifmoe_dist\.data\.(.*)",', LINE.strip()).groups()
    sys.path.insert(0, folder)
    register_task(name, place)


def train(rank, world, folder):
    """Two steps on the task, and what else a run asks of it."""
    add_stripes(folder)
    from unifmoe_dist.runtime.ranks import running_ranks
    from unifmoe_dist.studies.memory.fake_step import task_of_sizes
    from unifmoe_dist.train.cli import parse_train_config, train_parser
    from unifmoe_dist.train.own_model import own_model, own_task
    from unifmoe_dist.train.trainer import Trainer

    assert "rte,stripes}" in train_parser("train.py").format_help()
    config = parse_train_config([*WORDS, "--steps", "2", "--eval_every", "2"], prog="train.py")
    config.validate(world)
    with pytest.raises(UserError, match=r"data.root would change nothing in data.task stripes"):
        parse_train_config([*WORDS, "--data.root", folder]).validate(world)
    with pytest.raises(UserError, match="no environment of Stripes; give --data.held_out one of dark, grey, bright"):
        find_task("stripes").held_out(parse_train_config(WORDS[:2]))
    run = Path(folder, "run")
    with running_ranks(1) as ranks:
        summary = Trainer(config, ranks, run).fit()
    own_model(run, config).load_state_dict(own_model(run, config).state_dict())
    assert [len(data) for data in own_task(run, config).test] == [256]
    assert task_of_sizes(config).collate([0, 1])[0]["x"].shape == (2, 1, 16, 16)
    return summary


def test_a_task_is_one_file_and_one_line(tmp_path):
    summary = run_ranks(1, train, str(tmp_path), fresh=True)[0]
    assert (summary["best_step"], summary["task"], summary["held_out"]) == (2, "stripes", "bright")
    assert 0 <= summary["test_accuracy"] <= 1 and "linear_baseline_accuracy" not in summary


def test_a_name_may_be_registered_again(monkeypatch):
    monkeypatch.setattr("unifmoe_dist.data.registry.TASKS", dict(TASKS))
    before = find_task("digits")
    assert find_task("digits") is before
    register_task("digits", "unifmoe_dist.data.task:Task")
    assert type(find_task("digits")).__name__ == "Task"
    register_task("digits", TASKS["digits"])
    assert find_task("digits") is before


@pytest.mark.parametrize("name", TASKS)
def test_every_task_says_what_callers_ask(name):
    from unifmoe_dist.config import DataConfig, ModelConfig, TrainConfig

    task = find_task(name)
    config = TrainConfig(data=DataConfig(task=name), model=ModelConfig(pretrained=None))
    assert task.name == name and task.title and task.num_classes >= 2
    assert (ROOT / "configs" / task.base_config).is_file()
    assert task.class_names is None or len(task.class_names) == task.num_classes
    assert task.next_token or bool(task.environments) != task.language  # texts of several domains are both
    size = (len(task.input_size(config)), len(task.mean))
    assert size == ((1, 1) if task.language else (3, task.input_size(config)[0]))
    with torch.device("meta"):
        model = task.untrained(config)
    assert sum(p.numel() for p in model.parameters()) > 100_000
    held_out = task.environments[-1] if task.environments else "anything"
    config.data.held_out = held_out
    assert task.held_out(config) == (held_out if task.environments else None)


def test_names_of_tasks_are_compared_nowhere_else():
    """No `==`, `!=`, `in` or `match` against the name of a task outside data/."""
    found = []
    for path in sorted([*ROOT.glob("unifmoe_dist/**/*.py"), *ROOT.glob("launch/*.py")]):
        if path.is_relative_to(ROOT / "unifmoe_dist/data"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            compared = node.comparators + [node.left] if isinstance(node, ast.Compare) else []
            compared = [node.value] if isinstance(node, ast.MatchValue) else compared
            names = {part.value for side in compared for part in ast.walk(side) if isinstance(part, ast.Constant)}
            if names & TASKS.keys():
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []
