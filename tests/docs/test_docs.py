"""The README and docs/ keep their word: their Python runs, and the options, commands and links that they name exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import unifmoe_dist
from docs.site_hooks import options
from launch import analyze
from launch.train import plan_options
from tests.support.jobs import run_job
from unifmoe_dist.config import TrainConfig
from unifmoe_dist.train.cli import parse_train_config

ROOT = Path(__file__).parents[2]
PAGES = {path.relative_to(ROOT): path.read_text() for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
SHELL = "\n".join(block for text in PAGES.values() for block in re.findall(r"```bash\n(.*?)```", text, re.S))
SHELL = SHELL.replace("\\\n", " ")
TRAIN_LINES = sorted(set(re.findall(r"^(.*)launch/train\.py(.*?)(?:\s+#.*)?$", SHELL, re.M)))
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


@pytest.mark.parametrize("launcher, line", TRAIN_LINES)
def test_training_options_exist_and_fit_the_ranks(launcher, line):
    words = [str(ROOT / w) if w.startswith("configs/") else w for w in line.split()]
    _, words = plan_options(words)
    config = parse_train_config(words)
    ranks = re.search(
        r"--num_gpus (\d+)|--num_accelerators (\d+)|-np (\d+)|--nproc-per-node (\d+)|--ntasks (\d+)", launcher
    )
    size = config.parallel.expert_parallel_size
    config.validate(int(ranks[ranks.lastindex]) if ranks else 1 if size == "auto" else size)


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


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return folder


def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(site):
    assert (site / "index.html").is_file() and not (site / "site_hooks.py").exists()
    for page in site.rglob("*.html"):
        tags = re.findall(r"<(?:script|img|link)\b[^>]*>", page.read_text())
        loaded = [tag for tag in tags if re.search(r'(?:src|href)="(?:https?:)?//', tag) and "canonical" not in tag]
        assert not loaded, page


def test_the_site_has_every_option_and_public_name(site):
    listed = (site / "options.html").read_text()
    for option in options():
        assert f"--{option.name}<" in listed, option.name
    names = (site / "api.html").read_text()
    for name in (*unifmoe_dist.__all__, "ffn_weights", "Trainer", "TaskData", "use_kernels", "UserError"):
        assert re.search(rf'id="unifmoe_dist[\w.]*\.{name}"', names), name
    assert "Raises:" in names and "Args:" not in names  # docstrings are cut into their sections


def test_the_home_page_leads_everywhere():
    """To every page: by its own links, or those of pages that the navigation holds beside it."""
    home = (ROOT / "docs/index.md").read_text()
    for page in ("quickstart", "tutorial", "glossary", "options", "api", "memory", "clusters", "distributed"):
        assert f"({page}.md)" in home
    pages = {path.name for path in ROOT.glob("docs/*.md")}
    assert {name for name in pages if f": {name}\n" in (ROOT / "mkdocs.yml").read_text()} == pages


def test_the_tutorial(tmp_path, monkeypatch):
    """Its data and model, two ranks with its very options, and a report of the run."""
    monkeypatch.chdir(tmp_path)
    page = PAGES[Path("docs/tutorial.md")]
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(compile(code, "make_tutorial.py", "exec"), {})
    (line,) = re.findall(r"launch/train\.py (--data\.task.*)", page.replace("\\\n", " "))
    words = [
        *line.split(),
        "--steps",
        "20",
        "--eval_every",
        "20",
        "--data.root",
        str(tmp_path / "data/questions"),
        "--model.pretrained",
        str(tmp_path / "models/small-bert"),
        "--output",
        str(tmp_path / "run"),
    ]
    job = run_job(tmp_path, 2, words, timeout=200)
    assert job.statuses == [0, 0], job.output
    assert "UniF-MoE on cola: test matthews correlation " in job.output and "s on 2 ranks" in job.output
    analyze.main([str(tmp_path / "run"), "--tokens", "200"])
    report = (tmp_path / "run/analysis/report.html").read_text()
    assert "UniF-MoE on cola" in report
