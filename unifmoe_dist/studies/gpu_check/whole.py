"""The whole check: what is needed, the parts, and one folder of results that is there after every part."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from unifmoe_dist.errors import UserError
from unifmoe_dist.studies.gpu_check.parts import Part
from unifmoe_dist.studies.gpu_check.processes import Done, environment, run_parts
from unifmoe_dist.studies.gpu_check.record import FAILED
from unifmoe_dist.studies.gpu_check.writing import write_page, write_results

NEEDED = ("torch", "triton", "pydantic")
_WRITING = 8.0  # seconds for the page
_ASK = (
    "import torch; c = torch.cuda; "
    "print(c.get_device_properties(0).total_memory, c.get_device_name(0)) if c.is_available() else None"
)
_MEMORY = 8 * 2**30  # of a card, that a part may need


def check(parts: Sequence[Part], output: Path | None, minutes: float, jobs: int | None = None) -> dict[str, Any]:
    """Run the parts and write the folder; returns what results.json holds.

    Raises:
        UserError: a library is missing without which no part runs.
    """
    started = time.monotonic()
    _see_what_is_needed()
    card, memory = find_card()
    when = datetime.now().astimezone()
    folder = output or Path("runs", f"gpu-check-{_word(card or 'no-card')}-{when:%Y%m%d-%H%M%S}")
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"card": card, "date": f"{when:%Y-%m-%d}", "began": when.isoformat(timespec="seconds")}
    results |= {
        "minutes": minutes,
        "command": " ".join(["python", *sys.argv]),
        "complete": False,
        "folder": str(folder),
        "parts": [],
    }
    print(f"{card or 'no card: tiny sizes in an interpreter, times mean nothing'}; results: {folder}", flush=True)

    def tell(done: Done) -> None:
        results["parts"].append(done)
        results["seconds"] = time.monotonic() - started
        write_results(folder, results)
        bad = [finding for finding in done["findings"] if finding["verdict"] == FAILED]
        print(f"{done['status']:8}{done['seconds']:6.1f} s  {done['title']}", flush=True)
        for finding in bad[:4]:
            print(f"{'':18}{finding['what']}: {finding['text'][:200]}", flush=True)

    seconds = max(1.0, 60 * minutes - _WRITING - (time.monotonic() - started))
    signal.signal(signal.SIGTERM, _stop)  # leaves through the lines below
    try:
        run_parts(parts, folder, seconds, jobs or _jobs(memory), bool(card), tell)
        results["complete"] = True
    finally:
        results["parts"].sort(key=lambda done: [part.name for part in parts].index(done["name"]))
        write_results(folder, results)
        write_page(folder, results)
    return results


def _see_what_is_needed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed, without which no layer of "
            f"this project runs: pip install {' '.join(missing)}, or put a folder that has them on PYTHONPATH."
        )


def find_card() -> tuple[str, int]:
    """Name and bytes of the first card; nothing without one, or where asking for it fails or hangs."""
    with suppress(subprocess.TimeoutExpired):
        words = [sys.executable, "-c", _ASK]
        said = subprocess.run(words, capture_output=True, text=True, timeout=90, env=environment(True))
        if said.returncode == 0 and said.stdout.strip():
            memory, name = said.stdout.strip().splitlines()[-1].split(" ", 1)
            return name, int(memory)
    return "", 0


def _word(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _jobs(memory: int) -> int:
    """Parts beside one another: they compile on a core each, and share the card's memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(10, cores, memory // _MEMORY if memory else cores))


def _stop(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)
