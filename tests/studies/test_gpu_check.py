"""The check of a device: the whole command on a machine without a card, parts that break, and what only a card runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from unittest.mock import create_autospec

import pytest
import torch

from tests.support.jobs import environment
from tests.support.pages import Reader
from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.gpu_check import device, suite, whole, writing
from unifmoe_dist.studies.gpu_check.parts import PARTS, Part
from unifmoe_dist.studies.gpu_check.record import LeftOut, Record

ROOT = Path(__file__).parents[2]
COMMAND = ROOT / "launch" / "gpu_check.py"
BROKEN = "tests.support.broken_parts"


NAMES = [part.name for part in PARTS]
FIRST = ["card", "tests", "layers-vision", "one-rank"]
SECOND = ["training-deit", "memory-fp32", "launches", "benchmark"]
TABLES = {name: name for name in ("card", "tests", "one-rank", "launches")}
TABLES |= {"layers-vision": "errors", "training-deit": "training", "memory-fp32": "memory"}


def test_one_part_of_each_kind_is_run():
    run = {part.function for part in PARTS if part.name in FIRST + SECOND}
    assert run == {part.function for part in PARTS}


@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.is_available(), reason="this is how it goes without a card")
@pytest.mark.parametrize(
    "names", [FIRST, SECOND, pytest.param(NAMES, marks=pytest.mark.slow)], ids=["first", "second", "all"]
)
def test_the_command_without_a_card(names, tmp_path):
    """From a bare checkout, in another folder, and without PYTHONPATH."""
    bare = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    words = [sys.executable, COMMAND, "--output", "made", "--minutes", "30"]  # other tests run beside it
    words += [] if names is NAMES else ["--only", *names]
    run = subprocess.run(words, cwd=tmp_path, env=bare, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    results = json.loads((tmp_path / "made" / "results.json").read_text())
    assert [part["name"] for part in results["parts"]] == names
    assert results["complete"] and not results["card"] and not writing.failed_parts(results)
    assert all(any(f["verdict"] == "ok" for f in part["findings"]) for part in results["parts"])
    tables = {TABLES[name] for name in names if name in TABLES}
    assert set(writing.tables_of(results)) >= tables
    page = Reader((tmp_path / "made" / "report.html").read_text())
    assert "No card was there" in page.text and "times mean nothing" in page.text
    assert all(page.tables[table] for table in tables)
    assert "errors" not in tables or len(page.tables["errors"]) == (10 if names is NAMES else 4)
    assert "no card was there" in run.stdout and "all parts that ran passed" in run.stdout
    assert len(run.stdout.partition("\n\n")[2].splitlines()) <= 100
    lines = (tmp_path / "made" / "tables.md").read_text().splitlines()
    assert all("no card (interpreter)" in line for line in lines if line.startswith("| vision"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_only_a_card_runs():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "gpu_check_cases.py"],
        cwd=Path(__file__).parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]


# -- parts that break -------------------------------------------------------------------------------------------------


def part(name: str, **more) -> Part:
    return Part(name, f"part that {name}", f"{BROKEN}:{name}", **more)


@pytest.fixture
def no_card(monkeypatch):
    monkeypatch.setattr(whole, "find_card", lambda: ("", 0))
    monkeypatch.setattr(signal, "signal", lambda *_: None)


def test_parts_that_break_are_named_and_the_rest_goes_on(tmp_path, no_card, capsys):
    names = ["raises", "crashes", "hangs", "loses_the_device", "leaves_out", "works"]
    parts = [part(name, share=0.3 if name == "hangs" else 1.0) for name in names]
    results = whole.check(parts, tmp_path, 1.0, jobs=2)
    by_name = {done["name"]: done for done in results["parts"]}
    assert list(by_name) == names
    texts = {name: " ".join(f["text"] for f in done["findings"]) for name, done in by_name.items()}
    assert writing.failed_parts(results) == ["raises", "crashes", "hangs", "loses_the_device"]
    assert "ArithmeticError: the sum is wrong" in texts["raises"] and "done all the same" in texts["raises"]
    assert "this is kept" in texts["crashes"] and "SIGSEGV; it was at: a kernel" in texts["crashes"]
    assert "did not end within its" in texts["hangs"] and "it was at: a wait" in texts["hangs"]
    assert "in hangs" in (tmp_path / "parts" / "hangs.log").read_text()  # where it hung
    assert "an error of the device ends its process" in texts["loses_the_device"]
    assert by_name["leaves_out"]["status"] == "skipped" and "no_such_library is not installed" in texts["leaves_out"]
    assert by_name["works"]["status"] == "ok" and results["complete"]
    said = capsys.readouterr().out
    assert all(f"part that {name}" in said for name in names)
    assert json.loads((tmp_path / "results.json").read_text())["parts"] == json.loads(json.dumps(results["parts"]))
    assert "failed: raises, crashes, hangs, loses_the_device" in writing.summary(tmp_path, results)
    assert "| one | 1 | no card (interpreter), " in (tmp_path / "tables.md").read_text()
    assert "part that hangs" in Reader((tmp_path / "report.html").read_text()).text


def test_a_check_that_is_ended_leaves_what_it_has(tmp_path):
    code = f"""
