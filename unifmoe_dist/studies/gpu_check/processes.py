"""Parts as processes, each within its time: one that fails, crashes or hangs is named, and the rest goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unifmoe_dist.studies.gpu_check.parts import Part
from unifmoe_dist.studies.gpu_check.record import FAILED, SKIPPED

ROOT = Path(__file__).parents[3]  # what holds the package
TOGETHER = 0.5  # of the time, for the parts that may run beside one another
Done = dict[str, Any]
"""A part that has ended: its name, title, seconds, status, and what its record holds."""


@dataclass
class _Running:
    part: Part
    process: subprocess.Popen
    file: Path
    seconds: float
    started: float = field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        return self.process.poll() is not None or time.monotonic() - self.started > self.seconds


def run_parts(
    parts: Sequence[Part], folder: Path, seconds: float, jobs: int, on_card: bool, tell: Callable[[Done], object]
) -> None:
    """Run parts, up to `jobs` beside one another where they may be, and `tell` of each as it ends."""
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    for alone in (False, True):
        waiting = [part for part in parts if (part.alone and on_card) == alone]
        last = alone or not any(part.alone and on_card for part in parts)
        ends = start + (seconds if last else TOGETHER * seconds)
        running: list[_Running] = []
        try:
            while waiting or running:
                while waiting and len(running) < (1 if alone else jobs):
                    # Of what is left, its place in the queue; most parts end long before their time.
                    left = (ends - time.monotonic()) * (1 if alone else min(1.0, 2 * jobs / len(waiting)))
                    running.append(_start(waiting.pop(0), folder, seconds, left, on_card))
                for one in [one for one in running if one.over]:
                    running.remove(one)
                    tell(_ended(one))
                time.sleep(0.05)
        finally:
            for one in running:
                _kill(one.process)


def _start(part: Part, folder: Path, total: float, left: float, on_card: bool) -> _Running:
    allowed = max(2.0, min(part.share * total, left))
    file = folder / "parts" / f"{part.name}.json"
    file.unlink(missing_ok=True)
    words = [part.function, file, f"{allowed:.1f}", "card" if on_card else "none", *part.arguments]
    with (folder / "parts" / f"{part.name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.one_part", *map(str, words)],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment(on_card),
            start_new_session=True,
        )
    return _Running(part, process, file, allowed)


def environment(on_card: bool) -> dict[str, str]:
    """Of a part's process: this package first, no network, and without a card Triton's interpreter."""
    own = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    own |= {"HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg", "PYTHONUNBUFFERED": "1"}
    own |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4")}  # they run beside one another
    if not on_card:
        own |= {"TRITON_INTERPRET": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **own}


def _ended(one: _Running) -> Done:
    seconds = time.monotonic() - one.started
    late = one.process.poll() is None
    _kill(one.process)
    try:
        found = json.loads(one.file.read_text())
    except (OSError, ValueError):
        found = {"findings": [], "tables": {}, "numbers": {}, "doing": ""}
    status, at = one.process.returncode, found.pop("doing") or "its start"
    why = ""
    if late:
        why = f"it did not end within its {one.seconds:.0f} s; it was at: {at}"
    elif status:
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        why = f"its process ended with {how}; it was at: {at}"
    if why:
        found["findings"].append(
            {"what": one.part.title, "verdict": FAILED, "text": f"{why} (parts/{one.file.stem}.log)"}
        )
    verdicts = [finding["verdict"] for finding in found["findings"]]
    all_skipped = bool(verdicts) and set(verdicts) == {SKIPPED}
    state = FAILED if FAILED in verdicts else SKIPPED if all_skipped else "ok"
    return {"name": one.part.name, "title": one.part.title, "seconds": seconds, "status": state, **found}


def _kill(process: subprocess.Popen) -> None:
    """End a process and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # a process may hang in the driver
        process.wait(10)
