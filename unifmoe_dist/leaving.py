"""How a process that was a rank ends."""

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

_joined = False


def note_joined() -> None:
    """Remember that this process made a process group."""
    global _joined
    _joined = True


def leave_if_joined(status: int = 0) -> None:
    """`leave`, where this process made a process group."""
    if _joined:
        leave(status)


def leave(status: int = 0) -> NoReturn:
    """End this process, exit functions and buffered output included, without taking the interpreter down.

    gloo's threads run until nothing refers to their process group, and `destroy_process_group` does not change that:
    a model under DistributedDataParallel, DeepSpeed's engine, a loss that is still held, and defaults of functions in
    torch.distributed refer to it. An interpreter that goes down around these threads aborts at random ("terminate
    called without an active exception"), after the work has succeeded.
    """
    dist = sys.modules.get("torch.distributed")  # commands that never were a rank end without importing it
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter's own end does
    atexit._run_exitfuncs()
    if status == 0:
        _end_mpi()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # nobody may read it any more, or it is closed
            stream.flush()
    os._exit(status)


def _end_mpi() -> None:
    """As mpi4py does at the interpreter's own end, which does not come: without it mpirun takes a rank for failed.

    It waits for all ranks, so one that has failed does not call it, and mpirun ends the others.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
