"""What the folder of a sweep's run says: whose run it is, how far it got, and who is at work in it.

    run.json    task, held_out, method, seed and lr: written when the run is planned, so that a report knows what lacks
    sweep.lock  locked by the process that trains, with its id; the lock goes with the process, however it dies
    log.txt     all that the run printed, attempt after attempt

The rest is the run's own: config.yaml, checkpoints/, summary.json, ...
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from unifmoe_dist.config import TrainConfig
from unifmoe_dist.config.named import by_dotted_name
from unifmoe_dist.errors import UserError
from unifmoe_dist.files import take_lock, write_text
from unifmoe_dist.studies.records import plain, read_summary
from unifmoe_dist.studies.sweep.planned_runs import Run
from unifmoe_dist.train.old_runs import unwritten

# Options that do not change what a run finds.
_WITHOUT_EFFECT = (
    *("output", "resume", "progress", "log_every", "keep_checkpoints", "baseline"),
    *("data.root", "data.workers"),
)


class State(Enum):
    """How far a run got."""

    NEW = "to do"
    PARTIAL = "half done"
    FINISHED = "finished"


def state_of(run: Run) -> State:
    """How far a run got, with its options checked.

    Raises:
        UserError: the folder holds a run with other options, or something unreadable.
    """
    path = run.folder / "config.yaml"
    if not path.is_file():
        return State.NEW
    try:
        saved = saved_options(run.folder)
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError) as error:
        raise UserError(f"{path} is not the configuration of a run; delete {run.folder} or move it away.") from error
    saved = {**unwritten(saved), **saved}
    planned, default = (by_dotted_name(plain(config)) for config in (run.config, TrainConfig()))
    for name, value in planned.items():
        if name not in _WITHOUT_EFFECT and saved.get(name, default[name]) != value:
            raise UserError(
                f"{run.folder} holds a run with {name} {saved.get(name, default[name])}, not {value}; "
                "choose another --output, or delete that folder."
            )
    if has_finished(run):
        return State.FINISHED
    return State.PARTIAL if (run.folder / "checkpoints" / "latest").is_file() else State.NEW


def saved_options(folder: Path) -> dict[str, Any]:
    """Options of a run by dotted name, as its config.yaml has them."""
    return by_dotted_name(yaml.load((folder / "config.yaml").read_text(encoding="utf-8"), Loader=yaml.CSafeLoader))


def has_finished(run: Run) -> bool:
    """Whether there is a summary; where what is there is none, the run has to finish again."""
    return read_summary(run.folder, "wall_seconds") is not None


def prepare(run: Run) -> None:
    """Make the folder and say whose it is.

    Raises:
        UserError: the folder cannot be made.
    """
    identity = json.dumps(run.identity)
    path = run.folder / "run.json"
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_bytes() != identity.encode():
            write_text(path, identity)
    except OSError as error:
        raise UserError(f"--output: {run.folder} cannot be used ({error}); choose another folder.") from error


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Whether this process now is the only one to train in the folder; held while the context lasts."""
    with (folder / "sweep.lock").open("a+") as handle:
        if alone := take_lock(handle):
            handle.truncate(0)
            handle.write(str(os.getpid()))
            handle.flush()
        yield alone


def last_words(folder: Path) -> str:
    """The last line that a run printed, or nothing."""
    path = folder / "log.txt"
    lines = path.read_text(errors="replace").split("\n") if path.is_file() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
