"""Signals that ask a run to save and leave: SIGTERM, SIGINT and SIGUSR1 (Slurm's `--signal=USR1@120`).

The first signal is noted for the training loop to act on after its step. Launchers forward signals, so copies arrive
together; the same signal again later means that somebody has lost patience, and the process exits at once.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
COPIES_SECONDS = 1.0


class StopSignals:
    """Context manager that notes stop signals instead of dying of them. Off the main thread it does nothing."""

    def __init__(self) -> None:
        self.received = 0  # number of the first signal
        self._first: dict[int, float] = {}
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        # Python runs handlers between bytecodes of the main thread, which may be stuck in a collective. The
        # interpreter's own C handler writes the signal's number to this socket even then.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
