"""Ctrl-C says at once what it does, and is never followed by a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.jobs import ROOT
from unifmoe_dist.runtime import signals
from unifmoe_dist.runtime.signals import StopSignals

SLOW = "import time\nprint('importing', flush=True)\ntime.sleep(60)\n"


def interrupted(tmp_path, slow: str, *words) -> tuple[int, str]:
    """Exit status and words of a command that is interrupted while it imports a library that takes a minute."""
    (tmp_path / slow).mkdir()
    (tmp_path / slow / "__init__.py").write_text(SLOW)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    process = subprocess.Popen(
        [sys.executable, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's job in the background is made to ignore Ctrl-C, and so is all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=30)[1]
    return process.returncode, said


@pytest.mark.parametrize("script", ["consolidate", "main_job"])
def test_while_a_script_is_imported(script, tmp_path):
    assert interrupted(tmp_path, "jsonargparse", ROOT / "launch" / f"{script}.py") == (-signal.SIGINT, "")


def test_while_a_command_imports_what_it_needs(tmp_path):
    (tmp_path / "unifmoe").write_text("from unifmoe_dist.console import main\nmain()\n")
    words = [tmp_path / "unifmoe", "consolidate", "runs/none", "--output", tmp_path / "x"]
    assert interrupted(tmp_path, "torch", *words) == (130, "interrupted\n")


def test_a_users_own_program_keeps_its_interrupts(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py"])
    before = signal.getsignal(signal.SIGINT)
    signals.while_importing()
    assert signal.getsignal(signal.SIGINT) is before


def test_the_first_signal_is_answered_during_the_step(monkeypatch, capfd):
    """The answer does not wait for the main thread, which may be inside a long step."""
    for rank, said in (("0", True), ("1", False)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with StopSignals() as stops:
            os.kill(os.getpid(), signal.SIGINT)
            limit = time.monotonic() + 5
            err = ""
            while "again" not in err and time.monotonic() < limit and (said or time.monotonic() < limit - 4.5):
                time.sleep(0.02)
                err += capfd.readouterr().err
        assert stops.received == signal.SIGINT
        assert ("finishing this step and saving; Ctrl-C again leaves at once" in err) == said


WAITS = """
import os, signal, sys, time
def save(*_):
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit(3)
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
signal.signal(signal.SIGINT, save)
os.kill(os.getppid(), signal.SIGINT)  # as the terminal does
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""


def test_a_command_waits_for_a_program_that_is_interrupted_with_it():
    before = signal.getsignal(signal.SIGINT)
    assert signals.wait_for([sys.executable, "-c", WAITS], dict(os.environ)) == 3
    assert signal.getsignal(signal.SIGINT) is before


def test_the_launcher_waits_without_a_traceback(tmp_path):
    """DeepSpeed's outer process, interrupted like all others of a terminal's job."""
    (tmp_path / "deepspeed" / "launcher").mkdir(parents=True)
    (tmp_path / "deepspeed" / "__init__.py").touch()
    (tmp_path / "deepspeed" / "launcher" / "__init__.py").touch()
    runner = f"import subprocess, sys\ndef main():\n    sys.exit(subprocess.call([sys.executable, '-c', {WAITS!r}]))\n"
    (tmp_path / "deepspeed" / "launcher" / "runner.py").write_text(runner)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "unifmoe_dist.runtime.deepspeed_launcher"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (3, "saved\n", "")
