"""Batches that worker processes make ahead of time, in a given order.

What a batch holds depends on its key alone, never on which worker makes it or when, so results are the same with any
number of workers.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from unifmoe_dist.errors import UserError

Key = TypeVar("Key")
Result = TypeVar("Result")

# Imported once, by the server process that workers are forked from.
_PRELOAD = ["__main__", "unifmoe_dist.data.images", "unifmoe_dist.train.batches"]


def read_ahead(
    read: Callable[[Key], Result], keys: Iterable[Key], workers: int, pin: bool = False
) -> Generator[Result, None, None]:
    """`read(key)` for every key, in order.

    Args:
        read: Picklable if there are workers.
        keys: May be endless; consumed only a few ahead.
        workers: Processes to read in; 0 reads here, when the next result is asked for.
        pin: Whether what workers have read is put into pinned memory as it comes, by a thread of this process.

    Raises:
        UserError: as raised by `read`, in whichever process; a worker was lost.
    """
    if workers == 0:
        yield from map(read, keys)
        return
    from unifmoe_dist.data import images

    # Not forked from this process: a copy of its sockets would hide its death from the other ranks, and CUDA does not
    # survive a fork. A generator of its own: by default a loader draws its seed from torch's global generator.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    loader = DataLoader(
        _Reads(read),
        sampler=keys,
        batch_size=None,
        num_workers=workers,
        pin_memory=pin,
        collate_fn=_as_it_is,
        multiprocessing_context=context,
        generator=torch.Generator(),
        worker_init_fn=partial(_prepare, os.getpid(), images.told_anywhere()),
    )
    try:
        for result in loader:
            if isinstance(result, _Refusal):
                raise UserError(result.message)
            yield result
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        why = str(error).splitlines()[0].rstrip(".")
        raise UserError(
            f"a process that reads data ahead was lost ({why}): memory or shared memory (/dev/shm) may be short; lower "
            "data.workers, or give a container more with --shm-size."
        ) from error


@dataclass(frozen=True)
class _Refusal:
    """A UserError in a worker: raised there, it would arrive wrapped in that process's traceback."""

    message: str


class _Reads(Dataset, Generic[Key, Result]):
    def __init__(self, read: Callable[[Key], Result]) -> None:
        self.read = read

    def __getitem__(self, key: Key) -> Result | _Refusal:
        try:
            return self.read(key)
        except UserError as error:
            return _Refusal(str(error))


def _as_it_is(value: Any) -> Any:
    return value


def _prepare(rank: int, told: Any, worker: int) -> None:
    """In a worker: let a stop signal to the whole job pass, so that its ranks can finish their step.

    Only the process `rank` may end this worker, as it does when it leaves; should it die, the worker notices too.
    """
    from unifmoe_dist.data import images

    images.know(told)
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_leave_when_told, args=(rank,), daemon=True).start()


def _leave_when_told(rank: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    os._exit(0)
