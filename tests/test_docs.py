"""The README and docs/ keep their word: their Python runs, and the options, commands and links that they name exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unifmoe_dist.analysis.memory.command import plan_options
from unifmoe_dist.config import TrainConfig
from unifmoe_dist.engine.cli import parse_train_config

ROOT = Path(__file__).parent.parent
PAGES = {path.relative_to(ROOT): path.read_text() for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
SHELL = "\n".join(block for text in PAGES.values() for block in re.findall(r"```bash\n(.*?)```", text, re.S))
TRAIN_LINES = sorted(set(re.findall(r"^.*launch/train\.py(.*?)(?:\s+#.*)?$", SHELL, re.M)))
SCRIPTS = sorted(set(re.findall(r"launch/\w+\.py", "\n".join(PAGES.values()))))


def snippets() -> list:
    found = {}
    for page, text in PAGES.items():
        for code in re.findall(r"```python\n(.*?)```", text, re.S):
            found.setdefault(code, page)  # the README repeats some of docs/
    return [pytest.param(code, id=f"{page}-{number}") for number, (code, page) in enumerate(found.items())]


def links() -> list:
    return [
        pytest.param(page, link, id=f"{page}-{link}")
        for page, text in PAGES.items()
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", text)
    ]


@pytest.mark.parametrize("code", snippets())
def test_python_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(code, "snippet", "exec"), {})


@pytest.mark.parametrize("line", TRAIN_LINES)
def test_training_options_exist(line):
    words = [str(ROOT / w) if w.startswith("configs/") else w for w in line.split()]
    _, words = plan_options(words)
    assert isinstance(parse_train_config(words), TrainConfig)


@pytest.mark.parametrize("page, link", links())
def test_links_lead_somewhere(page, link):
    assert (ROOT / page.parent / link).exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_exist(script):
    assert (ROOT / script).is_file()


def test_options_in_the_text_exist():
    config = TrainConfig()
    for page, text in PAGES.items():
        for group, name in re.findall(r"`(model|data|optim|parallel|algorithm)\.(\w+)", text):
            assert hasattr(getattr(config, group), name), f"{group}.{name} in {page}"


def test_the_readme_is_short():
    assert len(PAGES[Path("README.md")].splitlines()) < 300


def test_the_site_builds_without_warnings(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "site" / "index.html").is_file()
