"""Runs side by side, each in a clean process of its own: on GPUs one to a device, on the CPU several at a time.

On the CPU a process is forked from a server that has imported everything once, so that it starts in a moment; with GPUs
it starts from nothing, since CUDA does not survive a fork. A process leads a session of its own: a terminal's Ctrl-C
reaches the sweep alone, which then asks the runs to save and leave.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from tqdm import tqdm

from unifmoe_dist.config.named import with_options
from unifmoe_dist.errors import UserError
from unifmoe_dist.runtime import heartbeat
from unifmoe_dist.runtime.local_ranks import process_context, rank_environment, write_output_to
from unifmoe_dist.studies.sweep.planned_runs import Run
from unifmoe_dist.studies.sweep.run_folder import State, has_finished, last_words, locked, prepare, state_of

_TAKEN_STATUS = 75  # sysexits' EX_TEMPFAIL: another process is at work in the folder
_ALIKE = 5


@dataclass(frozen=True)
class Failure:
    """A run that failed: the last line it printed, and where all of it is."""

    run: Run
    reason: str

    @property
    def log(self) -> Path:
        return self.run.folder / "log.txt"


@dataclass
class Outcome:
    """How a sweep ended."""

    skipped: list[Run] = field(default_factory=list)  # had been finished before
    finished: list[Run] = field(default_factory=list)  # now
    elsewhere: list[Run] = field(default_factory=list)  # another sweep is at work on them
    failures: list[Failure] = field(default_factory=list)
    stopped: bool = False  # by somebody
    alike: str = ""  # why it gave up, where its first runs all failed for one reason
    left: list[Run] = field(default_factory=list)  # not finished when it was stopped or gave up


def run_all(
    runs: Sequence[Run],
    places: Sequence[Mapping[str, str]],
    *,
    discard_checkpoints: bool = False,
    progress: bool = True,
) -> Outcome:
    """Do what is not done yet of `runs`, as many at a time as there are places.

    A run that fails, or is killed, ends alone; where the first _ALIKE of them all fail for one reason, no more are
    started, as they would fail too. SIGINT or SIGTERM asks the runs at work to save and returns when they
    have; a second one kills them.

    Args:
        runs: In the order in which they should start.
        places: Environment variables of each place, such as {"CUDA_VISIBLE_DEVICES": "0"}.
        discard_checkpoints: Delete a run's checkpoints once it has finished.
        progress: Show a bar.

    Raises:
        UserError: a folder holds a run with other options, or cannot be used.
    """
    states = {run.folder: state_of(run) for run in runs}
    for run in runs:
        prepare(run)
    outcome = Outcome(skipped=[run for run in runs if states[run.folder] is State.FINISHED])
    todo = deque(run for run in runs if states[run.folder] is not State.FINISHED)
    pool = _Pool(list(places), discard_checkpoints)
    shown = {"desc": "sweep", "unit": "run", "dynamic_ncols": True, "disable": not progress}
    bar = tqdm(total=len(runs), initial=len(outcome.skipped), **shown)
    with _Stop() as stop, bar:
        while pool.at_work or (todo and not (stop.count or outcome.alike)):
            while todo and pool.free and not (stop.count or outcome.alike):
                pool.start(todo.popleft())
            bar.set_postfix_str(f"{len(pool.at_work)} at work, {len(outcome.failures)} failed", refresh=False)
            ended = len(outcome.skipped) + len(outcome.finished) + len(outcome.failures)
            heartbeat.doing(f"{ended} of {len(runs)} runs done, {len(pool.at_work)} at work")
            for run, status in pool.ended(timeout=0.5):
                _account(run, status, bool(stop.count), outcome)
                bar.update()
            outcome.alike = outcome.alike or _one_reason(outcome)
            if stop.count != stop.passed_on:
                stop.passed_on = stop.count
                pool.signal(signal.SIGTERM if stop.count == 1 else signal.SIGKILL)
                tqdm.write("stopping: runs at work save first; once more kills them", file=sys.stderr)
    outcome.stopped, outcome.left = bool(stop.count), [*outcome.left, *todo]
    return outcome


def _account(run: Run, status: int, stopping: bool, outcome: Outcome) -> None:
    if status == 0 and has_finished(run):
        outcome.finished.append(run)
    elif status == _TAKEN_STATUS:
        outcome.elsewhere.append(run)
    elif status == 0 or stopping:
        outcome.left.append(run)
    else:
        killed = f"killed by {signal.Signals(-status).name}" if status < 0 else ""
        failure = Failure(run, killed or last_words(run.folder) or f"exit status {status}")
        outcome.failures.append(failure)
        tqdm.write(f"failed: {run.name}: {failure.reason} ({failure.log})", file=sys.stderr)


def _one_reason(outcome: Outcome) -> str:
    """The reason of all failures, where there are many and nothing has ever finished; otherwise nothing."""
    reasons = {failure.reason for failure in outcome.failures}
    many = len(outcome.failures) >= _ALIKE and not outcome.finished and not outcome.skipped
    return reasons.pop() if many and len(reasons) == 1 else ""


class _Stop:
    """Counts SIGINT and SIGTERM instead of dying of them. Off the main thread it does nothing."""

    def __init__(self) -> None:
        self.count = self.passed_on = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._note) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


class _Pool:
    """Processes at work, one to a place."""

    def __init__(self, places: list[Mapping[str, str]], discard_checkpoints: bool) -> None:
        self.free = places
        self.at_work: dict[BaseProcess, tuple[Run, Mapping[str, str]]] = {}
        self._discard = discard_checkpoints
        self._context = process_context("unifmoe_dist.train.main")

    def start(self, run: Run) -> None:
        place = self.free.pop(0)
        process = self._context.Process(target=_run_main, args=(run, dict(place), self._discard))
        before = {name: os.environ.get(name) for name in place}
        os.environ.update(place)  # before the process, or the server that forks it, first imports anything
        try:
            process.start()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
        self.at_work[process] = run, place

    def ended(self, timeout: float) -> list[tuple[Run, int]]:
        """Runs whose processes have ended, with their exit status; waits for one, but no longer than `timeout` s."""
        connection.wait([process.sentinel for process in self.at_work], timeout)
        result = []
        for process in [process for process in self.at_work if process.exitcode is not None]:
            run, place = self.at_work.pop(process)
            self.free.append(place)
            result.append((run, process.exitcode or 0))
            process.close()
        return result

    def signal(self, number: int) -> None:
        for process in self.at_work:
            if process.pid is not None and process.exitcode is None:
                os.kill(process.pid, number)


# -- inside a run's process -------------------------------------------------------------------------------------------


def _run_main(run: Run, place: Mapping[str, str], discard_checkpoints: bool) -> None:
    os.setsid()
    # One rank alone: port 0 is whichever is free when the rank begins to listen.
    for name in rank_environment(0, 1, port=0):
        os.environ.pop(name, None)
    os.environ.update(place, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    write_output_to(run.folder / "log.txt")
    _leave_with_parent()
    with locked(run.folder) as alone:
        status = _attempt(run, discard_checkpoints) if alone else _TAKEN_STATUS
        sys.stdout.flush()
        sys.stderr.flush()
        if status in (0, _TAKEN_STATUS):
            sys.exit(status)
        os._exit(status)  # not in order: with a live process group that could abort or wait


def _attempt(run: Run, discard_checkpoints: bool) -> int:
    started = time.monotonic()
    print(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {run.name}", flush=True)
    try:
        if state_of(run) is not State.FINISHED:  # another sweep may have been faster
            _train(run)
        if discard_checkpoints and has_finished(run):
            shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
    except UserError as error:
        print(f"error: {error}")
        return 2
    except BaseException:
        traceback.print_exc()
        return 1
    print(f"--- left after {time.monotonic() - started:.1f} s, CPU {time.process_time():.1f} s")
    return 0


def _train(run: Run) -> None:
    import torch

    from unifmoe_dist.train.main import train

    if not torch.cuda.is_available():
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    train(with_options(run.config, {"resume": "auto"}), patience=0)


def _leave_with_parent() -> None:
    """Have this run save and leave when the sweep that started it is gone."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()
