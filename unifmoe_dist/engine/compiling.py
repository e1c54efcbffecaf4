"""Say that an extension of DeepSpeed is being compiled, or that another process holds the lock of its build.

torch compiles an extension at its first use, which takes about a minute, and says nothing. Meanwhile a file `lock` lies
in its folder, and other processes wait until it goes. One that was killed leaves it, and then they wait for ever.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SHARED_MEMORY = "deepspeed_shm_comm"
"""What DeepSpeed's sums over CPU ranks of one host need."""
CPU_ADAM = "cpu_adam"
"""What an offloaded optimiser needs."""

PATIENCE_SECONDS = 10.0  # before a wait for another process is worth a line
AGAIN_SECONDS = 60.0
TOGETHER_SECONDS = 5.0  # ranks of a job begin so close to one another: an older lock is another job's
_POLL_SECONDS = 0.2


@contextmanager
def announced(name: str, say: Callable[[str], None] | None = None) -> Iterator[None]:
    """Watch the build of an extension while the context lasts, and say what keeps it.

    Args:
        name: Of the extension.
        say: Takes each line; None prints on standard error, on the first rank of each host.
    """
    if say is None:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            yield
            return
        say = _print
    over = threading.Event()
    foreign = any(_age(lock) > TOGETHER_SECONDS for lock in _locks(name))
    watch = threading.Thread(target=_watch, args=(name, foreign, over, say), name="compiling", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()


def is_built(name: str = SHARED_MEMORY) -> bool:
    """Whether an extension has been compiled here before."""
    return any(lock.with_name(f"{name}.so").exists() for lock in _locks(name))


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _watch(name: str, foreign: bool, over: threading.Event, say: Callable[[str], None]) -> None:
    started, next_line = time.monotonic(), PATIENCE_SECONDS
    while not over.wait(_POLL_SECONDS):
        lock = next((lock for lock in _locks(name) if lock.exists()), None)
        if lock is None:
            foreign = False
        elif not foreign and not lock.with_name(f"{name}.so").exists() and next_line == PATIENCE_SECONDS:
            say(f"compiling DeepSpeed's {name}: once per environment, about a minute")
            next_line = PATIENCE_SECONDS + AGAIN_SECONDS
        elif time.monotonic() - started >= next_line:
            seconds = time.monotonic() - started
            say(f"waiting for {seconds:.0f} s for {'another process' if foreign else 'the process'} that compiles "
                f"DeepSpeed's {name} ({_left_by(lock)})")  # fmt: skip
            next_line = seconds + AGAIN_SECONDS


def _locks(name: str) -> list[Path]:
    """Where torch may keep the lock of an extension's build: it adds its CUDA version to the folder's name."""
    if given := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return [Path(given) / name / "lock"]
    from torch.utils.cpp_extension import get_default_build_root

    version = f"py{sys.version_info.major}{sys.version_info.minor}"
    return [folder / name / "lock" for folder in Path(get_default_build_root()).glob(f"{version}*")]


def _age(lock: Path) -> float:
    """Seconds since a lock was taken; 0 if there is none."""
    try:
        return time.time() - lock.stat().st_mtime
    except OSError:
        return 0.0


def _left_by(lock: Path) -> str:
    """What is known about a lock: who holds it, or that it may be removed."""
    with suppress(OSError):
        target = lock.resolve()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if any(entry.resolve() == target for entry in (process / "fd").iterdir()):
                    return f"process {process.name} is at it; its lock is {lock}"
    return f"no process of yours on this host is at it: if none on another host is either, delete {lock}"