import sys
from pathlib import Path
from unifmoe_dist.studies.gpu_check import whole
from unifmoe_dist.studies.gpu_check.parts import Part
whole.find_card = lambda: ("", 0)
parts = [Part(name, name, "{BROKEN}:" + name) for name in ("works", "hangs")]
whole.check(parts, Path(sys.argv[1]), 5.0, jobs=2)
"""
    words = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "works" not in process.stdout.readline():
        assert process.poll() is None
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    results = json.loads((tmp_path / "results.json").read_text())
    assert [done["name"] for done in results["parts"]] == ["works"] and not results["complete"]
    assert "was ended before" in Reader((tmp_path / "report.html").read_text()).text
    assert not running(f"{tmp_path}/parts/hangs")  # its own: another test may have the same part at work


def running(word: str) -> list[str]:
    """Command lines of processes that still contain a word five seconds later."""
    for _ in range(50):
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                found += [line for line in [path.read_text()] if word in line]
            except OSError:
                continue
        if not found:
            return []
        time.sleep(0.1)
    return found


def test_the_command_needs_nothing_but_what_it_names():
    """Without any library: help, and one sentence."""
    run = subprocess.run([sys.executable, "-S", COMMAND, "--help"], capture_output=True, text=True, cwd="/")
    assert run.returncode == 0 and "--minutes" in run.stdout, run.stderr
    run = subprocess.run([sys.executable, "-S", COMMAND], capture_output=True, text=True, cwd="/")
    assert run.returncode == 2 and run.stderr.startswith("error: torch and triton and pydantic are not installed, ")


def test_mistakes_are_one_sentence(tmp_path, monkeypatch):
    from launch import gpu_check

    for words, said in (
        (["--minutes", "0"], "--minutes must be above 0"),
        (["--only", "nothing"], "nothing"),
        (["--report", str(tmp_path)], "holds no results.json"),
    ):
        with pytest.raises(UserError, match=said):
            gpu_check.main(words)


def test_the_page_is_made_again_from_results(tmp_path, monkeypatch, capsys):
    from launch import gpu_check

    results = {"card": "a card", "date": "2026-01-01", "minutes": 8, "command": "", "complete": True, "parts": []}
    writing.write_results(tmp_path, results)
    assert gpu_check.main(["--report", str(tmp_path)]) == 0
    assert "Check of a card" in Reader((tmp_path / "report.html").read_text()).text

    def without_jinja(*_, **__):
        raise ModuleNotFoundError("No module named 'jinja2'")

    monkeypatch.setattr("unifmoe_dist.studies.page.write_page", without_jinja)
    assert gpu_check.main(["--report", str(tmp_path)]) == 1
    assert "no page (ModuleNotFoundError: No module named 'jinja2'); elsewhere: " in capsys.readouterr().out


# -- what asks CUDA, with stand-ins that know CUDA's own names and arguments ------------------------------------------


@pytest.fixture
def cuda(monkeypatch):
    """Stand-ins in torch.cuda: what does not exist there, or takes other arguments, is refused."""
    for name in (
        *("Event", "Stream", "stream", "current_stream", "CUDAGraph", "graph", "synchronize"),
        *("set_sync_debug_mode", "get_device_name"),
    ):
        monkeypatch.setattr(torch.cuda, name, create_autospec(getattr(torch.cuda, name)))
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    torch.cuda.Event.return_value.elapsed_time.return_value = 8.0  # milliseconds
    return torch.device("cuda")


def test_clock(cuda):
    calls = []
    seconds = device.clock(lambda: calls.append(1), cuda)
    timed = len(calls) - 1  # after a first one, as many as fit into two milliseconds
    assert 1 < timed <= 100 and seconds == pytest.approx(8e-3 / timed)
    assert device.clock(lambda: time.sleep(0.01), cuda) == pytest.approx(8e-3)
    assert device.clock(lambda: time.sleep(0.01), torch.device("cpu")) >= 0.01


def test_captured(cuda):
    calls = []
    replay = device.captured(lambda: calls.append(1), cuda)
    assert len(calls) == 4 and replay is torch.cuda.CUDAGraph.return_value.replay
    assert torch.cuda.graph.call_args.args == (torch.cuda.CUDAGraph.return_value,)
    with pytest.raises(LeftOut):
        device.captured(lambda: None, torch.device("cpu"))


def test_launched(cuda, monkeypatch):
    from torch.autograd import DeviceType

    class Event:
        def __init__(self, name, device_type):
            self.name, self.device_type = name, device_type

    profile = create_autospec(torch.profiler.profile)
    seen = [("unifmoe::route", DeviceType.CUDA), ("ffn_kernel", DeviceType.CUDA), ("cudaLaunchKernel", DeviceType.CPU)]
    events = [Event(*one) for one in seen]
    profile.return_value.__enter__.return_value.events.return_value = events
    monkeypatch.setattr(torch.profiler, "profile", profile)
    assert device.launched(lambda: None, cuda) == ["ffn_kernel"]


@pytest.mark.filterwarnings("ignore:called a synchronizing", "ignore:something else")
def test_host_waits(cuda):
    def call():
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    assert len(device.host_waits(call, cuda)) == 1
    assert [call.args for call in torch.cuda.set_sync_debug_mode.call_args_list] == [("warn",), (0,)]
    assert device.host_waits(call, torch.device("cpu")) == []


def test_driver(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '1980 MHz, 90.5 W'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert device.driver("clocks.sm,power.draw") == {"clocks.sm": "1980 MHz", "power.draw": "90.5 W"}
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert device.driver("clocks.sm") == {}


def test_card_is_found_or_not(monkeypatch):
    monkeypatch.setattr(whole, "_ASK", "print('a warning'); print(150_000_000_000, 'NVIDIA H200')")
    assert whole.find_card() == ("NVIDIA H200", 150_000_000_000)
    monkeypatch.setattr(whole, "_ASK", "raise SystemExit(3)")
    assert whole.find_card() == ("", 0)
    assert whole._jobs(25 * 10**9) <= 2 or len(os.sched_getaffinity(0)) < 3


def test_all_gpu_tests_are_found():
    words = suite.on_card()
    assert words[:2] == ["-m", "gpu"] and "tests/kernels/triton/test_triton.py" in words and len(words) > 4


NOT_IMPORTED = """
==================================== ERRORS ====================================
________________________ ERROR collecting tests/b.py ________________________
ImportError while importing test module '/src/tests/b.py'.
Hint: make sure your test modules/packages have valid Python names.
Traceback:
tests/b.py:16: in <module>
    from transformers import BatchEncoding
