"""Runs whose job is started again by torchrun, Slurm or a person: the same command line, perhaps on other hosts.

Nothing that a run, or anything else, has left in a folder is deleted here.
"""

from __future__ import annotations

import secrets
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from unifmoe_dist.errors import UserError
from unifmoe_dist.files import take_lock

if TYPE_CHECKING:
    from unifmoe_dist.runtime.ranks import Ranks

_POLL_SECONDS = 0.5


def resumes(resume: bool | Literal["auto"], run: Path) -> bool:
    """Whether the run is to go on from a checkpoint; with auto, whether it has one, or has named one that is lost."""
    checkpoints = run / "checkpoints"
    if resume == "auto":
        return (checkpoints / "latest").is_file() or any(checkpoints.glob("step-*/manifest.json"))
    return resume


def agree(resume: bool | Literal["auto"], run: Path, ranks: Ranks) -> bool:
    """`resumes`, as all ranks see it; collective.

    Raises:
        UserError: they do not see the same.
    """
    seen = ranks.gather(resumes(resume, run))
    if len(set(seen)) > 1:
        blind = ", ".join(str(rank) for rank, found in enumerate(seen) if not found)
        raise UserError(
            f"ranks {blind} do not see the checkpoints in {run} that others see; start the job again once "
            "the storage shows the same on all hosts."
        )
    return seen[0]


def check_free(run: Path) -> None:
    """See that a run that begins in a folder would write over no other's work.

    Raises:
        UserError: there are checkpoints or parts of some, or the summary of a run.
    """
    checkpoints = run / "checkpoints"
    for path in (*sorted(checkpoints.glob("step-*")), checkpoints / "latest", checkpoints / "best"):
        if path.exists():
            raise UserError(
                f"{path} is there, and a run that begins in {run} would delete it: add --resume if it is that run's "
                f"and whole; otherwise move {checkpoints} away or choose another --output."
            )
    if (run / "summary.json").exists():
        raise UserError(
            f"{run} holds the summary of a run, but no checkpoint; move it away or choose another --output."
        )


def set_aside(run: Path, config: str) -> None:
    """Keep what is in a folder where a run begins from being written over or mixed with what the run records.

    `config` is what the run will write into config.yaml; a file that says the same may stay.
    """
    path, metrics = run / "config.yaml", run / "metrics.jsonl"
    if path.is_file() and path.read_bytes() != config.encode():
        shutil.copy2(path, unused(path))  # the command line may name it, so it must not vanish for a moment
    if metrics.is_file():
        metrics.rename(unused(metrics))


def unused(path: Path) -> Path:
    """The first of name-1.ext, name-2.ext, ... that does not exist."""
    names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in count(1))
    return next(name for name in names if not name.exists())


@contextmanager
def only_writer(run: Path, ranks: Ranks, patience: float) -> Iterator[bool]:
    """Hold a run's folder for this job, until the context or rank 0 ends, however it does; collective.

    Yields whether another job had it first. File systems that know no locks are trusted.

    Raises:
        UserError: another job still has it after `patience` seconds: ranks that a cut cable has left behind last a
            while.
    """
    waited, reason = False, ""
    with _lock_file(run) if ranks.rank == 0 else nullcontext() as lock:
        limit = time.monotonic() + patience
        while lock is not None and not take_lock(lock):
            if time.monotonic() >= limit:
                reason = _taken(run)
                break
            if not waited:
                print(f"another job still writes into {run}; waiting for its end", file=sys.stderr, flush=True)
            waited = True
            time.sleep(_POLL_SECONDS)
        waited, reason = ranks.gather((waited, reason))[0]
        if reason:
            raise UserError(reason)
        yield waited


def refuse_taken(run: Path) -> None:
    """See that no other job writes there; not for a process that holds the folder itself, which would lose it.

    Raises:
        UserError: one does.
    """
    with suppress(OSError), (run / ".lock").open("r+") as lock:  # there is none, or it may not be opened
        if not take_lock(lock):
            raise UserError(_taken(run))


def _taken(run: Path) -> str:
    return f"another job writes into {run}; wait for its end, or choose another --output."


def _lock_file(run: Path) -> Any:
    try:
        run.mkdir(parents=True, exist_ok=True)
        return (run / ".lock").open("a")
    except OSError:
        return nullcontext()  # whoever writes there next says what is wrong


def check_shared(run: Path, ranks: Ranks) -> None:
    """See that all hosts write to one folder; collective.

    Raises:
        UserError: a host has a folder of its own under that name.
    """
    hosts = ranks.gather(socket.gethostname())
    if len(set(hosts)) == 1:
        return
    token = ranks.share(secrets.token_hex(8))
    firsts = sorted(hosts.index(host) for host in set(hosts))
    marks = {first: run / f".seen-{token}-{first}" for first in firsts}
    if ranks.rank in marks:
        run.mkdir(parents=True, exist_ok=True)
        marks[ranks.rank].touch()
    ranks.barrier()
    strange = [hosts[first] for first in firsts if not marks[first].exists()] if ranks.rank == 0 else []
    strange = ranks.gather(strange)[0]
    if ranks.rank in marks:
        marks[ranks.rank].unlink(missing_ok=True)
    if strange:
        raise UserError(
            f"{run} on {', '.join(strange)} is not the folder {run} on {hosts[0]}, where rank 0 writes: give an "
            "--output on storage that all hosts share."
        )
