"""Commands work whatever environment they have inherited: a notebook's plots, a terminal without Greek letters."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import warnings

import pytest

from tests.support.jobs import ROOT
from unifmoe_dist.runtime import terminal
from unifmoe_dist.train import cli

PROGRAM = r"""
import sys, warnings
from pathlib import Path
from unifmoe_dist.train.cli import run_main

def main(arguments):
    from unifmoe_dist.studies.training_plots import plot_run
    from unifmoe_dist.files import write_text
    print("\u03b1 0.43 \u00d7 2", flush=True)
    print("\u03b1", file=sys.stderr)
    plot_run(Path(arguments[0]))
    write_text(Path(arguments[0]) / "report.md", "\u03b1")

run_main(main)
"""


def test_what_a_notebook_or_a_plain_terminal_hands_down(tmp_path):
    record = {"kind": "train", "step": 1, "loss": 1.0, "task_loss": 1.0, "div_loss": 0.0, "accuracy": 0.5, "layers": {}}
    validation = {"kind": "validation", "step": 1, "metric": "accuracy", "accuracy": 0.5, "layers": {}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(validation) + "\n")
    environment = {
        **os.environ,
        "MPLBACKEND": "module://no_such_notebook.backend",
        "PYTHONPATH": str(ROOT),
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONUTF8": "0",
    }
    done = subprocess.run([sys.executable, "-c", PROGRAM, tmp_path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "alpha 0.43 x 2\n" and "alpha\n" in done.stderr
    assert (tmp_path / "plots" / "curves.png").is_file()
    assert (tmp_path / "report.md").read_bytes() == "α".encode()


@pytest.fixture(autouse=True)
def undone(monkeypatch):
    """What `prepare` changes for the process is as before afterwards."""
    monkeypatch.setenv("MPLBACKEND", os.environ["MPLBACKEND"])
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)


def test_every_character_is_printed(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", stream)
    terminal.prepare()
    print("70 µm, é, λ = 0.1 ± 0.2 → 丁", flush=True)
    assert stream.buffer.getvalue().decode("latin-1") == "70 µm, é, lambda = 0.1 ± 0.2 -> ?\n"


def test_own_warnings_are_sentences_and_those_of_libraries_say_where():
    terminal.prepare()
    own, other = cli.__file__, json.__file__
    assert warnings.formatwarning("too few images", UserWarning, own, 3) == "warning: too few images\n"
    assert "json/__init__.py:3: UserWarning: odd" in warnings.formatwarning("odd", UserWarning, other, 3)
    assert "DeprecationWarning" in warnings.formatwarning("old", DeprecationWarning, own, 3)


def test_closed_streams_are_no_matter(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    terminal.prepare()


def test_a_finished_run_does_not_fail_for_its_plots(tmp_path, capsys):
    from unifmoe_dist.studies.training_plots import draw_finished

    draw_finished(tmp_path)
    assert capsys.readouterr().err.startswith("warning: the plots could not be drawn (")