E   {}
=========================== short test summary info ============================
ERROR tests/b.py
"""  # as pytest says it; none of that file's tests has a line


def test_outcomes_of_tests(tmp_path):
    one = (
        "tests/a.py::test_x[1] PASSED   [ 50%]\ntests/a.py::test_y FAILED   [100%]\nFAILED tests/a.py::test_y - boom\n"
    )
    assert suite.outcomes(one) == {"tests/a.py::test_x[1]": "PASSED", "tests/a.py::test_y": "FAILED"}
    several = "[gw1] [ 50%] PASSED tests/a.py::test_x[1] \n[gw0] [100%] FAILED tests/a.py::test_y \n"
    assert suite.outcomes(several) == suite.outcomes(one)
    log = tmp_path / "log.txt"
    log.write_text(one)
    record = Record(tmp_path / "part.json", 10, on_card=True)
    suite._tell(record, log, late=True)
    found = {finding["what"]: finding for finding in record.findings}
    assert found["tests/a.py::test_y"]["text"].startswith("boom") and found["tests"]["verdict"] == "failed"
    assert found["tests"]["text"] == "1 passed, 1 failed" and found["time"]["verdict"] == "note"
    passed = "tests/a.py::test_x[1] PASSED   [100%]\n"
    for error, verdict, said in (
        ("ModuleNotFoundError: No module named 'mpi4py'", "skipped", "1 passed, 1 files without a library"),
        ("ModuleNotFoundError: No module named 'unifmoe_dist.gone'", "failed", "1 passed, 1 error"),
        ("NameError: name 'x' is not defined", "failed", "1 passed, 1 error"),
    ):
        record = Record(tmp_path / "part.json", 10, on_card=True)
        log.write_text(passed + NOT_IMPORTED.format(error))
        suite._tell(record, log, late=False)
        found = {finding["what"]: finding for finding in record.findings}
        assert error in found["tests/b.py"]["text"] and found["tests/b.py"]["verdict"] == verdict
        assert found["tests"]["text"] == said and found["tests"]["verdict"] == verdict.replace("skipped", "ok")
    log.write_text("no such option\n")
    suite._tell(record, log, late=False)
    assert record.findings[-1] == {"what": "tests", "verdict": "failed", "text": "no test ran: no such option"}
