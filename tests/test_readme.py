"""The README keeps its word: its Python runs, and the options that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.engine.cli import parse_train_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.S)
SHELL = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.S))
TRAIN_LINES = re.findall(r"^.*launch/train\.py(.*?)(?:\s+#.*)?$", SHELL, re.M)


@pytest.mark.parametrize("code", SNIPPETS, ids=range(len(SNIPPETS)))
def test_python_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("line", TRAIN_LINES)
def test_training_options_exist(line):
    words = [str(ROOT / w) if w.startswith("configs/") else w for w in line.split()]
    assert isinstance(parse_train_config(words), TrainConfig)


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)#]+)\)", README))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()


def test_options_in_the_text_exist():
    for group, name in re.findall(r"`(model|data|optim|parallel)\.(\w+)", README):
        assert hasattr(getattr(TrainConfig(), group), name), f"{group}.{name}"
