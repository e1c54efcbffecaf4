"""Every table of the paper by its own command, on tiny data in the official layouts, from sweep to report."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.support.glue_tables import write_rte
from tests.support.tiny_images import make_benchmark

ROOT = Path(__file__).parents[2]


def script(name: str):
    spec = importlib.util.spec_from_file_location(f"launch_{name}", ROOT / "launch" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for name in ("pacs", "vlcs"):
        make_benchmark(root, name, per_class=5)
    write_rte(root / "RTE", 24, 11)
    return root


def vision(data: Path, *more: str) -> list[str]:
    small = ["data.image_size=32", "data.batch_size=4", "data.workers=0", "steps=2", "eval_every=2"]
    return [
        "--set",
        f"data.root={data}",
        "model.backbone=test_vit",
        "model.pretrained=none",
        "model.layers=[1,3]",
        *small,
        *more,
    ]


def language(data: Path) -> list[str]:
    return [
        "--set",
        f"data.root={data}",
        "model.backbone=tiny-bert",
        "model.pretrained=none",
        "model.layers=[1,3]",
        "model.num_experts=4",
        "parallel.precision=fp32",
        "data.batch_size=8",
        "epochs=1",
    ]


def sweep(output: Path, capsys, *words: str) -> int:
    """Run a sweep to its end; the number of its runs."""
    script("sweep").main(["--output", str(output), "--jobs", "1", "--discard-checkpoints", *words])
    done = re.search(r"(\d+) of (\d+) runs are finished", capsys.readouterr().out)
    assert done and done[1] == done[2]
    return int(done[1])


def report(output: Path, capsys) -> str:
    script("report").main([str(output)])
    return capsys.readouterr().out


@pytest.mark.timeout(600)
def test_domainbed(data, tmp_path, capsys):
    """Two data sets, two and one held-out environments, two seeds, three methods."""
    words = [
        "--table",
        "domainbed",
        "--tasks",
        "pacs",
        "vlcs",
        "--held-out",
        "Art",
        "Sketch",
        "Caltech101",
        "--methods",
        "dense",
        "emoe",
        "unif",
        "--seeds",
        "0",
        "1",
    ]
    assert sweep(tmp_path, capsys, *words, *vision(data)) == 18
    page = report(tmp_path, capsys)
    assert "18 of 18 planned runs have finished." in page
    rows = {line.split(" | ")[0].strip("| "): line for line in page.splitlines() if line.startswith("| ")}
    for label in ("Dense", "EMoE", "UniF-MoE"):
        assert re.search(r"\d+\.\d ± \d+\.\d", rows[label]), rows[label]
    assert "89.6" in page  # the paper's UniF-MoE on PACS stands beside
    for name in ("domainbed.md", "domainbed.tex", "domainbed.csv", "domainbed.png"):
        assert (tmp_path / "report" / name).stat().st_size > 300


@pytest.mark.timeout(300)
def test_ablation_blocks_and_diversity_share_runs(data, tmp_path, capsys):
    one = ["--seeds", "0", "--held-out", "Photo", "--tasks", "pacs"]
    assert sweep(tmp_path, capsys, "--table", "ablation", *one, *vision(data)) == 4
    script("sweep").main(
        [
            "--output",
            str(tmp_path),
            "--jobs",
            "1",
            "--discard-checkpoints",
            "--table",
            "blocks",
            *one,
            "--methods",
            "unif",
            "unif-blocks-16",
            *vision(data),
        ]
    )
    assert "2 of 2 runs are finished, 1 of them now" in capsys.readouterr().out
    page = report(tmp_path, capsys)
    assert "fixed α" in page and "B = 16" in page


@pytest.mark.timeout(300)
def test_glue_chooses_the_learning_rate_by_validation(data, tmp_path, capsys):
    words = ["--table", "glue", "--tasks", "rte", "--seeds", "0", "--lr", "2e-5", "5e-5"]
    assert sweep(tmp_path, capsys, *words, "--methods", "dense", "top2", *language(data)) == 4
    assert (
        sweep(
            tmp_path,
            capsys,
            "--table",
            "diversity",
            "--tasks",
            "rte",
            "--seeds",
            "0",
            "--lr",
            "2e-5",
            "--methods",
            "unif",
            "unif-lambda-0",
            *language(data),
        )
        == 2
    )
    page = report(tmp_path, capsys)
    assert "75.47" in page  # the paper's UniF-MoE on RTE stands beside
    assert re.search(r"\| Standard MoE, top-2 \|.*\d+\.\d", page)
