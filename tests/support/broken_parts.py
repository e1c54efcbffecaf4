"""Parts of a check that fail in all ways in which one can."""

from __future__ import annotations

import os
import signal
import time

from unifmoe_dist.studies.gpu_check.record import DeviceLost, LeftOut, Record


def works(record: Record) -> None:
    record.row("numbers", "Numbers", {"": "one", "value": 1})
    record.find("it", "ok", "works")


def raises(record: Record) -> None:
    with record.attempt("a first thing"):
        raise ArithmeticError("the sum is wrong")
    record.find("a second thing", "ok", "is done all the same")


def crashes(record: Record) -> None:
    record.find("before", "ok", "this is kept")
    with record.attempt("a kernel"):
        os.kill(os.getpid(), signal.SIGSEGV)


def hangs(record: Record) -> None:
    with record.attempt("a wait"):
        time.sleep(1000)


def loses_the_device(record: Record) -> None:
    with record.attempt("a kernel"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    raise AssertionError(f"{DeviceLost} was to come")


def leaves_out(record: Record) -> None:
    with record.attempt("a choice"):
        raise LeftOut("there is no need")
    with record.attempt("a library"):
        import no_such_library  # noqa: F401
