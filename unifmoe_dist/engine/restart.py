"""Runs whose job is started again by torchrun, Slurm or a person: the same command line, perhaps on other hosts."""

from __future__ import annotations

import secrets
import shutil
import socket
from pathlib import Path
from typing import Literal

from unifmoe_dist.engine.ranks import Ranks
from unifmoe_dist.errors import UserError


def resumes(resume: bool | Literal["auto"], run: Path) -> bool:
    """Whether the run is to go on from a checkpoint; with auto, whether it has one."""
    return any((run / "checkpoints").glob("step-*/manifest.json")) if resume == "auto" else resume


def clear_false_start(run: Path) -> None:
    """Remove what a run left that ended before its first checkpoint, so that it can begin anew."""
    for name in ("config.yaml", "metrics.jsonl"):
        (run / name).unlink(missing_ok=True)
    for name in ("tensorboard", "checkpoints"):
        shutil.rmtree(run / name, ignore_errors=True)


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
