"""Run a command on several real ranks without a launcher: what each printed, how it ended, and how long that took."""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.ranks import PLOTS, _context
from unifmoe_dist.runtime.launchers import free_port
from unifmoe_dist.runtime.local_ranks import rank_environment, write_output_to
from unifmoe_dist.train.cli import run_main

ROOT = Path(__file__).parents[2]


@dataclass
class Job:
    """A finished job: exit status (negative: signal) and output of every rank, and the seconds it took."""

    statuses: list[int | None]
    outputs: list[str]
    seconds: float

    @property
    def output(self) -> str:
        return "\n".join(self.outputs)


def environment(**more: str) -> dict[str, str]:
    """Of a command that is started as users do. DeepSpeed would load torch's compiler in every process of it."""
    own = {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    return {**os.environ, **own, **more}


def draw(rank: int) -> None:
    """For `prepare`: the run draws its plots."""
    os.environ[PLOTS] = "1"


def enter(rank: int, folder: Path, names: dict[str, str]) -> None:
    """For `prepare`: the script runs in a folder, with more names in its environment."""
    os.chdir(folder)
    os.environ.update(names)
    sys.path[:0] = [path for path in names.get("PYTHONPATH", "").split(os.pathsep) if path]


def _command(
    rank: int, world: int, port: int, log: str, words: Sequence[str], prepare: Callable | None, args: tuple, script: str
) -> None:
    write_output_to(log)
    for name in rank_environment(rank, world, port):
        os.environ.pop(name, None)
    if world > 1:
        os.environ.update(rank_environment(rank, world, port))
    sys.path.insert(0, str(ROOT / "launch"))
    sys.argv = [script, *words]
    if prepare is not None:
        prepare(rank, *args)
    if script.endswith(".py"):
        runpy.run_path(script, run_name="__main__")
    else:
        run_main(__import__(script).main)


class RunningJob:
    """Ranks at work on a command of launch/, or on a script by its path. `prepare(rank, *args)` runs in each first."""

    def __init__(
        self,
        folder: Path,
        world: int,
        words: Sequence[str],
        prepare: Callable | None = None,
        *args: Any,
        script: str = "train",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.logs = [folder / f"rank-{rank}.log" for rank in range(world)]
        for log in self.logs:
            log.unlink(missing_ok=True)  # of a job before
        port, self.started = free_port(), time.monotonic()
        self.processes = []
        for rank, log in enumerate(self.logs):
            process = _context.Process(
                target=_command, args=(rank, world, port, str(log), list(words), prepare, args, script)
            )
            process.start()
            self.processes.append(process)

    def finish(self, timeout: float = 120) -> Job:
        """Wait for all ranks; one that still runs after `timeout` seconds is a hang, and fails the test."""
        try:
            for process in self.processes:
                process.join(max(0.1, timeout + self.started - time.monotonic()))
            statuses = [process.exitcode for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
                process.join()
        outputs = [log.read_text(errors="replace") if log.exists() else "" for log in self.logs]
        assert None not in statuses, f"a rank hangs: {statuses}\n" + "\n".join(outputs)
        return Job(statuses, outputs, time.monotonic() - self.started)


def run_job(
    folder: Path,
    world: int,
    words: Sequence[str],
    prepare: Callable | None = None,
    *args: Any,
    timeout: float = 120,
    script: str = "train",
) -> Job:
    return RunningJob(folder, world, words, prepare, *args, script=script).finish(timeout)


def run_example(name: str, folder: Path, *words: str, ranks: int = 1, **names: str) -> str:
    """What a script of examples/ prints that runs to its end in a folder, with more names in its environment."""
    script = str(ROOT / "examples" / name)
    job = run_job(folder / "output", ranks, words, enter, folder, names, timeout=280, script=script)
    assert job.statuses == [0] * ranks, job.output[-4000:]
    return job.output
