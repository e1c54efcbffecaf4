"""A line every half minute from a command whose output is no terminal: there nobody sees its bars.

with beating():
    doing("reading the data")
"""

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

Thing = TypeVar("Thing")

SECONDS = 30.0
_POLL_SECONDS = 0.5


class _Heart:
    def __init__(self) -> None:
        self.what, self.started = "", time.monotonic()
        self.heard, self.over = self.started, threading.Event()

    def beat(self) -> None:
        while not self.over.wait(min(_POLL_SECONDS, SECONDS)):
            now = time.monotonic()
            if self.what and now - self.heard >= SECONDS and os.environ.get("RANK", "0") == "0":
                self.heard = now
                print(f"[{_clock(now - self.started)}] {self.what}", file=sys.stderr, flush=True)


_heart: _Heart | None = None  # a process runs one command


@contextmanager
def beating() -> Iterator[None]:
    """Say every half minute what the command is at, on rank 0, once it has told (`doing`).

    Nothing is said where standard error is a terminal, and after each line of the command's own the time begins anew.
    """
    global _heart
    if _heart is not None or sys.stderr is None or sys.stderr.isatty():
        yield
        return
    heart = _heart = _Heart()
    thread = threading.Thread(target=heart.beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        _heart = None
        heart.over.set()
        thread.join()


def doing(what: str) -> None:
    """What the command is at from now on; says nothing by itself."""
    if _heart is not None:
        _heart.what = what


def hush() -> None:
    """Say nothing any more."""
    global _heart
    if _heart is not None:
        _heart.over.set()
        _heart = None


def heard() -> None:
    """The command has just said something: the half minute begins anew."""
    if _heart is not None:
        _heart.heard = time.monotonic()


def followed(things: Sequence[Thing], what: str) -> Iterator[Thing]:
    """The things, one by one, with a bar on a terminal and their number in the lines elsewhere."""
    from tqdm import tqdm  # which takes as long as all else that help needs of this package

    for number, thing in enumerate(tqdm(things, desc=what, disable=None, leave=False)):
        doing(f"{what}: {number} of {len(things)} done")
        yield thing


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
