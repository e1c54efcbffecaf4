"""The project's own GPU tests; without a card a few of their cases, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from unifmoe_dist.studies.gpu_check.processes import ROOT
from unifmoe_dist.studies.gpu_check.record import FAILED, NOTE, OK, SKIPPED, LeftOut, Record

INTERPRETED = ("routing_cases.py", "-k", "ties or mask")
MISSING = "FILES WITHOUT A LIBRARY"
_RESERVE = 5.0  # seconds for what comes after the tests
_LINE = re.compile(
    r"(?:^|\] )(?:\[ *\d+%\] )?(PASSED|FAILED|ERROR|SKIPPED) +(\S+)|^(\S+::\S+.*?) (PASSED|FAILED|ERROR|SKIPPED)"
)
_NO_FILE = re.compile(r"^_+ ERROR collecting (\S+) _+$(.*?)^E +(\w+(?:Error|Exception)\b.*?)$", re.M | re.S)


def on_card(marks: str = "gpu") -> list[str]:
    """Words for pytest: the files that have GPU tests, as others may need what is not installed."""
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    return ["-m", marks, *(str(path.relative_to(ROOT)) for path in files)]


def check(record: Record) -> None:
    with record.attempt("pytest"):
        if importlib.util.find_spec("pytest") is None:
            raise LeftOut("pytest is not installed: the GPU tests do not run")
        if not (ROOT / "tests" / "kernels").is_dir():
            raise LeftOut("tests/ is not beside the package: the GPU tests do not run")
        log = record.path.with_name("tests-output.txt")
        late = _run(record, log)
        _tell(record, log, late)


def _run(record: Record, log: Path) -> bool:
    """Run pytest as long as there is time, slow tests last; whether it was ended before it was through."""
    words = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "--color=no"]
    words += ["--continue-on-collection-errors"]
    if importlib.util.find_spec("xdist") is not None and record.on_card:
        words += ["-n", str(min(8, max(2, (os.cpu_count() or 2) // 2)))]
    runs = [on_card("gpu and not slow"), on_card("gpu and slow")] if record.on_card else [INTERPRETED]
    folder = ROOT if record.on_card else ROOT / "tests" / "kernels" / "triton"
    env = os.environ | {"COLUMNS": "240"}  # for a reason on one line
    with log.open("w") as output:
        for run in runs:
            process = subprocess.Popen([*words, *run], cwd=folder, stdout=output, stderr=subprocess.STDOUT, env=env)
            try:
                process.wait(max(1.0, record.left - _RESERVE))
            except subprocess.TimeoutExpired:
                process.kill()
                return True
    return False


def outcomes(text: str) -> dict[str, str]:
    """What became of every test, by name, in pytest's verbose output, of several workers or of one; and of every file
    that could not be imported: `MISSING` where a library is not installed."""
    found = {}
    for line in text.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):  # the summary says them once more
            continue
        if match := _LINE.search(line):
            found[match[2] or match[3]] = match[1] or match[4]
    for file, why in _not_imported(text).items():
        found[file] = MISSING if re.search(r"No module named '(?!unifmoe_dist|tests)", why) else "ERROR"
    return found


def _not_imported(text: str) -> dict[str, str]:
    """Why which files could not be, of which no line of a test tells."""
    return {file: why for file, _, why in _NO_FILE.findall(text)}


def _tell(record: Record, log: Path, late: bool) -> None:
    text = log.read_text(errors="replace")
    found = outcomes(text)
    kinds = ("PASSED", "FAILED", "ERROR", "SKIPPED", MISSING)
    counts = {kind: sum(value == kind for value in found.values()) for kind in kinds}
    said = ", ".join(f"{count} {kind.lower()}" for kind, count in counts.items() if count) or "no test ran"
    for name, value in found.items():
        if value in ("FAILED", "ERROR"):
            record.find(name, FAILED, f"{_reason(text, name)} (parts/{log.name})")
        elif value == MISSING:
            record.find(name, SKIPPED, f"none of its tests ran: {_reason(text, name)}")
    if late:
        record.find("time", NOTE, f"the tests were ended where their time was: {said} until then")
    if not counts["PASSED"] and not counts["FAILED"]:
        last = " / ".join(text.strip().splitlines()[-3:])
        record.find("tests", SKIPPED if counts["SKIPPED"] else FAILED, f"{said}: {last}"[:400])
    else:
        record.find("tests", FAILED if counts["FAILED"] or counts["ERROR"] else OK, said)
    record.row(
        "tests",
        "Tests of the project",
        {"tests": " ".join(on_card() if record.on_card else INTERPRETED), "result": said},
    )
    record.numbers |= {"counts": counts, "outcomes": found}


def _reason(text: str, name: str) -> str:
    """What pytest says of a file that could not be imported or, in its summary, of a test that failed."""
    if name in (whys := _not_imported(text)):
        return whys[name]
    match = re.search(rf"^(?:FAILED|ERROR) {re.escape(name)} - (.*)$", text, re.M)
    return match[1] if match else "see the log"
