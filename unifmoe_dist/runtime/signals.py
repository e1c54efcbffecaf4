"""What signals mean to a command: while it is imported, while it waits for a launcher, and while it trains.

The package imports this first, so that Ctrl-C ends a command without a traceback in the seconds that all the other
imports take. Signals that ask a run to save and leave are SIGTERM, SIGINT and SIGUSR1 (Slurm's `--signal=USR1@120`).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from unifmoe_dist import resources

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
COPIES_SECONDS = 1.0

_importing = False


def is_command() -> bool:
    """Whether this process is one of launch/ or the `unifmoe` command."""
    started = Path(sys.argv[0] if sys.argv else "")
    return started.name == "unifmoe" or started.absolute().parent == resources.folder("launch").absolute()


def while_importing() -> None:
    """If this process is a command, let Ctrl-C end it without a word for now."""
    global _importing
    if is_command() and _in_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _importing = True


def imported() -> None:
    """From here on the command itself says what an interruption means."""
    global _importing
    if _importing:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _importing = False


def wait_for(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program to its end, which Ctrl-C lets it choose; its exit status.

    The terminal sends Ctrl-C to the program too, which may want to save first.
    """
    before = signal.getsignal(signal.SIGINT)
    if _in_main_thread():
        signal.signal(signal.SIGINT, let_pass)  # a function, not SIG_IGN, which the program would inherit
    try:
        return subprocess.run(command, env=environment).returncode
    finally:
        if _in_main_thread():
            signal.signal(signal.SIGINT, before)


def let_pass(*_: object) -> None:
    """Handle a signal by doing nothing."""


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class StopSignals:
    """Context manager that notes stop signals instead of dying of them. Off the main thread it does nothing.

    The first signal is noted for the training loop to act on after its step. Launchers forward signals, so copies
    arrive together; the same signal again later means that somebody has lost patience: the process exits at once.
    """

    def __init__(self) -> None:
        self.received = 0  # number of the first signal
        self._first: dict[int, float] = {}
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if not _in_main_thread():
            return self
        # Python runs handlers between bytecodes of the main thread, which may be stuck in a collective. The
        # interpreter's own C handler writes the signal's number to this socket even then.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        if not self._before:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._writer.close()  # ends the watching thread

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number

    def _watch(self) -> None:
        while data := self._reader.recv(64):
            for number in data:
                if number not in SIGNALS:
                    continue
                if not self._first:
                    _say(signal.SIGINT if signal.SIGINT in data else number)  # launchers add their own
                first = self._first.setdefault(number, time.monotonic())
                if time.monotonic() - first > COPIES_SECONDS:
                    name = signal.Signals(number).name
                    print(f"second {name}: leaving at once, without saving", file=sys.stderr, flush=True)
                    os._exit(128 + number)
        self._reader.close()


def _say(number: int) -> None:
    """That the signal was heard, at once: the step may take long. Once per host."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        again = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        print(f"\nfinishing this step and saving; {again} again leaves at once", file=sys.stderr, flush=True)


while_importing()
