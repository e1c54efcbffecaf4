"""Ctrl-C in a command: no traceback while its modules are imported, or from a launcher that it waits for.

The package imports this first, so that it acts before the seconds that all the others take.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

_importing = False


def while_importing() -> None:
    """If this process is one of launch/ or the `unifmoe` command, let Ctrl-C end it without a word for now."""
    global _importing
    started = Path(sys.argv[0] if sys.argv else "")
    ours = started.name == "unifmoe" or started.absolute().parent == Path(__file__).absolute().parents[1] / "launch"
    shipped = started.absolute().parent == Path(__file__).absolute().parent / "launch"
    in_main = threading.current_thread() is threading.main_thread()
    if (ours or shipped) and in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
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
    if threading.current_thread() is not threading.main_thread():
        return subprocess.run(command, env=environment).returncode
    before = signal.signal(signal.SIGINT, let_pass)  # a function, not SIG_IGN, which the program would inherit
    try:
        return subprocess.run(command, env=environment).returncode
    finally:
        signal.signal(signal.SIGINT, before)


def let_pass(*_: object) -> None:
    """Handle a signal by doing nothing."""


while_importing()
